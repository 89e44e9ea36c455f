"""scripts/run_pretraining.sh: what each argument and variable becomes."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from conftest import ROOT
from launch_scripts import Checkout, assert_refused, pretraining_runs, processes_of, program_arguments
from small_runs import choose_model_of

import run_pretraining
import run_squad
from arguments import amp_dtype


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_without_arguments_the_recipe_of_eight_gpus_runs(checkout):
    result = checkout.run("bash scripts/run_pretraining.sh")
    assert result.returncode == 0, result.stderr
    phase1, phase2 = pretraining_runs(checkout)
    assert [processes_of(call) for call in checkout.calls()] == [8, 8]
    assert (phase1.batch_size, phase1.gradient_merge_steps, phase1.max_steps) == (256, 32, 7038)
    assert (phase1.learning_rate, phase1.warmup_proportion, phase1.seed) == (6e-3, 0.2843, 12439)
    assert (phase1.max_seq_length, phase1.max_predictions_per_seq, phase1.num_steps_per_checkpoint) == (128, 20, 200)
    assert (phase2.batch_size, phase2.gradient_merge_steps, phase2.max_steps) == (32, 128, 1563)
    assert (phase2.learning_rate, phase2.warmup_proportion, phase2.seed) == (4e-3, 0.128, 12439)
    assert (phase2.max_seq_length, phase2.max_predictions_per_seq) == (512, 80)
    for phase in (phase1, phase2):
        assert phase.bert_model == "bert-large-uncased"
        assert phase.optimizer == "Lamb"
        assert (phase.amp, amp_dtype(phase), phase.tf32) == (True, "bfloat16", False)


def test_each_position_reaches_the_flag_of_its_name(checkout):
    (checkout.folder / "d1").mkdir()
    (checkout.folder / "d2").mkdir()
    config = "bert_configs/bert-mini-uncased.json"
    result = checkout.run(
        "bash scripts/run_pretraining.sh 11 0.5 fp32 0 0.25 12 13 false 14 15 job 16 .75 1e-1 17 18 d1 d2 . init "
        f"{config} false 19 20",
    )
    assert result.returncode == 0, result.stderr
    phase1, phase2 = pretraining_runs(checkout)
    assert (phase1.phase1, phase1.phase2, phase2.phase1, phase2.phase2) == (True, False, False, True)
    for phase in (phase1, phase2):
        assert (phase.num_steps_per_checkpoint, phase.seed, phase.device, phase.amp) == (13, 15, "cpu", False)
        assert (choose_model_of(phase).name, phase.config_file) == ("bert-mini-uncased", Path(config))
        assert not phase.benchmark
    assert (phase1.batch_size, phase1.learning_rate, phase1.warmup_proportion) == (11, 0.5, 0.25)
    assert (phase1.max_steps, phase1.gradient_merge_steps, phase1.input_dir) == (12, 14, Path("d1"))
    assert (phase2.batch_size, phase2.learning_rate, phase2.warmup_proportion) == (16, 0.75, 0.1)
    assert (phase2.max_steps, phase2.gradient_merge_steps, phase2.input_dir) == (17, 18, Path("d2"))
    assert (phase1.from_pretrained_params, phase2.from_pretrained_params) == (Path("init"), None)


def test_phase_2_starts_from_the_last_checkpoint_of_phase_1(checkout):
    checkout.run("bash scripts/run_pretraining.sh 32 6e-3 fp32 0 .1 50", RESULTS_DIR="out")
    phase1, phase2 = pretraining_runs(checkout)
    assert phase1.from_phase1_final_params is None
    assert phase2.from_phase1_final_params == Path("out/bert-large-uncased/phase1/50")
    for phase, name in ((phase1, "phase1"), (phase2, "phase2")):
        assert phase.from_checkpoint == Path("out/bert-large-uncased") / name
        assert phase.last_step_of_checkpoint == "auto"


def test_phase_2_waits_until_phase_1_has_made_its_last_step(checkout):
    (checkout.folder / "results/bert-large-uncased/phase1/40").mkdir(parents=True)
    (checkout.folder / "results/bert-large-uncased/phase1/9").mkdir()
    stopped = checkout.run("bash scripts/run_pretraining.sh 32 6e-3 fp32 0 .1 50", FAKE_STOPS_EARLY="1")
    assert "phase1 stopped at step 40 of 50: run the same command again" in stopped.stdout
    assert len(checkout.calls()) == 1
    checkout.run("bash scripts/run_pretraining.sh 32 6e-3 fp32 0 .1 50")
    assert [run.phase2 for run in pretraining_runs(checkout)] == [False, False, True]


@pytest.mark.parametrize(
    ("precision", "amp", "dtype", "tf32"),
    [
        ("amp", True, None, False),  # which is bfloat16 without loss scaling
        ("bf16", True, "bfloat16", False),
        ("fp16", True, "float16", False),
        ("fp32", False, None, False),
        ("tf32", False, None, True),
    ],
)
def test_a_precision_means_the_same_in_both_scripts(checkout, precision, amp, dtype, tf32):
    checkout.run(f"bash scripts/run_pretraining.sh '' '' {precision}")
    checkout.run(f"bash scripts/run_squad.sh init '' '' '' '' {precision}")
    *pretraining, squad = checkout.calls()
    runs = [run_pretraining.parse_arguments(program_arguments(call, "run_pretraining.py")) for call in pretraining]
    runs.append(run_squad.parse_arguments(program_arguments(squad, "run_squad.py")))
    assert len(runs) == 3
    for run, scale in zip(runs, (2**20, 2**20, 128), strict=True):
        assert (run.amp, run.amp_dtype, run.tf32) == (amp, dtype, tf32)
        is_scaled = precision == "fp16"
        assert (run.use_dynamic_loss_scaling, run.scale_loss) == (is_scaled, scale if is_scaled else 1)


def test_a_benchmark_measures_both_phases_from_random_weights(checkout):
    command = "bash scripts/run_pretraining.sh" + " ''" * 21 + " true 7 3"
    result = checkout.run(command, FAKE_STOPS_EARLY="1")
    assert result.returncode == 0, result.stderr
    phase1, phase2 = pretraining_runs(checkout)
    for phase in (phase1, phase2):
        assert (phase.benchmark, phase.benchmark_steps, phase.benchmark_warmup_steps) == (True, 7, 3)
        assert phase.from_phase1_final_params is None


def test_logs_and_reports_have_the_names_of_nvidias_recipe(checkout):
    result = checkout.run("bash scripts/run_pretraining.sh 4 '' bf16 2 '' '' '' true 8 '' trial 2 '' '' '' 3")
    assert result.returncode == 0, result.stderr
    phases = pretraining_runs(checkout)
    assert [phase.report_file for phase in phases] == [
        checkout.folder / "results" / name for name in ("dllogger_p1.json", "dllogger_p2.json")
    ]
    assert [phase.log_freq for phase in phases] == [1, 1]
    logs = sorted((checkout.folder / "results").glob("*.log"))
    for log, name in zip(logs, ("phase1_bf16_gbs64", "phase2_bf16_gbs12"), strict=True):
        assert re.fullmatch(rf"trial\.paddle_bert_pretraining_{name}\.\d{{12}}\.log", log.name)
        assert "ran" in log.read_text()


@pytest.mark.parametrize("model", ["bert-large-uncased", "bert-base-cased", "bert-tiny-uncased"])
def test_a_config_file_of_bert_configs_names_the_model(checkout, model):
    command = "bash scripts/run_pretraining.sh 32 6e-3 fp32 0 .1 50" + " ''" * 14
    result = checkout.run(f"{command} bert_configs/{model}.json")
    assert result.returncode == 0, result.stderr
    for phase in pretraining_runs(checkout):
        assert choose_model_of(phase).name == model
        assert phase.from_checkpoint.parent == checkout.folder / "results" / model
    assert phase.from_phase1_final_params == checkout.folder / "results" / model / "phase1" / "50"


@pytest.mark.parametrize("model", ["bert-base-cased", "custom"])
def test_a_model_folder_to_start_from_brings_its_config_and_vocabulary(checkout, model):
    source = "bert-base-cased" if model != "custom" else "bert-tiny-uncased"
    shutil.copy(ROOT / "bert_configs" / f"{source}.json", checkout.folder / "init" / "config.json")
    kind = "cased" if model != "custom" else "uncased"
    shutil.copy(ROOT / "vocab" / f"bert-base-{kind}-vocab.txt", checkout.folder / "init" / "vocab.txt")
    result = checkout.run("bash scripts/run_pretraining.sh 32 6e-3 fp32 0 .1 50" + " ''" * 13 + " init")
    assert result.returncode == 0, result.stderr
    for phase in pretraining_runs(checkout):
        assert (phase.bert_model, phase.vocab_file) == (model, Path("init/vocab.txt"))
        assert phase.config_file == Path("init/config.json")
    assert phase.from_phase1_final_params == checkout.folder / "results" / model / "phase1" / "50"


def test_data_in_the_working_folder_is_found(checkout, tmp_path):
    name = "hdf5_lower_case_1_seq_len_{}_max_pred_{}_masked_lm_prob_0.15_random_seed_12345_dupe_factor_5"
    ours = [tmp_path / "ours" / "hdf5" / f"seq_{length}" / "training" for length in ("128_pred_20", "512_pred_80")]
    nvidia = [tmp_path / "nvidia" / name.format(*sizes) / "wikicorpus_en" for sizes in ((128, 20), (512, 80))]
    for folders in (ours, nvidia):
        for folder in folders:
            folder.mkdir(parents=True)
        assert (
            checkout.run(
                "bash scripts/run_pretraining.sh",
                BERT_PREP_WORKING_DIR=str(tmp_path / folders[0].relative_to(tmp_path).parts[0]),
            ).returncode
            == 0
        )
        assert [phase.input_dir for phase in pretraining_runs(checkout)] == folders
        checkout.calls_file.unlink()


def test_one_phase_can_be_run_alone(checkout):
    command = "bash scripts/run_pretraining.sh 32 6e-3 fp32 0 .1 50" + " ''" * 13
    for phase, start, weights in (("1", "", None), ("2", "", "phase1/50"), ("2", "init", "init")):
        assert checkout.run(f"{command} {start}", PHASE=phase, RESULTS_DIR="out").returncode == 0
        (run,) = pretraining_runs(checkout)
        checkout.calls_file.unlink()
        assert run.phase2 == (phase == "2")
        assert (
            run.from_phase1_final_params
            == ({None: None, "phase1/50": Path("out/bert-large-uncased/phase1/50"), "init": Path("init")}[weights])
        )
    assert_refused(checkout.run(command, PHASE="3"), checkout, "PHASE", "'3'")


def test_the_runs_own_folder_as_the_start_means_to_resume(checkout):
    command = "bash scripts/run_pretraining.sh 32 6e-3 fp32 0 .1 50" + " ''" * 13
    assert checkout.run(f"{command} results/bert-large-uncased/phase1").returncode == 0
    phase1, _ = pretraining_runs(checkout)
    assert phase1.from_pretrained_params is None
    assert phase1.from_checkpoint == checkout.folder / "results/bert-large-uncased/phase1"


@pytest.mark.parametrize("words", [["--eval-dir", "a b", "--beta1", ""], ["--eval-dir", "it's $HOME `id` \\ *"]])
def test_words_of_extra_args_can_be_quoted_and_are_not_executed(checkout, words):
    checkout.run("bash scripts/run_pretraining.sh", EXTRA_ARGS=shlex.join(words))
    assert checkout.calls()[0][-len(words) :] == words


def test_an_open_quote_in_extra_args_is_refused(checkout):
    for script in ("run_pretraining.sh", "run_squad.sh init"):
        assert_refused(checkout.run(f"bash scripts/{script}", EXTRA_ARGS="--eval-dir 'a b"), checkout, "EXTRA_ARGS")


def test_what_has_no_position_comes_from_the_environment(checkout):
    (checkout.folder / "held-out").mkdir()
    checkout.run(
        "bash scripts/run_pretraining.sh",
        BERT_MODEL="bert-base-cased",
        EVAL_DIR_PHASE1="held-out",
        EVAL_DIR_PHASE2="held-out",
        EXTRA_ARGS="--log-freq 3 --eval-steps 5",
    )
    phase1, phase2 = pretraining_runs(checkout)
    assert phase1.bert_model == phase2.bert_model == "bert-base-cased"
    assert phase1.vocab_file.name == "bert-base-cased-vocab.txt"
    assert (phase1.eval_dir, phase2.eval_dir) == (Path("held-out"), Path("held-out"))
    assert (phase1.log_freq, phase2.eval_steps) == (3, 5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("0", ["train_batch_size", "'0'", "at least 1"]),
        ("64 fast", ["learning_rate", "'fast'"]),
        ("'' '' half", ["precision", "'half'", "amp, fp16, bf16, fp32, tf32"]),
        ("'' '' '' -1", ["num_gpus", "'-1'"]),
        ("'' '' '' '' 1.5", ["warmup_proportion", "'1.5'"]),
        ("'' '' '' '' '' '' '' yes", ["create_logfile", "'yes'"]),
        ("--max-steps 5", ["--max-steps", "positional"]),
        ("'' '' '' 9", ["num_gpus", "9", "has 8"]),
        (" ''" * 16 + " nowhere", ["dataset_dir_phase1", "nowhere", "does not exist", "docs/data.md"]),
        (" ''" * 17 + " nowhere", ["dataset_dir_phase2", "nowhere", "does not exist"]),
        (" ''" * 18 + " nowhere", ["code_dir", "nowhere"]),
        (" ''" * 19 + " nowhere", ["init_checkpoint_dir", "nowhere does not exist: check the path\n"]),
        (" ''" * 20 + " nowhere.json", ["bert_config_file", "nowhere.json", "does not exist"]),
        (" ''" * 10 + " a/b", ["job_name", "'a/b'", "plain name"]),
        (" ''" * 10 + " ..", ["job_name", "plain name"]),
        (" ''" * 25, ["25", "24"]),
        (
            " 8192 6e-3 fp16 8 0.2843 7038 200 false true true 128 42 job true true 4096 4e-3 0.128 1563 256 /one /two",
            ["PyTorch", "64 6e-3 fp16 8 0.2843 7038 200 true 128 42 job 16 4e-3 0.128 1563 256 /one /two\n"],
        ),
        (" ''" * 31, ["31", "24", "22.12", "21 to 27"]),
    ],
)
def test_a_bad_argument_of_pretraining_is_one_line_and_starts_nothing(checkout, arguments, words):
    assert_refused(checkout.run(f"bash scripts/run_pretraining.sh {arguments}"), checkout, *words)


def test_help_lists_each_argument_with_its_position_and_default(checkout):
    for script, last in (("run_pretraining.sh", "24 benchmark_warmup_steps"), ("run_squad.sh", "17 benchmark_warmup")):
        text = checkout.run(f"bash scripts/{script} --help").stdout
        assert " 2 " in text
        assert last in text
    assert re.search(r"2 learning_rate .*\[6e-3\]", checkout.run("bash scripts/run_pretraining.sh --help").stdout)


def test_one_of_several_words_is_not_all_of_them(checkout):
    result = checkout.run("bash scripts/run_pretraining.sh 256 6e-3 amp,fp16 8")
    assert_refused(result, checkout, "argument 3 (precision) is 'amp,fp16'", "one of amp, fp16")


def test_an_estimate_of_the_memory_is_no_unfinished_phase(checkout):
    result = checkout.run("bash scripts/run_pretraining.sh", FAKE_STOPS_EARLY="1", EXTRA_ARGS="--estimate-memory 8")
    assert (result.returncode, result.stderr) == (0, "") and "stopped at step" not in result.stdout
    assert [run.estimate_memory for run in pretraining_runs(checkout)] == [8, 8]


def test_a_results_folder_with_a_hyphen_is_no_flag(checkout):
    result = checkout.run("bash scripts/run_pretraining.sh", RESULTS_DIR="-x")
    assert result.returncode == 0, result.stderr
    assert {run.output_dir for run in pretraining_runs(checkout)} == {Path("-x")}


def test_the_runs_own_newest_checkpoint_as_argument_20_resumes_it(checkout):
    phase1 = checkout.folder / "results" / "bert-large-uncased" / "phase1"
    for step in ("200", "400"):
        (phase1 / step).mkdir(parents=True)
    command = "bash scripts/run_pretraining.sh" + " ''" * 19
    result = checkout.run(f"{command} {phase1}/400")
    assert result.returncode == 0, result.stderr
    first, _ = pretraining_runs(checkout)
    assert (first.from_pretrained_params, first.from_checkpoint.name) == (None, "phase1")


def test_an_older_checkpoint_of_the_run_as_argument_20_is_refused(checkout):
    phase1 = checkout.folder / "results" / "bert-large-uncased" / "phase1"
    for step in ("200", "400"):
        (phase1 / step).mkdir(parents=True)
    result = checkout.run("bash scripts/run_pretraining.sh" + " ''" * 19 + f" {phase1}/200")
    assert_refused(result, checkout, "argument 20", "step 200", "at step 400", "None")


@pytest.mark.parametrize("phase", [1, 2])
def test_the_scripts_with_flags_by_name_find_the_shards_of_nvidia(checkout, phase):
    length, predictions = (128, 20) if phase == 1 else (512, 80)
    name = (
        f"hdf5_lower_case_1_seq_len_{length}_max_pred_{predictions}_masked_lm_prob_0.15_random_seed_12345_dupe_factor_5"
    )
    shards = checkout.folder / "theirs" / name / "wikicorpus_en"
    shards.mkdir(parents=True)
    result = checkout.run(f"bash scripts/run_pretraining_p{phase}.sh", BERT_PREP_WORKING_DIR=str(shards.parents[1]))
    assert result.returncode == 0, result.stderr
    (run,) = pretraining_runs(checkout)
    assert run.input_dir == shards
