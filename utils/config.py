"""Command lines as this project writes them: hyphens or underscores, booleans with or without a value, defaults in
the help, one line for an error, and a result that cannot change after parsing."""

import argparse
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
        argv = [hyphenated(token) for token in (sys.argv[1:] if args is None else args)]
        parsed = super().parse_args(argv, namespace or Arguments())
        parsed._frozen = True
        return parsed

    def error(self, message: str) -> NoReturn:
        print(f"error: {one_line(message)} (see {self.prog} --help)", file=sys.stderr, flush=True)
        sys.exit(2)


def hyphenated(token: str) -> str:
    """`--max_steps=5` as `--max-steps=5`; values and short options stay as they are."""
    if not token.startswith("--"):
        return token
    name, equals, value = token.partition("=")
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


def read_json(path: str | Path, what: str) -> Any:
    """The JSON value in the file `path`; `what` names its kind in errors."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{what} {path} does not exist: check the path")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{what} {path} is not valid JSON ({error}): it may be cut off, fetch it again") from error
