"""What the scripts refuse, before anything starts. Those of run.sub: test_run_sub.py."""

import pytest
from launch_scripts import assert_refused, presets
from script_flags import empty, make_folders

# The first 20 arguments of the same script in NVIDIA's PyTorch recipe, and these here.
PYTORCH = (
    "8192 6e-3 fp16 8 0.2843 7038 200 false true true 128 42 job true true 4096 4e-3 0.128 1563 256"
)
PYTORCH_README = PYTORCH.replace("true true 4096", "true true true 4096")  # accumulate_into_fp16
# The 31 arguments in NVIDIA's Paddle recipe; 21 to 27 make LDDL's data.
PADDLE = (
    "256 6e-3 amp 8 0.2843 7038 200 false 32 42 job 32 4e-3 0.128 1563 128 d1 d2 . None "
    "wiki 8 128 4 0.9 64 static x.json true 10 5"
)
PADDLE_HERE = PADDLE.replace("wiki 8 128 4 0.9 64 static ", "")
PYTORCH_HERE = "64 6e-3 fp16 8 0.2843 7038 200 true 128 42 job 16 4e-3 0.128 1563 256"
COMMAND = "PATH[$(touch made)]"  # which arithmetic in bash would run


@pytest.fixture
def checkout(checkout, tmp_path):
    make_folders(tmp_path)
    for step in ("200", "400"):
        (tmp_path / "results/bert-large-uncased/phase1" / step).mkdir(parents=True)
    return checkout


# Script: arguments, words of the error, and settings in the environment.
BAD = {
    "run_pretraining.sh": [
        ("0", ["train_batch_size", "'0'", "at least 1"]),
        ("64 fast", ["learning_rate", "'fast'"]),
        (empty(2, "half"), ["precision", "'half'", "amp, fp16, bf16, fp32, tf32"]),
        (empty(3, "9"), ["num_gpus", "9", "has 8"]),
        (empty(4, "1.5"), ["warmup_proportion", "'1.5'"]),
        (empty(7, "yes"), ["create_logfile", "'yes'"]),
        ("--max-steps 5", ["--max-steps", "positional"]),
        (empty(10, "a/b"), ["job_name", "'a/b'", "plain name"]),
        (empty(16, "nowhere"), ["dataset_dir_phase1", "nowhere", "does not exist", "docs/data.md"]),
        (empty(19, "nowhere"), ["init_checkpoint_dir", "nowhere does not exist: check the path\n"]),
        (empty(32), ["32", "24"]),
        (PADDLE, ["22.12", "21 to 27", f": bash scripts/run_pretraining.sh {PADDLE_HERE}\n"]),
        (
            PADDLE.removesuffix(" true 10 5"),
            [f": bash scripts/run_pretraining.sh {PADDLE_HERE.removesuffix(' true 10 5')}\n"],
        ),
        (
            PADDLE.partition(" 128 4 0.9")[0],
            [f": bash scripts/run_pretraining.sh {PADDLE_HERE.partition(' x.json')[0]}\n"],
        ),
        (
            f"{PYTORCH} d1 d2",
            ["PyTorch", f": bash scripts/run_pretraining.sh {PYTORCH_HERE} d1 d2\n"],
        ),
        (PYTORCH_README, [f": bash scripts/run_pretraining.sh {PYTORCH_HERE}\n"]),
        ("", ["PHASE", "'3'"], {"PHASE": "3"}),
        ("", ["EXTRA_ARGS"], {"EXTRA_ARGS": "--eval-dir 'a b"}),
        # A checkpoint of the run itself that is not its newest one.
        (
            empty(19, "results/bert-large-uncased/phase1/200"),
            ["argument 20", "step 200", "at step 400", "None"],
        ),
        # Nodes and processes that cannot meet.
        ("", ["MASTER_ADDR"], {"NNODES": "2"}),
        ("", ["NNODES"], {"NNODES": COMMAND}),
        ("", ["NODE_RANK"], {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}),
        ("", ["NNODES"], {"NNODES": f"1:{COMMAND}", "RDZV_ENDPOINT": "a:1"}),
        ("", ["NNODES"], {"NNODES": "4:1", "RDZV_ENDPOINT": "a:1"}),
        ("", ["RDZV_ENDPOINT"], {"NNODES": "1:4", "MASTER_ADDR": "a"}),
        ("", ["HOST:PORT"], {"NNODES": "1:4", "RDZV_ENDPOINT": "a"}),
        ("", ["a range, as 1:4"], {"NNODES": "2", "RDZV_ENDPOINT": "a:1"}),
        (
            "$(source scripts/configs/pretrain_config.sh && x900)",
            ["x900", *presets("pretrain_config.sh")],
        ),
    ],
    "run_squad.sh": [
        ("", ["init_checkpoint", "results/bert-large-uncased/phase2 does not exist"]),
        ("requirements.txt", ["requirements.txt is a file, not a folder", "convert_checkpoint.py"]),
        (
            "init 2 32 1e-5 0.1 amp 1 1 nowhere",
            ["squad_dir", "nowhere", "create_datasets_from_start.sh squad"],
        ),
        ("init 2 32 1e-5 0.1 amp 1 1 init", ["squad_dir", "init/train-v2.0.json"]),
        ("init 2 32 1e-5 0.1 amp 1 1 '' '' '' test", ["mode", "'test'", "train_eval"]),
        (f"init {empty(17)}", ["18", "17", "fuse_mha"]),
        (
            "init 2.0 4 3e-5 fp16 8 1 d1 '' out 'train eval'",
            [
                "PyTorch",
                ": bash scripts/run_squad.sh init 2.0 4 3e-5 0.1 fp16 8 1 d1 '' out train\\ eval",
            ],
        ),
        (
            "5 5e-6 fp32 8 init 2",
            ["PyTorch", ": bash scripts/run_squad.sh init 2 5 5e-6 0.1 fp32 8\n"],
        ),
        (
            "$(source scripts/configs/squad_config.sh && dgxa100-80g_8gpu_fp16)",
            ["use dgxa100-80g_8gpu_amp"],
        ),
        (
            "$(source scripts/configs/squad_config.sh && x900)",
            ["x900", *presets("squad_config.sh")],
        ),
    ],
    "run_glue.sh": [
        (
            "init nowhere",
            ["data_dir", "nowhere", "does not exist", "create_datasets_from_start.sh glue"],
        ),
        ("init '' '' '' '' imdb", ["task_name", "imdb", "mrpc"]),
        ("init '' '' '' '' '' 1 16 3", ["batch_size", "16", "3"]),
        (
            "$(source scripts/configs/glue_config.sh && mrpc_dgxa100-80g_8gpu_fp16)",
            ["use dgxa100-80g_8gpu_amp mrpc,"],
        ),
        (
            "$(source scripts/configs/glue_config.sh && sst-2_dgxa100-80g_8gpu_tf32)",
            ["use dgxa100-80g_8gpu_tf32 sst-2"],
        ),
        ("$(source scripts/configs/glue_config.sh && x900)", ["x900", *presets("glue_config.sh")]),
        # No `hf` to download the model with.
        ("", ["pip install huggingface_hub", "hf dow"], {"PATH": "{bin}:/usr/bin:/bin"}),
    ],
    "run_squad_deepspeed.sh": [
        ("5 init data/sample/squad out", ["num_gpus", "24"]),
        ("1 nowhere data/sample/squad out", ["model_file", "nowhere"]),
        ("1 init data/sample/squad", ["output_dir"]),
        ("1 init data/sample/squad out 3e-5 1 port", ["master_port", "port"]),
        ("1 post-ln data/sample/squad out", ["model_file", "not a pre-LN BERT", "run_squad.sh"]),
        ("0 init data/sample/squad out", ["NNODES"], {"NNODES": COMMAND}),
        ("0 init data/sample/squad out", ["one node"], {"NNODES": "2", "MASTER_ADDR": "a"}),
    ],
    "run_pretraining_p1.sh": [("", ["NUM_GPUS is", "or all"], {"NUM_GPUS": COMMAND})],
    "docker/launch.sh": [
        ("bash scripts/run_squad.sh", ["put the command in quotes"]),
        ("bash scripts/run_squad.sh init 2", ["put the command in quotes"]),
        ("", ["RESULTS_DIR"], {"RESULTS_DIR": "requirements.txt"}),
        ("", ["NNODES, NODE_RANK and MASTER_ADDR"], {"SLURM_STEP_NUM_NODES": "2"}),
    ],
    "run_modernbert.sh": [
        ("nothing.json", ["config_file", "nothing.json"]),
        ("'' Lamb", ["optimizer", "AdamW, Muon, NorMuon"]),
        ("", ["PHASE is for run_pretraining.sh"], {"PHASE": "2"}),
        ("", ["DOCTOR is 'yes'", "set it to 1"], {"DOCTOR": "yes"}),
        (
            "$(source scripts/configs/modernbert_config.sh && x900)",
            ["x900", *presets("modernbert_config.sh")],
        ),
    ],
    "pretrain_from_texts.sh": [
        ("d1 out", ["the minutes decide"], {"EXTRA_ARGS": words})
        for words in ("--max_steps=9", "--benchmark", "--estimate-memory 80")
    ],
    "continue_pretraining.sh": [
        ("post-ln d1", ["argument 3 (out_dir) is missing"]),
        ("post-ln nowhere law", ["corpus", "nowhere does not exist"]),
        ("post-ln d1 law '' '' '' '' '' fast", ["learning_rate", "'fast'"]),
        ("post-ln d1 law '' '' 0", ["train_steps", "'0'"]),
        ("init d1 law", ["init holds neither model.safetensors"]),
        ("post-ln d1 law", ["PHASE is for run_pretraining.sh"], {"PHASE": "2"}),
        (
            "post-ln d1 law",
            ["TASK_FILE: the file none.csv does not exist"],
            {"TASK_FILE": "none.csv"},
        ),
        (
            "post-ln d1 law",
            ["OBJECTIVE is 'words'", "masked_words, neighbours"],
            {"OBJECTIVE": "words"},
        ),
        ("sentences d1 law 500", ["argument 4 is for masked words"]),
        (
            "post-ln d1 law '' '' '' '' '' '' '' '' stable_checkpoint",
            ["argument 12 is for masked words"],
            {"OBJECTIVE": "neighbours"},
        ),
    ],
}


# Of each script, arguments of which some begin with a dash: `find` would take the first for an
# expression.
DASHES = {
    "run_pretraining.sh": [
        empty(16, "-delete"),
        empty(19, "-delete"),
        "8192 '' '' '' '' '' '' '' true '' '' '' '' '' '' '' '' '' '' '' -delete",
    ],
    "run_modernbert.sh": ["-delete", empty(14, "-delete")],
    "run_squad.sh": ["-delete", f"init {empty(11, '-delete')}", "init '' '' '' amp '' '' -delete"],
    "run_squad_deepspeed.sh": ["1 -delete data/sample/squad out", "1 init -delete -1"],
    "run_glue.sh": ["-delete", "init -delete"],
    "run_glue_suite.sh": ["-delete", "init -delete", "init data -1"],
    "continue_pretraining.sh": ["-delete d1 law", "post-ln -delete law", "post-ln d1 -1"],
    "create_certificates.sh": ["-delete", "--help"],
    "docker/build.sh": ["-delete"],
}


@pytest.mark.parametrize(
    ("script", "arguments"), [(script, row) for script, rows in DASHES.items() for row in rows]
)
def test_a_name_that_begins_with_a_dash_is_no_flag(checkout, script, arguments):
    for name in ("-delete", "-1"):
        (checkout.folder / name).mkdir()
    before = sorted(checkout.folder.rglob("*"))
    assert_refused(checkout.run(f"bash scripts/{script} {arguments}"), checkout)
    assert sorted(checkout.folder.rglob("*")) == before


def test_folders_in_the_environment_may_begin_with_a_dash(checkout):
    for phase in ("128_pred_20", "512_pred_80"):
        (checkout.folder / f"-data/hdf5/seq_{phase}/training").mkdir(parents=True)
    settings = {"RESULTS_DIR": "-delete", "BERT_PREP_WORKING_DIR": "-data", "CDPATH": "init:."}
    result = checkout.run("bash scripts/run_pretraining.sh", **settings)
    assert result.returncode == 0, result.stderr
    assert [path.name for path in (checkout.folder / "-delete").iterdir()] == ["bert-large-uncased"]


@pytest.mark.parametrize(
    ("script", "row"), [(script, row) for script, rows in BAD.items() for row in rows]
)
def test_a_script_refuses(checkout, script, row):
    arguments, words, *settings = row
    binaries = checkout.folder / "bin"
    settings = {name: value.format(bin=binaries) for name, value in dict(*settings).items()}
    assert_refused(checkout.run(f"bash scripts/{script} {arguments}", **settings), checkout, *words)
    assert not (checkout.folder / "made").exists()
