"""Command lines: the forms of a flag, and the errors."""

from pathlib import Path

import pytest

import run_pretraining
import run_squad
from arguments import add_run_flags, make_run_config
from run_config import checkpoint_step
from utils import command_line
from utils.command_line import (
    ArgumentParser,
    BooleanFlag,
    format_arguments,
    fraction,
    non_negative_float,
    non_negative_int,
    positive_float,
    positive_int,
)
from utils.errors import UserError
from utils.files import read_json


def parser() -> ArgumentParser:
    parser = ArgumentParser(prog="train.py")
    parser.add_flags("own", (command_line.Flag("--max-steps", positive_int, command_line.REQUIRED, "updates"),))
    add_run_flags(parser, learning_rate=1e-4)
    return parser


REQUIRED = ["--output-dir", "out", "--max-steps", "5"]


def parse_error(words: list[str], capsys, which=None) -> str:
    """The line that the parser prints for the wrong command line `words`."""
    with pytest.raises(SystemExit) as caught:
        (which or parser()).parse_args(words)
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert caught.value.code == 2 and line.startswith("error: ") and captured.out == ""
    return line


@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--use-it"], True),
        (["--use_it"], True),
        (["--use-it", "true"], True),
        (["--use-it", "True"], True),
        (["--use_it", "yes"], True),
        (["--use-it=1"], True),
        (["--use-it", "false"], False),
        (["--use_it=False"], False),
        (["--use-it", "0"], False),
        (["--no-use-it"], False),
        (["--no_use_it"], False),
        (["--no-use-it", "true"], False),
        (["--no-use-it=false"], True),
        (["--use-it", "--no-use-it"], False),
        (["--no-use-it", "--use-it"], True),
    ],
    ids=str,
)
def test_boolean_flag_accepts_every_form(default, words, expected):
    boolean = ArgumentParser()
    boolean.add_argument("--use-it", action=BooleanFlag, default=default)
    assert boolean.parse_args([]).use_it is default
    assert boolean.parse_args(words).use_it is expected


def test_boolean_flag_rejects_other_words(capsys):
    boolean = ArgumentParser()
    boolean.add_argument("--use-it", action=BooleanFlag)
    assert "--use-it: expected true or false, not 'maybe'" in parse_error(["--use-it", "maybe"], capsys, boolean)


def test_underscores_in_flag_names_are_hyphens_and_values_keep_theirs():
    args = parser().parse_args(["--output_dir", "my_out", "--max_steps=7", "--model_prefix=my_model", "--beta1", "0.5"])
    assert (args.output_dir, args.max_steps, args.model_prefix, args.beta1) == (Path("my_out"), 7, "my_model", 0.5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-step", "9"], "--max-step"),  # prefixes of flags are not accepted
        (["--frobnicate"], "--frobnicate"),
        (["stray"], "stray"),
        (["--max-steps", "0"], "--max-steps: expected a whole number >= 1, not 0"),
        (["--bf16"], "--bf16 is not a flag of this program: use --amp"),
        (["--allreduce_post_accumulation"], "--allreduce-post-accumulation is not a flag of this program"),
        (["--gradient_checkpointing", "true"], "use --activation-checkpoint full"),
        (["--max-steps", "many"], "'many'"),
        (["--optimizer", "Adam"], "'Adam'"),
        (["--learning-rate", "nan"], "--learning-rate/--lr: expected a number >= 0, not nan"),
        (["--epsilon", "inf"], "--epsilon"),
        (["--warmup-proportion", "1.5"], "--warmup-proportion/--warmup-ratio: expected a number <= 1, not 1.5"),
        (["--beta2", "1"], "--beta2"),
        (["--seed", "18446744073709551616"], "--seed: expected a whole number <= 1.84467440737e+19"),
        (["--last-step-of-checkpoint", "newest"], "expected None, auto or a step, not newest"),
        (["--amp", "perhaps"], "--amp"),
        (["--learning-rate"], "--learning-rate/--lr: expected one argument"),
        (["--learning-rate=--"], "--learning-rate: '--' is no value"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_command_line_is_an_error_of_one_line(words, message, capsys):
    line = parse_error([*REQUIRED, *words], capsys)
    assert message in line and "train.py --help" in line


def test_missing_flag_is_named(capsys):
    assert "--max-steps" in parse_error(["--output-dir", "out"], capsys)


def test_parsed_arguments_are_frozen():
    args = parser().parse_args(REQUIRED)
    with pytest.raises(AttributeError, match="frozen"):
        args.seed = 1
    assert args.seed == 42


def test_help_shows_the_defaults(capsys):
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    assert "(default: 42)" in text and "(default: 1e-06)" in text and "--no-amp" in text
    assert "default: None" not in text


def test_arguments_are_printed_one_per_line_and_convert_to_json():
    args = parser().parse_args([*REQUIRED, "--from-checkpoint", "None"])
    lines = format_arguments(args, "title:").splitlines()
    assert lines[0] == "title:" and len(lines) == len(args.as_dict()) + 1
    assert any(line.split() == ["--max-steps", "5"] for line in lines)
    values = args.as_dict()
    assert values["output_dir"] == "out" and values["from_checkpoint"] is None and "_frozen" not in values


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (positive_int, ["1", "70"], ["0", "-1", "1.5", ""]),
        (non_negative_int, ["0", "3"], ["-1", "x"]),
        (positive_float, ["1e-6", "2"], ["0", "-1", "nan", "inf"]),
        (non_negative_float, ["0", "0.5"], ["-0.1", "nan", "inf"]),
        (fraction, ["0", "1", ".28"], ["-0.1", "1.01", "nan"]),
        (checkpoint_step, ["auto", "200", "none", "None"], ["-5", "last"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_number_types_check_their_range(kind, good, bad, capsys):
    single = ArgumentParser()
    single.add_argument("--value", type=kind)
    for text in good:
        value = single.parse_args(["--value", text]).value
        assert value is None if text.lower() == "none" else str(value) == text or float(text) == value
    for text in bad:
        assert "--value" in parse_error([f"--value={text}"], capsys, single)


def test_read_json_returns_the_value_or_names_the_file(tmp_path):
    path = tmp_path / "c.json"
    with pytest.raises(UserError, match=r"the config .*c\.json does not exist"):
        read_json(path, "the config")
    for content in (b'{"a": 1', b"", b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"the config .*c\.json is not valid JSON"):
            read_json(path, "the config")
    path.write_text('{"a": "\u00e9"}', encoding="utf-8")
    assert read_json(path, "the config") == {"a": "\u00e9"}


def test_misspelt_flag_is_named_when_a_required_one_is_missing(capsys):
    parser = ArgumentParser(prog="program.py")
    parser.add_argument("--output-dir", required=True)
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--output_dri=x"])
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert message == (
        "error: unrecognized arguments: --output-dri=x: did you mean --output-dir? (see program.py --help)\n"
    )


# --- the flag table ---------------------------------------------------------------------------------------------------

PRETRAINING = ["--input-dir", "i", "--output-dir", "o", "--max-steps", "5"]
SQUAD = ["--output-dir", "o", "--do-train", "--train-file", "t"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--overwrite-output-dir", "--benchmark"], "--overwrite-output-dir cannot be combined with --benchmark"),
        (["--gradient-merge-steps", "1", "--global-batch-size", "8"], "cannot be combined with --global-batch-size"),
        (["--phase1", "--phase2"], "--phase1 cannot be combined with --phase2"),
        (
            ["--lamb-min-coeff", "0.1", "--optimizer", "AdamW"],
            "has no effect without --optimizer Lamb",
        ),
        (["--scale-loss", "8"], "--scale-loss has no effect without --amp or --use-pure-fp16 or --fp16"),
        (["--from-phase1-final-params", "p"], "--from-phase1-final-params has no effect without --phase2"),
        (["--deepspeed-config", "c"], "--deepspeed-config has no effect without --deepspeed"),
        (["--train-batch-size", "8"], "--train-batch-size is not a flag of this program: in NVIDIA's PyTorch recipe"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_that_contradict_each_other_or_lack_another(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        run_pretraining.parse_arguments([*PRETRAINING, *words])
    (line,) = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and message in line


def test_flags_at_the_value_that_asks_for_nothing_are_accepted():
    words = ["--overwrite", "false", "--benchmark", "--last-step-of-checkpoint", "None", "--eval-dir", "e"]
    assert run_pretraining.parse_arguments([*PRETRAINING, *words]).benchmark


def test_names_of_hugging_face_are_aliases():
    words = ["--per_device_train_batch_size", "8", "--lr", "1e-5", "--num_train_epochs", "2", "--warmup_ratio", "0.2"]
    args = run_squad.parse_arguments(
        [*SQUAD, *words, "--logging_steps", "5", "--save_steps", "7", "--adam_epsilon", "1"]
    )
    config = make_run_config(args, world_size=2)
    assert (config.loader.batch_size, config.loader.global_batch_size, config.epochs) == (8, 16, 2)
    assert (config.schedule.learning_rate, config.schedule.warmup_proportion) == (1e-5, 0.2)
    assert (config.trainer.log_freq, config.trainer.steps_per_checkpoint, config.optimizer.eps) == (5, 7, 1)


def test_the_record_of_a_run_has_the_flags_that_change_results():
    args = run_pretraining.parse_arguments([*PRETRAINING, "--amp", "--lr", "0.5"])
    found = make_run_config(args).hyperparameters
    assert found["--learning-rate"] == 0.5 and found["--amp"] is True and found["--lr-rewarmup"] is False
    assert not {"--seed", "--num-workers", "--output-dir", "--compile", "--log-freq"} & found.keys()
    pretraining_only = {"--lr-rewarmup", "--masked-lm-prob", "--whole-word-mask", "--initial-global-batch-size"}
    pretraining_only.add("--batch-size-warmup-sequences")
    assert make_run_config(run_squad.parse_arguments(SQUAD)).hyperparameters.keys() == found.keys() - pretraining_only


def test_settings_are_printed_as_far_as_asked_for():
    def messages(*words: str) -> tuple[str, ...]:
        return make_run_config(run_pretraining.parse_arguments([*PRETRAINING, *words])).runtime.messages

    given = "--input-dir i --output-dir o --max-steps 5 --lr 0.5"
    assert messages("--lr", "0.5", "--seed", "42") == (f"settings that differ from the defaults: {given}",)
    assert messages("--no-show-config") == ()
    (everything,) = messages("--show-config")
    assert "--num-workers" in everything and len(everything.splitlines()) > 60
