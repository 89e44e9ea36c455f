"""No program accepts a flag that it would ignore."""

import importlib.util

import pytest
from conftest import ROOT

import run_glue
import run_pretraining
import run_squad

spec = importlib.util.spec_from_file_location("prepare_program", ROOT / "data" / "prepare.py")
prepare = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prepare)

SQUAD = ["--output-dir", "o", "--init-checkpoint", "m"]
SQUAD_PREDICTION = [*SQUAD, "--do-predict", "--predict-file", "dev.json"]
GLUE = ["--output-dir", "o", "--init-checkpoint", "m", "--task-name", "mrpc", "--data-dir", "d"]
PRETRAINING = ["--input-dir", "i", "--output-dir", "o", "--max-steps", "1"]
VALUES = {"train_file": "x", "lr_decay": "linear", "model_prefix": "x", "activation_checkpoint": "full"}
VALUES |= {"compile": "layers", "resume_from_checkpoint": "true", "overwrite": "true", "beta1": "0.5", "beta2": "0.5"}
VALUES |= {"warmup_proportion": "0.5", "lr_decay_rate": "0.5"}


def error_of(parse, words, capsys) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and line.startswith("error: ")
    return line


def training_flags() -> list[str]:
    flags = run_squad.parse_arguments([*SQUAD, "--do-train", "--train-file", "t"])._flags
    names = [name for name, flag in flags.items() if "--do-train" in flag.needs and not name.startswith("deepspeed")]
    assert len(names) > 30
    return names


@pytest.mark.parametrize("name", training_flags())
def test_flags_of_training_without_training(name, capsys):
    flag = "--" + name.replace("_", "-")
    words = [flag, VALUES.get(name, "1")]
    if name.startswith("lamb"):
        words += ["--optimizer", "Lamb"]
    for parse, command in (
        (run_squad.parse_arguments, SQUAD_PREDICTION),
        (run_glue.parse_arguments, [*GLUE, "--do-eval"]),
    ):
        line = error_of(parse, [*command, *words], capsys)
        assert f"{flag} has no effect without --do-train" in line


@pytest.mark.parametrize(
    ("parse", "words", "flag"),
    [
        *(
            (run_squad.parse_arguments, [*SQUAD, "--do-train", "--train-file", "t", flag, value], flag)
            for flag, value in (("--predict-batch-size", "8"), ("--n-best-size", "5"), ("--predict-file", "d.json"))
        ),
        (run_squad.parse_arguments, [*SQUAD_PREDICTION, "--null-score-diff-threshold", "1"], "--null-score"),
        (run_glue.parse_arguments, [*GLUE, "--do-train", "--predict-batch-size", "8"], "--predict-batch-size"),
        (run_pretraining.parse_arguments, [*PRETRAINING, "--benchmark", "--overwrite"], "--overwrite"),
        (
            run_pretraining.parse_arguments,
            [*PRETRAINING, "--optimizer", "AdamW", "--lamb-bias-correction", "false"],
            "--lamb-bias-correction",
        ),
        (run_pretraining.parse_arguments, [*PRETRAINING, "--benchmark", "--steps-this-run", "3"], "--steps-this-run"),
        *(
            (prepare.parse_arguments, words.split(), words.split()[-2])
            for words in (
                "download books --language de",
                "download books --books b --mirror http://a",
                "download wikicorpus --squad-version 1.1",
                "format corpus text --dump-date 20260101",
                "format wikicorpus --text-field body",
                "format corpus text --sentence-splitter newline --sentence-parameters p",
                "all corpus text --vocab-size 1000",
                "all wiki_only --books b",
                "all squad --lengths 128:20",
            )
        ),
    ],
    ids=lambda value: " ".join(value[-3:]) if isinstance(value, list) else "",
)
def test_flags_that_the_other_flags_make_useless(parse, words, flag, capsys):
    assert f"{flag}" in error_of(parse, words, capsys)


def test_flags_that_nvidias_commands_give_in_every_mode_are_accepted():
    """As its run_squad.sh has them for mode eval."""
    words = ["--optimizer=AdamW", "--log-freq=100", "--do-lower-case", "--seed=1", "--max-seq-length=384"]
    words += ["--amp", "--use-dynamic-loss-scaling", "--scale-loss=128.0", "--predict-batch-size=32", "--do-eval"]
    assert run_squad.parse_arguments([*SQUAD_PREDICTION, *words]).predict_batch_size == 32


def test_a_useless_flag_that_is_set_to_false_is_no_error():
    assert not run_squad.parse_arguments([*SQUAD_PREDICTION, "--overwrite", "false"]).overwrite
