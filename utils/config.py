"""Command lines as this project writes them: hyphens or underscores, booleans with or without a value, defaults in
the help, one line for an error, and a result that cannot change after parsing."""

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from utils.errors import UserError, one_line

TRUE_WORDS = {"true", "t", "yes", "y", "on", "1"}
FALSE_WORDS = {"false", "f", "no", "n", "off", "0"}


class Arguments(argparse.Namespace):
    """Parsed arguments; frozen once `parse_args` returns, so that no code can hide state in them."""

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_frozen"):
            raise AttributeError(f"arguments are frozen: cannot set {name}")
        super().__setattr__(name, value)

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


class BooleanFlag(argparse.Action):
    """`--flag`, `--flag true`, `--flag=false` and `--no-flag`."""

    def __init__(self, option_strings: Sequence[str], dest: str, default: bool = False, help: str = "", **_: Any):
        negatives = ["--no-" + option[2:] for option in option_strings if option.startswith("--")]
        super().__init__(
            [*option_strings, *negatives], dest, nargs="?", default=default, help=help, metavar="true|false"
        )

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        negative = option_string is not None and option_string.startswith("--no-")
        value = True if values is None else parse_bool(values, parser, option_string)
        setattr(namespace, self.dest, value != negative)


def parse_bool(text: str, parser: argparse.ArgumentParser, option: str | None) -> bool:
    if text.lower() in TRUE_WORDS:
        return True
    if text.lower() in FALSE_WORDS:
        return False
    parser.error(f"argument {option}: expected true or false, not {text!r}")


class ArgumentParser(argparse.ArgumentParser):
    """An argparse parser with this project's manners (see the module's docstring)."""

    def __init__(self, **kwargs: Any):
        kwargs.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_args(self, args=None, namespace=None) -> Arguments:
        argv = [hyphenated(word) for word in (sys.argv[1:] if args is None else args)]
        if self._subparsers is None:  # argparse would name what is missing first, though a misspelt flag may be why
            known = self._option_string_actions
            unknown = [word for word in argv if is_flag(word) and flag_name(word) not in known]
            if unknown:
                close = difflib.get_close_matches(flag_name(unknown[0]), known, n=1)
                hint = f": did you mean {close[0]}?" if close else ""
                self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        parsed = super().parse_args(argv, namespace or Arguments())
        parsed._frozen = True
        return parsed

    def error(self, message: str) -> NoReturn:
        print(f"error: {one_line(message)} (see {self.prog} --help)", file=sys.stderr, flush=True)
        sys.exit(2)


def is_flag(word: str) -> bool:
    return len(word) > 2 and word.startswith("--")


def flag_name(flag: str) -> str:
    return flag.partition("=")[0]


def hyphenated(word: str) -> str:
    """`--max_steps=5` as `--max-steps=5`; values and short options stay as they are."""
    if not is_flag(word):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, not {text}")
    return value


def non_negative_int(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 up, not {text}")
    return value


def positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, not {text}")
    return value


def non_negative_float(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number from 0 up, not {text}")
    return value


def fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, not {text}")
    return value


def decay_factor(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 up and below 1, not {text}")
    return value


def random_seed(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**64:  # what torch.manual_seed takes
        raise argparse.ArgumentTypeError(f"expected a whole number of 64 bits, not {text}")
    return value


def read_json(path: str | Path, what: str) -> Any:
    """The JSON value in the file `path`; `what` names its kind in errors."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{what} {path} does not exist: check the path")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{what} {path} is not valid JSON ({error}): it may be cut off, fetch it again") from error


# --- the flags that pre-training and fine-tuning share ----------------------------------------------------------------

BERT_MODELS = ("bert-base-uncased", "bert-base-cased", "bert-large-uncased", "bert-large-cased", "custom")


def none_or_str(text: str) -> str | None:
    return None if text.lower() == "none" else text


def none_or_path(text: str) -> Path | None:
    return None if text.lower() in ("none", "") else Path(text)


def checkpoint_step(text: str) -> str | None:
    if text.lower() == "none":
        return None
    if text != "auto" and not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected None, auto or a step, not {text}")
    return text


def add_global_arguments(parser: argparse.ArgumentParser, steps_required: bool) -> None:
    group = parser.add_argument_group("global")
    group.add_argument("--output-dir", type=Path, required=True, help="where checkpoints and results go")
    group.add_argument(
        "--vocab-file", type=none_or_path, help="WordPiece vocabulary; by default vocab/<bert-model>-vocab.txt"
    )
    group.add_argument("--bert-model", choices=BERT_MODELS, default="bert-large-uncased", help="architecture")
    group.add_argument(
        "--config-file",
        type=none_or_path,
        help="the architecture's JSON file; by default bert_configs/<bert-model>.json, required for custom",
    )
    if steps_required:
        group.add_argument("--max-steps", type=positive_int, required=True, help="updates in all")
    else:
        group.add_argument("--max-steps", type=int, default=-1, help="updates at most; -1: as many as the epochs need")
    group.add_argument("--log-freq", type=positive_int, default=10, help="updates between log lines")
    group.add_argument("--num-steps-per-checkpoint", type=positive_int, default=100, help="updates between checkpoints")
    group.add_argument(
        "--from-pretrained-params", type=none_or_path, help="model folder to take weights from, and nothing else"
    )
    group.add_argument(
        "--from-checkpoint",
        type=none_or_path,
        help="checkpoint to go on from: weights, optimizer, schedule and data position",
    )
    group.add_argument(
        "--last-step-of-checkpoint",
        type=checkpoint_step,
        help="None: --from-checkpoint is a checkpoint folder; N: it is the folder of steps that holds N; auto: the "
        "newest whole checkpoint in that folder of steps, or a start from step 1 where it has none yet",
    )
    group.add_argument("--steps-this-run", type=positive_int, help="stop after this many updates")
    group.add_argument("--seed", type=random_seed, default=42, help="of weights, dropout and the order of samples")
    group.add_argument("--report-file", type=none_or_path, default=Path("./report.json"), help="DLLogger's JSON lines")
    group.add_argument("--model-prefix", default="model", help="prefix of the training state's file names")
    group.add_argument("--show-config", action=BooleanFlag, default=True, help="print all settings at the start")
    group.add_argument(
        "--enable-cpu-affinity", action=BooleanFlag, default=True, help="bind each process to the cores near its GPU"
    )
    group.add_argument("--num-workers", type=non_negative_int, default=1, help="threads that read data ahead")
    group.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: a GPU if there is one")
    group.add_argument("--benchmark", action=BooleanFlag, help="measure speed, save nothing")
    group.add_argument("--benchmark-steps", type=positive_int, default=20, help="updates to measure")
    group.add_argument("--benchmark-warmup-steps", type=positive_int, default=20, help="updates before those")


def add_training_arguments(
    parser: argparse.ArgumentParser,
    optimizers: Sequence[str],
    decays: Sequence[str],
    optimizer: str,
    learning_rate: float,
    warmup_proportion: float,
) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("training")
    group.add_argument("--optimizer", choices=optimizers, default=optimizer, help="FusedLAMB is apex's")
    group.add_argument(
        "--gradient-merge-steps", type=positive_int, default=1, help="micro-batches whose gradients make one update"
    )
    group.add_argument("--learning-rate", type=non_negative_float, default=learning_rate, help="at its peak")
    group.add_argument("--warmup-start-lr", type=non_negative_float, default=0.0, help="where the warm-up starts")
    group.add_argument(
        "--warmup-proportion", type=fraction, default=warmup_proportion, help="share of --max-steps that warms up"
    )
    group.add_argument("--lr-decay", choices=decays, default="poly", help="shape of the schedule after the warm-up")
    group.add_argument("--lr-decay-power", type=positive_float, default=1.0, help="of poly; NVIDIA's PyTorch has 0.5")
    group.add_argument("--lr-decay-rate", type=positive_float, default=0.9, help="of warmup_exp_decay_exp")
    group.add_argument("--lr-decay-steps", type=positive_int, default=250, help="of warmup_exp_decay_exp")
    group.add_argument("--lr-offset", type=non_negative_float, default=0.0, help="of warmup_exp_decay_exp")
    group.add_argument("--beta1", type=decay_factor, default=0.9, help="decay of the first moment")
    group.add_argument("--beta2", type=decay_factor, default=0.999, help="decay of the second moment")
    group.add_argument("--epsilon", type=positive_float, default=1e-6, help="of the optimizer")
    group.add_argument("--weight-decay", type=non_negative_float, default=0.01, help="not on biases and LayerNorms")
    group.add_argument("--max-grad-norm", type=positive_float, default=1.0, help="gradients are clipped to this norm")
    group.add_argument(
        "--max-skipped-steps", type=positive_int, default=25, help="updates in a row that may have no finite gradient"
    )
    return group


def add_precision_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("advanced")
    group.add_argument("--amp", action=BooleanFlag, help="compute in 16 bits, with float32 weights")
    group.add_argument("--amp-dtype", choices=("bfloat16", "float16"), default="bfloat16", help="the 16-bit type")
    group.add_argument(
        "--use-pure-fp16", action=BooleanFlag, help="hold the model in --amp-dtype; the optimizer keeps float32 copies"
    )
    group.add_argument("--scale-loss", type=positive_float, default=1.0, help="loss scale, float16 only")
    group.add_argument(
        "--use-dynamic-loss-scaling",
        action=BooleanFlag,
        help="adapt the loss scale, from --scale-loss or, where that is 1, from 2^20",
    )
    group.add_argument(
        "--compile",
        choices=("none", "layers", "model"),
        default="none",
        help="torch.compile: each layer (starts sooner), or the whole model; needs a C++ compiler",
    )
    group.add_argument("--tf32", action=BooleanFlag, help="float32 matrix products in TF32, on GPUs that have it")


def show_arguments(arguments: Arguments, title: str) -> str:
    """All settings, one a line."""
    values = arguments.as_dict()
    width = max(map(len, values))
    lines = [f"  --{name.replace('_', '-'):<{width}}  {value}" for name, value in sorted(values.items())]
    return "\n".join([title, *lines])


def jsonable(arguments: Arguments) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in arguments.as_dict().items()}
