"""All flags of all programs, one line per program and flag, with the flag's other names.

After a flag was added or removed:

    python3 tests/support/program_flags.py > tests/programs/flags.txt
"""

import argparse
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bert_recipe.utils.command_line import BooleanFlag  # noqa: E402


class ParserCaught(BaseException):
    """Ends a program where it parses its command line; not an Exception, which programs report."""

    def __init__(self, parser: argparse.ArgumentParser):
        self.parser = parser


def catch_parser(parser: argparse.ArgumentParser, *_args: object, **_kwargs: object) -> None:
    raise ParserCaught(parser)


def load(program: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"flags_of_{program.stem}", program)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def first_parser(program: ModuleType, command: str | None = None) -> argparse.ArgumentParser:
    """The parser of `program` for a command line without flags."""
    start = program.main if command else getattr(program, "parse_arguments", program.main)
    words = [command] if command else []
    parameters = [words] if inspect.signature(start).parameters else []
    with (
        mock.patch.object(sys, "argv", [str(program.__file__), *words]),
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", catch_parser),
    ):
        try:
            start(*parameters)
        except ParserCaught as caught:
            return caught.parser
    raise AssertionError(f"{program.__file__} parsed no command line")


def parsers_in(
    parser: argparse.ArgumentParser, program: str
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """`parser` and those of its commands, each after its PROGRAM [COMMAND]."""
    yield program, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, subparser in action.choices.items():
                yield from parsers_in(subparser, f"{program} {command}")


def flags_in(parser: argparse.ArgumentParser, program: str) -> Iterator[str]:
    for action in parser._actions:
        names = [name for name in action.option_strings if name not in ("-h", "--help")]
        if isinstance(action, BooleanFlag):
            names = [name for name in names if not name.startswith("--no-")]
        if names:
            yield f"{program} {' '.join(names)}"


def parsers_of_programs() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The parsers of all programs and commands, each after its PROGRAM [COMMAND]."""
    folders = (ROOT, ROOT / "data", ROOT / "scripts")
    for file in (path for folder in folders for path in sorted(folder.glob("*.py"))):
        if "run_main(" not in file.read_text(encoding="utf-8"):
            continue
        program, name = load(file), str(file.relative_to(ROOT))
        yield from parsers_in(first_parser(program), name)
        # The commands of convert_checkpoint.py have parsers of their own.
        for command in getattr(program, "DERIVED", ()):
            yield from parsers_in(first_parser(program, command), f"{name} {command}")


def flags_of_programs() -> list[str]:
    """`PROGRAM [COMMAND] --flag --other-name`, sorted."""
    return sorted(
        line for program, parser in parsers_of_programs() for line in flags_in(parser, program)
    )


if __name__ == "__main__":
    print("\n".join(flags_of_programs()))
