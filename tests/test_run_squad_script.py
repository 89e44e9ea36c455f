"""scripts/run_squad.sh: what each argument and variable becomes."""

import contextlib
import shutil
from pathlib import Path

import pytest
from conftest import ROOT
from launch_scripts import Checkout, assert_refused, squad_run
from small_runs import choose_model_of


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_each_position_of_squad_reaches_the_flag_of_its_name(checkout):
    config = "bert_configs/bert-mini-uncased.json"
    vocab = "vocab/bert-base-uncased-vocab.txt"
    result = checkout.run(
        f"bash scripts/run_squad.sh init 3.5 4 5e-5 0.3 fp32 0 6 data/sample/squad {vocab} out train_eval {config} "
        "7 true 8 9"
    )
    assert result.returncode == 0, result.stderr
    run = squad_run(checkout)
    assert (run.from_pretrained_params, run.epochs) == (Path("init"), 3.5)
    assert (run.batch_size, run.predict_batch_size) == (4, 4)
    assert (run.learning_rate, run.warmup_proportion, run.amp, run.device) == (5e-5, 0.3, False, "cpu")
    assert (run.seed, run.vocab_file, run.output_dir) == (6, Path(vocab), Path("out"))
    assert (run.config_file, run.max_steps) == (Path(config), 7)
    assert not run.given("bert_model")  # the config file names it
    assert (run.benchmark, run.benchmark_steps, run.benchmark_warmup_steps) == (True, 8, 9)
    assert run.train_file == Path("data/sample/squad/train-v1.1.json")
    assert run.predict_file == Path("data/sample/squad/dev-v1.1.json")


def test_logs_and_reports_have_the_names_of_nvidias_recipe(checkout):
    for precision in ("amp", "fp16"):
        assert checkout.run(f"bash scripts/run_squad.sh init '' '' '' '' {precision} 2").returncode == 0
        run = squad_run(checkout)
        checkout.calls_file.unlink()
        assert run.report_file == Path(f"results/dllogger_2_{precision}.json")
        assert run.log_freq == 100
    log = (checkout.folder / "results" / "logfile.txt").read_text().splitlines()
    assert len(log) == 2  # appended to: a run that was stopped and started again has one log


@pytest.mark.parametrize("mode", ["eval", "prediction", "train_eval"])
def test_predictions_are_made_in_batches_of_the_given_size(checkout, mode):
    checkout.run(f"bash scripts/run_squad.sh init '' 32 '' '' '' 1 '' '' '' '' {mode}")
    assert squad_run(checkout).predict_batch_size == 32


@pytest.mark.parametrize("model", ["bert-base-uncased", "bert-base-cased", "bert-large-uncased", "bert-tiny-uncased"])
def test_a_model_folder_brings_its_config_and_vocabulary_unless_others_are_given(checkout, model):
    shutil.copy(ROOT / "bert_configs" / f"{model}.json", checkout.folder / "init" / "config.json")
    kind = "uncased" if "uncased" in model else "cased"
    shutil.copy(ROOT / "vocab" / f"bert-base-{kind}-vocab.txt", checkout.folder / "init" / "vocab.txt")
    (checkout.folder / "init" / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    (checkout.folder / "init" / "model.safetensors").touch()  # read later
    assert checkout.run("bash scripts/run_squad.sh init '' '' '' '' '' 1").returncode == 0
    with contextlib.chdir(checkout.folder):
        choice = choose_model_of(squad_run(checkout))
    assert (choice.name, choice.tokenizer.do_lower_case, choice.tokenizer.vocab_file) == (
        model,
        True,
        Path("init/vocab.txt"),
    )

    checkout.calls_file.unlink()
    given = "vocab/bert-base-cased-vocab.txt"
    config = "bert_configs/bert-base-cased.json"
    checkout.run(f"bash scripts/run_squad.sh init '' '' '' '' '' 1 '' '' {given} '' '' {config}")
    choice = choose_model_of(squad_run(checkout))
    assert (choice.name, choice.tokenizer.vocab_file) == ("bert-base-cased", Path(given))


def test_squad_is_found_in_the_working_folder(checkout, tmp_path):
    (tmp_path / "prepared" / "download").mkdir(parents=True)
    (checkout.folder / "data" / "download" / "squad").rename(tmp_path / "prepared" / "download" / "squad")
    preset = "$(source scripts/configs/squad_config.sh && dgxa100-80g_8gpu_amp)"
    (checkout.folder / "elsewhere" / "bert-large-uncased" / "phase2" / "1563").mkdir(parents=True)
    for arguments in ("init", preset):
        result = checkout.run(
            f"bash scripts/run_squad.sh {arguments}",
            BERT_PREP_WORKING_DIR=str(tmp_path / "prepared"),
            RESULTS_DIR="elsewhere",
        )
        assert result.returncode == 0, result.stderr
        assert squad_run(checkout).train_file == tmp_path / "prepared/download/squad/v1.1/train-v1.1.json"
        checkout.calls_file.unlink()


@pytest.mark.parametrize(
    ("mode", "train", "predict", "score"),
    [
        ("train", True, False, False),
        ("eval", False, True, True),
        ("prediction", False, True, False),
        ("train_eval", True, True, True),
        ("'train eval'", True, True, True),
    ],
)
def test_a_mode_does_what_its_name_says(checkout, mode, train, predict, score):
    result = checkout.run(f"bash scripts/run_squad.sh init '' '' '' '' '' 1 '' '' '' '' {mode}")
    assert result.returncode == 0, result.stderr
    run = squad_run(checkout)
    assert (run.do_train, run.do_predict or run.do_eval, run.do_eval) == (train, predict, score)
    assert (run.train_file is not None, run.predict_file is not None) == (train, predict)
    assert run.resume_from_checkpoint == train  # evaluation is of the checkpoint that was given


def test_squad_v2_has_questions_without_an_answer(checkout):
    command = "bash scripts/run_squad.sh init '' '' '' '' '' 1 '' data/sample/squad"
    checkout.run(command, SQUAD_VERSION="2.0")
    run = squad_run(checkout)
    assert run.version_2_with_negative
    assert run.predict_file == Path("data/sample/squad/dev-v2.0.json")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", ["init_checkpoint", "missing"]),
        ("nowhere", ["init_checkpoint", "nowhere does not exist: check the path\n"]),
        ("requirements.txt", ["requirements.txt is a file, not a folder", "convert_checkpoint.py"]),
        ("init 2 0", ["batch_size", "'0'"]),
        ("init 2 32 1e-5 0.1 amp 9", ["num_gpus", "9", "has 8"]),
        ("init 2 32 1e-5 0.1 amp 1 1 nowhere", ["squad_dir", "nowhere", "create_datasets_from_start.sh squad"]),
        ("init 2 32 1e-5 0.1 amp 1 1 init", ["squad_dir", "init/train-v2.0.json"]),
        ("init 2 32 1e-5 0.1 amp 1 1 '' nowhere.txt", ["vocab_file", "nowhere.txt"]),
        ("init 2 32 1e-5 0.1 amp 1 1 '' '' '' test", ["mode", "'test'", "train_eval"]),
        ("init 2 32 1e-5 0.1 amp 1 1 '' '' '' '' '' many", ["max_steps", "'many'"]),
        ("init" + " ''" * 17, ["18", "17", "fuse_mha"]),
    ],
)
def test_a_bad_argument_of_squad_is_one_line_and_starts_nothing(checkout, arguments, words):
    assert_refused(checkout.run(f"bash scripts/run_squad.sh {arguments}"), checkout, *words)
