"""What the arguments, presets and variables of the launch scripts become: a command line a row, and
the flags that the programs get, or the error.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from conftest import ROOT
from launch_scripts import presets, processes_of, program_arguments
from script_flags import NVIDIA_SHARDS, OUR_SHARDS, Run, assert_flags, empty, make_folders, start

LARGE = "bert-large-uncased"
MINI = "bert_configs/bert-mini-uncased.json"
VOCAB = "vocab/bert-base-uncased-vocab.txt"


@pytest.fixture
def checkout(checkout, tmp_path):
    make_folders(tmp_path)
    return checkout


RECIPE = (
    f"bert_model={LARGE} optimizer=Lamb amp=True amp_dtype=None tf32=False processes=8 seed=12439 "
)
RECIPE += "num_steps_per_checkpoint=200 "
PHASE_1 = f"{RECIPE} batch_size=256 gradient_merge_steps=32 max_steps=7038 learning_rate=0.006 "
PHASE_1 += "warmup_proportion=0.2843 max_seq_length=128 max_predictions_per_seq=20"
PHASE_2 = f"{RECIPE} batch_size=32 gradient_merge_steps=128 max_steps=1563 learning_rate=0.004 "
PHASE_2 += "warmup_proportion=0.128 max_seq_length=512 max_predictions_per_seq=80"
ELASTIC = {"NNODES": "1:4", "RDZV_ENDPOINT": "host:29400"}

# Claim: command, variables, and the flags of each call.
RUNS = {
    "pretraining: the recipe of eight GPUs": ("run_pretraining.sh", {}, PHASE_1, PHASE_2),
    "pretraining: each position": (
        "run_pretraining.sh 11 0.5 fp32 0 0.25 12 13 false 14 15 job 16 .75 1e-1 17 18 d1 d2 . "
        f"init {MINI} false",
        {},
        "phase1=True phase2=False num_steps_per_checkpoint=13 seed=15 device=cpu amp=False "
        f"config_file={MINI} model=bert-mini-uncased benchmark=False batch_size=11 "
        "learning_rate=0.5 warmup_proportion=0.25 max_steps=12 gradient_merge_steps=14 "
        "input_dir=d1 from_pretrained_params=init",
        "phase1=False phase2=True num_steps_per_checkpoint=13 seed=15 device=cpu amp=False "
        f"config_file={MINI} model=bert-mini-uncased benchmark=False batch_size=16 "
        "learning_rate=0.75 warmup_proportion=0.1 max_steps=17 gradient_merge_steps=18 "
        "input_dir=d2 from_pretrained_params=None",
    ),
    "pretraining: phase 2 starts from the last step of phase 1": (
        "run_pretraining.sh 32 6e-3 fp32 0 .1 50",
        {"RESULTS_DIR": "out"},
        f"from_phase1_final_params=None from_checkpoint=out/{LARGE}/phase1 "
        "last_step_of_checkpoint=auto",
        f"from_phase1_final_params=out/{LARGE}/phase1/50 from_checkpoint=out/{LARGE}/phase2 "
        "last_step_of_checkpoint=auto",
    ),
    "pretraining: a benchmark measures both phases from random weights": (
        f"run_pretraining.sh {empty(21, 'true', '7', '3')}",
        {"FAKE_STOPS_EARLY": "1"},
        *["benchmark=True benchmark_steps=7 benchmark_warmup_steps=3 from_phase1_final_params=None"]
        * 2,
    ),
    "pretraining: variables": (
        "run_pretraining.sh",
        {
            "BERT_MODEL": "bert-base-cased",
            "EVAL_DIR_PHASE1": "held-out",
            "EVAL_DIR_PHASE2": "held-out",
            "EXTRA_ARGS": "--log-freq 3 --eval-steps 5",
        },
        *[
            "bert_model=bert-base-cased vocab_file=vocab/bert-base-cased-vocab.txt "
            "eval_dir=held-out log_freq=3 eval_steps=5"
        ]
        * 2,
    ),
    "pretraining: own data in the working folder": (
        "run_pretraining.sh",
        {"BERT_PREP_WORKING_DIR": "ours"},
        *[f"input_dir=ours/{name}" for name in OUR_SHARDS],
    ),
    "pretraining: NVIDIA's data in the working folder": (
        "run_pretraining.sh",
        {"BERT_PREP_WORKING_DIR": "theirs"},
        *[f"input_dir=theirs/{name}" for name in NVIDIA_SHARDS],
    ),
    "phase 1 by name finds NVIDIA's data": (
        "run_pretraining_p1.sh",
        {"BERT_PREP_WORKING_DIR": "theirs"},
        f"input_dir=theirs/{NVIDIA_SHARDS[0]} {PHASE_1}",
    ),
    "phase 2 by name finds NVIDIA's data": (
        "run_pretraining_p2.sh",
        {"BERT_PREP_WORKING_DIR": "theirs"},
        f"input_dir=theirs/{NVIDIA_SHARDS[1]} {PHASE_2}",
    ),
    "pretraining: phase 1 alone": (
        "run_pretraining.sh 32 6e-3 fp32 0 .1 50",
        {"PHASE": "1"},
        "phase2=False from_phase1_final_params=None",
    ),
    "pretraining: phase 2 alone": (
        "run_pretraining.sh 32 6e-3 fp32 0 .1 50",
        {"PHASE": "2"},
        f"phase2=True from_phase1_final_params=results/{LARGE}/phase1/50",
    ),
    "pretraining: phase 2 alone from other weights": (
        f"run_pretraining.sh {empty(19, 'init')}",
        {"PHASE": "2"},
        "phase2=True from_phase1_final_params=init",
    ),
    "pretraining: the run's own folder as the start resumes": (
        f"run_pretraining.sh {empty(19, f'results/{LARGE}/phase1')}",
        {},
        f"from_pretrained_params=None from_checkpoint=results/{LARGE}/phase1",
        "",
    ),
    "pretraining: the run's newest checkpoint as the start resumes": (
        f"mkdir results/{LARGE}/phase1/200 results/{LARGE}/phase1/400; run_pretraining.sh "
        f"{empty(19, f'results/{LARGE}/phase1/400')}",
        {},
        f"from_pretrained_params=None from_checkpoint=results/{LARGE}/phase1",
        "",
    ),
    "pretraining: the global batch is that of all nodes at any number of them": (
        "run_pretraining.sh 2 '' '' 8 '' '' '' '' 16 '' '' 2 '' '' '' 32",
        ELASTIC,
        f"batch_size=2 global_batch_size={2 * 16 * 8 * 4}",
        f"batch_size=2 global_batch_size={2 * 32 * 8 * 4}",
    ),
    "pretraining: an estimate of the memory is no unfinished phase": (
        "run_pretraining.sh",
        {"FAKE_STOPS_EARLY": "1", "EXTRA_ARGS": "--estimate-memory 8"},
        *["estimate_memory=8"] * 2,
    ),
    "pretraining: a results folder with a hyphen is no flag": (
        "run_pretraining.sh",
        {"RESULTS_DIR": "-x"},
        *["output_dir=-x"] * 2,
    ),
    **{
        f"pretraining: a config file names the model {model}": (
            f"run_pretraining.sh 32 6e-3 fp32 0 .1 50 {empty(14, f'bert_configs/{model}.json')}",
            {},
            f"model={model} from_checkpoint=results/{model}/phase1",
            f"model={model} from_checkpoint=results/{model}/phase2 "
            f"from_phase1_final_params=results/{model}/phase1/50",
        )
        for model in (LARGE, "bert-tiny-uncased")
    },
    "squad: each position": (
        f"run_squad.sh init 3.5 4 5e-5 0.3 fp32 0 6 data/sample/squad {VOCAB} out train_eval "
        f"{MINI} 7 true 8 9",
        {},
        "from_pretrained_params=init epochs=3.5 batch_size=4 predict_batch_size=4 "
        f"learning_rate=5e-05 warmup_proportion=0.3 amp=False device=cpu seed=6 vocab_file={VOCAB} "
        f"output_dir=out config_file={MINI} max_steps=7 !bert_model benchmark=True "
        "benchmark_steps=8 benchmark_warmup_steps=9 train_file=data/sample/squad/train-v1.1.json "
        "predict_file=data/sample/squad/dev-v1.1.json",
    ),
    "squad: log and report have NVIDIA's names": (
        f"run_squad.sh init {empty(4, 'fp16', '2')}",
        {},
        "report_file=results/dllogger_2_fp16.json log_freq=100",
    ),
    "squad: the global batch is that of all nodes at any number of them": (
        "run_squad.sh init 2 3 '' '' '' 8",
        ELASTIC,
        f"batch_size=3 global_batch_size={3 * 8 * 4}",
    ),
    "squad: version 2.0": (
        f"run_squad.sh init {empty(5, '1')} '' data/sample/squad",
        {"SQUAD_VERSION": "2.0"},
        "version_2_with_negative=True predict_file=data/sample/squad/dev-v2.0.json",
    ),
    "squad: data in the working folder": (
        "run_squad.sh init",
        {"BERT_PREP_WORKING_DIR": "prepared"},
        "train_file=prepared/download/squad/v1.1/train-v1.1.json",
    ),
    **{
        f"squad: mode {mode}": (
            f"run_squad.sh init {empty(1, '32')} {empty(3, '1')} {empty(4, shlex.quote(mode))}",
            {},
            f"tasks={tasks} resume_from_checkpoint={'train' in tasks} {files}",
        )
        for mode, tasks, files in (
            ("train", "train", "predict_file=None"),
            ("eval", "eval", "train_file=None predict_batch_size=32"),
            ("prediction", "predict", "predict_batch_size=32"),
            ("train_eval", "train+eval", "predict_batch_size=32"),
            ("train eval", "train+eval", ""),
        )
    },
    "glue: each position": (
        f"run_glue.sh init data/download/glue/CoLA {VOCAB} {MINI} out CoLA 0 8 2 5e-5 0.3 2.5 7 "
        "fp32 6 'train eval prediction'",
        {},
        f"from_pretrained_params=init data_dir=data/download/glue/CoLA vocab_file={VOCAB} "
        f"config_file={MINI} output_dir=out task_name=cola device=cpu seed=6 max_steps=7 "
        "epochs=2.5 "
        # NVIDIA's batch size is that of an update: the accumulation steps divide it.
        "batch_size=4 gradient_merge_steps=2 predict_batch_size=8 learning_rate=5e-05 "
        "warmup_proportion=0.3 amp=False tasks=train+eval+predict resume_from_checkpoint=True",
    ),
    "glue: NVIDIA's defaults": (
        "run_glue.sh init '' '' '' '' None",
        {},
        "task_name=mrpc output_dir=results/MRPC epochs=3.0 max_steps=-1 batch_size=16 "
        "gradient_merge_steps=1 learning_rate=2.4e-05 warmup_proportion=0.1 seed=2 "
        "amp_dtype=float16 use_dynamic_loss_scaling=True scale_loss=128.0 tasks=train+eval "
        "processes=8 report_file=results/MRPC/dllogger_8_fp16.json",
    ),
    "glue: NVIDIA's -1.0, and more flags": (
        f"run_glue.sh init {empty(5, '1')} {empty(5, '-1.0', 'amp')}",
        {"EXTRA_ARGS": "--num-seeds 5"},
        "max_steps=-1 num_seeds=5 amp=True",
    ),
    "glue: the global batch is that of all nodes at any number of them": (
        "run_glue.sh init '' '' '' '' '' 8 6 3",
        ELASTIC,
        f"batch_size=2 global_batch_size={6 * 8 * 4}",
    ),
    "glue: a preset takes another task": (
        f"mkdir results/{LARGE}/phase2/1563; run_glue.sh $(source scripts/configs/glue_config.sh "
        "&& cpu_fp32 cb)",
        {},
        "data_dir=data/download/superglue/CB task_name=cb output_dir=results/CB",
    ),
    **{
        f"glue: mode {mode}": (
            f"run_glue.sh init {empty(5, '1')} {empty(6, 'amp')} '' {shlex.quote(mode)}",
            {},
            f"tasks={tasks}",
        )
        for mode, tasks in (("train", "train"), ("eval_prediction", "eval+predict"))
    },
    "modernbert: both phases of the base model on eight GPUs": (
        "run_modernbert.sh",
        {},
        *[
            "model=modernbert-base processes=8 masked_lm_prob=0.3 optimizer=NorMuon "
            f"lr_decay=warmup_stable_decay amp=True beta2=0.98 {phase}"
            for phase in (
                "phase1=True max_seq_length=1024 max_predictions_per_seq=307 theta=10000.0",
                "phase2=True max_seq_length=8192 max_predictions_per_seq=2458 theta=160000.0 "
                "from_phase1_final_params=results/modernbert-base/phase1/10000",
            )
        ],
    ),
    "modernbert: the page's config brings its vocabulary": (
        "mkdir ours/vocab; cp vocab/bert-base-cased-vocab.txt ours/vocab/vocab.txt; cp "
        "bert_configs/modernbert-tiny.json ours/vocab/config.json; mkdir -p ours/hdf5/seq_1024/"
        "training ours/hdf5/seq_8192/training; run_modernbert.sh "
        "$(source scripts/configs/modernbert_config.sh && cpu_sample_fp32)",
        {"BERT_PREP_WORKING_DIR": "ours"},
        *["config_file=ours/vocab/config.json vocab_file=ours/vocab/vocab.txt"] * 2,
    ),
    "modernbert: each position": (
        "run_modernbert.sh bert_configs/modernbert-mini.json '' fp32 0 3 4 .5 6 7 8 .25 9 10 11 d1 "
        "d2",
        {"EXTRA_ARGS": "--max-grad-norm 2"},
        *[
            "optimizer=NorMuon weight_decay=0.1 amp=False device=cpu max_grad_norm=2.0 "
            f"num_steps_per_checkpoint=10 seed=11 {phase}"
            for phase in (
                "batch_size=3 gradient_merge_steps=4 learning_rate=0.5 max_steps=6 input_dir=d1",
                "batch_size=7 gradient_merge_steps=8 learning_rate=0.25 max_steps=9 input_dir=d2",
            )
        ],
    ),
    "continue: data of the extended model, then training on them": (
        "continue_pretraining.sh post-ln d1 new/law",
        {},
        "dataset=corpus output_dir=new/law extend=post-ln add=1000 "
        "model_name=post-ln-law lengths='[(512, 0)]' dynamic_masking=True nsp=False "
        "pack_documents=True test_fraction=0.05 max_document_kb=50.0",
        "phase1=True from_pretrained_params=new/law/vocab/post-ln-law max_steps=400 "
        "input_dir=new/law/hdf5/seq_512/training eval_dir=new/law/hdf5/seq_512/test eval_steps=500 "
        "max_seq_length=512 learning_rate=0.0001 amp=True device=cuda "
        "lr_decay_proportion=0.2 from_checkpoint=new/law/results/post-ln-law/phase1",
    ),
    "continue: each position": (
        "continue_pretraining.sh post-ln d1 law 7 128 9 3 2 2e-5 bf16 0 stable_checkpoint 4 5",
        {"DATA_ARGS": "--empty-line document", "EXTRA_ARGS": "--whole-word-mask"},
        "add=7 lengths='[(128, 0)]' empty_line=document",
        "batch_size=3 gradient_merge_steps=2 max_steps=9 learning_rate=2e-05 amp_dtype=bfloat16 "
        "device=cpu lr_decay_proportion=0.3 num_steps_per_checkpoint=4 eval_steps=4 seed=5 "
        "whole_word_mask=True max_seq_length=128",
    ),
    "continue: a model of sentence embeddings learns from neighbouring passages": (
        "continue_pretraining.sh sentences d1 law",
        {"DATA_ARGS": "--text-field body", "EXTRA_ARGS": "--symmetric-loss"},
        "stage=format dataset=corpus output_dir=law sentence_splitter=passage text_field=body",
        "stage=shard output_dir=law test_fraction=0.05 max_document_kb=50.0 shard_mb=1.0",
        "from_pretrained_params=sentences train_file=law/sharded/training/*.txt "
        "output_dir=law/results eval_file=law/sharded/test/shard-00000.txt max_seq_length=64 "
        "batch_size=8 gradient_merge_steps=1 max_steps=500 learning_rate=5e-05 eval_steps=100 "
        "amp=True device=cuda resume_from_checkpoint=True symmetric_loss=True seed=42",
    ),
    "continue: each position for sentence embeddings, of a linked folder": (
        "continue_pretraining.sh linked d1 law '' 128 9 3 2 2e-5 bf16 0 '' 4 5",
        {},
        "stage=format",
        "stage=shard",
        "max_seq_length=128 max_steps=9 batch_size=3 gradient_merge_steps=2 "
        "learning_rate=2e-05 amp_dtype=bfloat16 device=cpu num_steps_per_checkpoint=4 eval_steps=4 "
        "seed=5",
    ),
    "continue: masked words for a model of sentence embeddings": (
        "continue_pretraining.sh sentences d1 law",
        {"OBJECTIVE": "masked_words"},
        "dataset=corpus extend=sentences add=1000 lengths='[(512, 0)]'",
        "phase1=True from_pretrained_params=law/vocab/sentences-law max_steps=400",
    ),
    **{
        f"continue: four passes over {samples} samples, {words}": (
            f"continue_pretraining.sh post-ln d1 law {words}",
            {"FAKE_SAMPLES": samples},
            "dataset=corpus",
            f"max_steps={steps} batch_size={batch} gradient_merge_steps={merged}",
        )
        for samples, words, steps, batch, merged in (
            ("63", empty(7, "0"), 31, 8, 1),
            ("63", f"{empty(1, '128')} {empty(5, '0')}", 7, 32, 1),
            ("5000", empty(7, "0"), 625, 32, 1),
            ("40000", empty(7, "0"), 625, 32, 8),
            ("1000000", empty(7, "0"), 5000, 32, 8),
            ("40000", f"{empty(3, '16')} {empty(3, '0')}", 625, 16, 16),
            ("40000", f"{empty(4, '64')} {empty(2, '0')}", 625, 4, 64),
            ("5000", f"{empty(2, '100 None 2')} {empty(2, '0')}", 100, 16, 2),
            ("63", f"{empty(3, '256 1')} {empty(2, '0')}", 1, 256, 1),
        )
    },
}


def test_a_task_file_compares_the_models_before_and_after(checkout):
    (checkout.folder / "train.csv").touch()
    settings = {"TASK_FILE": "train.csv", "TASK_ARGS": "--text-column 'the text'"}
    start(checkout, f"continue_pretraining.sh post-ln d1 law {empty(7, '0')}", **settings)
    *_, words = checkout.calls()
    program, *words = (word.removeprefix(f"{checkout.folder}/") for word in words)
    assert program == "scripts/compare_on_task.py"
    assert " ".join(words) == (
        "--before post-ln --after law/results/post-ln-law/phase1 --output-dir law/task --seed 42 "
        "--train-file train.csv --device cpu --text-column the text"
    )
    start(checkout, f"continue_pretraining.sh sentences d1 law {empty(7, '0')}", **settings)
    assert "law/results/sentences/embedding" in [
        word.removeprefix(f"{checkout.folder}/") for word in checkout.calls()[-1]
    ]


@pytest.mark.parametrize(
    ("command", "settings", "expected"), [(c, s, e) for c, s, *e in RUNS.values()], ids=RUNS
)
def test_a_command_becomes_these_flags(checkout, command, settings, expected):
    for folder in ("ours", "theirs", "prepared"):
        if settings.get("BERT_PREP_WORKING_DIR") == folder:
            settings = settings | {"BERT_PREP_WORKING_DIR": str(checkout.folder / folder)}
    if command.startswith("mkdir"):
        folders, _, command = command.rpartition("; ")
        assert checkout.run(folders.replace("mkdir", "mkdir -p")).returncode == 0
    assert "stopped at step" not in start(checkout, command, **settings).stdout
    assert_flags(checkout, *expected)


def preset(script: str, config: str, name: str, *flags: str) -> str:
    return f"{script}.sh $(source scripts/configs/{config}_config.sh && {' '.join([name, *flags])})"


# Of run_pretraining.sh, run_squad.sh: precision, --amp, --amp-dtype, --tf32.
@pytest.mark.parametrize(
    ("precision", "flags"),
    [
        ("amp", "amp=True amp_dtype=None tf32=False"),  # which is bfloat16 without loss scaling
        ("bf16", "amp=True amp_dtype=bfloat16 tf32=False"),
        ("fp16", "amp=True amp_dtype=float16 tf32=False use_dynamic_loss_scaling=True"),
        ("fp32", "amp=False amp_dtype=None tf32=False"),
        ("tf32", "amp=False amp_dtype=None tf32=True"),
    ],
)
def test_a_precision_means_the_same_in_both_scripts(checkout, precision, flags):
    start(checkout, f"run_pretraining.sh {empty(2, precision)}")
    start(checkout, f"run_squad.sh init {empty(4, precision)}")
    scales = ("1048576.0", "1048576.0", "128.0") if precision == "fp16" else ("1.0",) * 3
    assert_flags(checkout, *(f"{flags} scale_loss={scale}" for scale in scales))


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "run_squad.sh $(source scripts/configs/squad_config.sh && dgxa100-80g_8gpu_amp)",
            f"from_pretrained_params=out/{LARGE}/phase2 output_dir=out "
            "train_file=elsewhere/download/squad/v1.1/train-v1.1.json",
        ),
        (
            "run_squad.sh $(source scripts/configs/squad_config.sh && cpu_sample_fp32)",
            "from_pretrained_params=out/bert-tiny-uncased/phase2 output_dir=out",
        ),
        (
            "run_glue.sh $(source scripts/configs/glue_config.sh && cpu_fp32 cola)",
            f"from_pretrained_params=out/{LARGE}/phase2 output_dir=out/CoLA "
            "data_dir=elsewhere/download/glue/CoLA",
        ),
        (
            "run_pretraining.sh $(source scripts/configs/pretrain_config.sh && cpu_sample_fp32)",
            "output_dir=out input_dir=elsewhere/hdf5/seq_128_pred_20/training",
        ),
    ],
)
def test_a_preset_follows_the_folders_that_the_script_is_given(checkout, command, expected):
    """A preset is evaluated before the script's own variables are set."""
    prepared = checkout.folder / "elsewhere"
    shutil.copytree(checkout.folder / "data", prepared, symlinks=True)
    for model in (LARGE, "bert-tiny-uncased"):
        (checkout.folder / "out" / model / "phase2").mkdir(parents=True)
    folders = f"RESULTS_DIR=out BERT_PREP_WORKING_DIR={prepared}"
    result = checkout.run(f"{folders} PHASE=1 bash scripts/{command}")
    assert result.returncode == 0, result.stderr
    assert_flags(checkout, expected)


# Config and script; the global batches of presets for GPUs, and of others. DeepSpeed's are in
# test_bing_bert_recipe.py.
PRESETS = {
    "pretrain": ("run_pretraining", [65_536, 32_768], None),
    "modernbert": ("run_modernbert", [1024, 128], [4, 1]),
    "squad": ("run_squad", None, None),
    "glue": ("run_glue", None, None),
}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (config, name)
        for config in PRESETS
        for name in presets(f"{config}_config.sh")
        if "deepspeed" not in name
    ],
)
def test_a_preset_fits_the_script_and_keeps_the_global_batch(checkout, config, name):
    script, *batches = PRESETS[config]
    if config == "glue":
        (checkout.folder / "out" / LARGE / "phase2" / "1563").mkdir(parents=True)
    if config == "squad":  # what pre-training ends with
        (checkout.folder / "results/bert-tiny-uncased/phase2/30").mkdir(parents=True)
        results = "results" if "gpu" in name else "quickstart/results"
        start(checkout, preset("run_pretraining", "pretrain", name), RESULTS_DIR=results)
        checkout.calls_file.unlink()
    start(
        checkout,
        preset(script, config, name),
        **({} if config == "squad" else {"RESULTS_DIR": "out"}),
    )
    runs = [Run(call, checkout.folder) for call in checkout.calls()]
    for run in runs:
        assert (run.device == "cuda") == ("gpu" in name)
        if "gpu" in name and config != "modernbert":
            assert (run.args.amp, run.args.tf32) == ("_amp" in name, "_tf32" in name)
            assert f"_{run.processes}gpu_" in name
    if config in ("squad", "glue"):
        assert runs[0].tasks == "train+eval"
    elif expected := batches["gpu" not in name]:
        assert [
            r.args.batch_size * r.args.gradient_merge_steps * int(r.processes) for r in runs
        ] == expected


def test_a_model_folder_brings_its_config_vocabulary_and_name_unless_others_are_given(
    checkout, monkeypatch
):
    """A model that is none of bert_configs/ has its folder's name, in the script and in the
    program. The script asks for it without torch, whose import takes seconds.
    """
    monkeypatch.chdir(checkout.folder)
    Path("torch.py").write_text("raise AssertionError('imported')")
    config = json.loads(Path(f"bert_configs/{LARGE}.json").read_text())
    Path("init/config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    shutil.copy(ROOT / "vocab" / "bert-base-uncased-vocab.txt", "init/vocab.txt")
    Path("init/tokenizer_config.json").write_text('{"do_lower_case": true}')
    Path("init/model.safetensors").touch()  # read later
    start(checkout, f"run_squad.sh init {empty(5, '1')}")
    given, config = "vocab/bert-base-cased-vocab.txt", "bert_configs/bert-base-cased.json"
    start(checkout, f"run_squad.sh init {empty(5, '1')} {empty(2, given)} {empty(2, config)}")
    phases = f"run_pretraining.sh 32 6e-3 fp32 0 .1 50 {empty(13, 'init')}"
    start(checkout, phases, PYTHONPATH=str(checkout.folder))
    assert_flags(
        checkout,
        "model=init vocab=init/vocab.txt",
        f"model=bert-base-cased vocab={given}",
        "vocab_file=init/vocab.txt from_checkpoint=results/init/phase1 from_pretrained_params=init",
        "vocab_file=init/vocab.txt from_phase1_final_params=results/init/phase1/50",
    )


@pytest.mark.parametrize(
    "command",
    [
        "run_pretraining.sh 4 '' bf16 2 '' '' '' true 8",
        "run_modernbert.sh '' '' fp32 0",
        f"run_squad.sh init {empty(5, '2')}",
        "run_glue.sh init '' '' '' '' '' 2",
    ],
)
def test_the_doctor_gets_the_flags_of_the_run_and_starts_nothing(checkout, command):
    before = start(checkout, command, DOCTOR="1", FAKE_STOPS_EARLY="1")
    examined = [call[1:] for call in checkout.calls()]
    assert {call[0] for call in checkout.calls()} == {str(checkout.folder / "scripts/../doctor.py")}
    assert not list(checkout.folder.rglob("*.log")) and "report:" not in before.stdout
    checkout.calls_file.unlink()
    start(checkout, command)
    calls = checkout.calls()
    for examination, call in zip(examined, calls, strict=True):
        program = next(Path(word).name for word in call if word.endswith(".py") and "run_" in word)
        flags = program_arguments(call, program)
        # Phase 1 has not made them yet.
        for name in ("--from-phase1-final-params", "--log-file"):
            if name in flags:
                flags[flags.index(name) + 1] = "None"
        expected = [program, "--processes", str(processes_of(call)), *flags]
        if "--log-file" in examination:
            examination[examination.index("--log-file") + 1] = "None"
        assert examination == expected


@pytest.mark.parametrize(("code", "examined"), [(2, 2), (1, 1)])
def test_the_doctor_examines_all_phases_where_something_is_wrong(checkout, code, examined):
    result = checkout.run("bash scripts/run_pretraining.sh", DOCTOR="1", FAKE_CODE=str(code))
    assert result.returncode == code and len(checkout.calls()) == examined


def test_logs_and_reports_have_the_names_of_nvidias_recipe(checkout):
    start(checkout, "run_pretraining.sh 4 '' bf16 2 '' '' '' true 8 '' trial 2 '' '' '' 3")
    assert_flags(
        checkout, *(f"report_file=results/dllogger_p{phase}.json log_freq=1" for phase in (1, 2))
    )
    logs = sorted((checkout.folder / "results").glob("*.log"))
    for log, name in zip(logs, ("phase1_bf16_gbs64", "phase2_bf16_gbs12"), strict=True):
        assert re.fullmatch(rf"trial\.paddle_bert_pretraining_{name}\.\d{{12}}\.log", log.name)
        assert "ran" in log.read_text()
    for _ in range(2):
        start(checkout, f"run_squad.sh init {empty(5, '2')}")
    start(checkout, "run_glue.sh init")
    # Appended to: a run that was stopped and started again has one log.
    first, *ran = (checkout.folder / "results" / "logfile.txt").read_text().splitlines()
    # --log-file appends to files that begin as DLLogger's.
    assert first.startswith("DLL ") and len(ran) == 2
    assert (checkout.folder / "results" / "MRPC" / "logfile.txt").is_file()


@pytest.mark.parametrize(
    "words", [["--eval-dir", "a b", "--beta1", ""], ["--eval-dir", "it's $HOME `id` \\ *"]]
)
def test_words_of_extra_args_can_be_quoted_and_are_not_executed(checkout, words):
    checkout.run("bash scripts/run_pretraining.sh", EXTRA_ARGS=shlex.join(words))
    assert checkout.calls()[0][-len(words) :] == words


@pytest.mark.parametrize("has_gpu", [False, True])
def test_glue_without_arguments_downloads_a_model_and_a_task_and_uses_this_machine(
    checkout, has_gpu
):
    checkout.add_command("hf", '#!/bin/sh\nmkdir "$4"; echo "hf $*" >>hf_calls\n')
    checkout.add_command(
        "nvidia-smi", "#!/bin/sh\n" + ("echo 'GPU 0: H200'" if has_gpu else "exit 9")
    )
    (checkout.folder / "data/download/glue/MRPC").rmdir()
    # Nothing has come: the fake python3 only records.
    result = checkout.run("bash scripts/run_glue.sh")
    assert result.returncode == 2 and "MRPC does not exist" in result.stderr
    hf_call = "hf download google-bert/bert-base-uncased --local-dir bert-base-uncased"
    hf_call += " --include *.[jst]*\n"  # json, safetensors, txt
    assert (checkout.folder / "hf_calls").read_text() == hf_call
    (download,) = checkout.calls()
    assert download[0].endswith("data/prepare.py") and download[1:] == [
        "download",
        "glue",
        "--tasks",
        "mrpc",
    ]
    checkout.calls_file.unlink()
    (checkout.folder / "data/download/glue/MRPC").mkdir()
    start(checkout, "run_glue.sh")
    assert (checkout.folder / "hf_calls").read_text() == hf_call
    device = f"device={'cuda' if has_gpu else 'cpu'} use_dynamic_loss_scaling={has_gpu}"
    assert_flags(checkout, f"from_pretrained_params=bert-base-uncased task_name=mrpc {device}")
