"""Command-line parsing on top of argparse: hyphens or underscores, booleans with or without a
value, defaults in the help, one-line errors, and frozen results.
"""

import argparse
import itertools
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from bert_recipe.utils.errors import error_line, print_error, reports_errors
from bert_recipe.utils.suggestions import suggestion

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TRUE_WORDS = {"true", "t", "yes", "y", "on", "1"}
FALSE_WORDS = {"false", "f", "no", "n", "off", "0"}
MAX_FLOAT32 = 3.4e38

Config = TypeVar("Config", bound="DataclassInstance")


class Arguments(argparse.Namespace):
    """Parsed arguments, frozen when `parse_args` returns; without any, nothing was given."""

    _given: Mapping[str, str] = MappingProxyType({})
    _flags: "Mapping[str, Flag]" = MappingProxyType({})
    _program: str | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_frozen"):
            raise AttributeError(f"arguments are frozen: cannot set {name}")
        super().__setattr__(name, value)

    def given(self, name: str) -> bool:
        """Whether the argument `name` was given on the command line."""
        return name in self._given

    def is_typed(self, flag: str) -> bool:
        """Whether `flag`, which may be one of several names, was given on the command line."""
        return flag in self._given.values()

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an argument that only some programs have."""
        return vars(self).get(name, default)

    def tagged(self, tag: str) -> dict[str, Any]:
        """The values of the flags that have `tag`, by the flag's first name."""
        return {
            flag.names[0]: vars(self)[name]
            for name, flag in self._flags.items()
            if tag in flag.tags
        }

    def changed(self) -> dict[str, Any]:
        """The values given on the command line, by flag as typed, but for `--no-`."""
        values = self.as_dict()
        return {
            positive(flag): values[name]
            for name, flag in self._given.items()
            if values[name] != self._defaults[name]
        }

    def command(self) -> str | None:
        """The command that was typed, with the names of files without their folders; None if there
        was none.
        """
        if self._program is None:
            return None
        words = ["python3", self._program]
        for name, flag in self._given.items():
            value = vars(self)[name]
            values = value if isinstance(value, list) else [value]
            if values:
                words.append(positive(flag))
            for part in values:
                text = part.name if isinstance(part, Path) else str(part)
                if part is not True:
                    words.append(shlex.quote(text))
        return " ".join(words)

    def as_dict(self) -> dict[str, Any]:
        """The arguments by name; paths are strings, so that the result can be written as JSON."""
        public = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {
            name: str(value) if isinstance(value, Path) else value for name, value in public.items()
        }


def positive(flag: str) -> str:
    """The flag that has the value of `flag`: `--no-shuffle` sets that of `--shuffle`."""
    return flag.replace("--no-", "--", 1)


class BooleanFlag(argparse.Action):
    """`--flag`, `--flag true`, `--flag=false` and `--no-flag`."""

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        default: bool = False,
        help: str = "",
        **_: Any,
    ):
        negatives = ["--no-" + option[2:] for option in option_strings if option.startswith("--")]
        super().__init__(
            [*option_strings, *negatives],
            dest,
            nargs="?",
            default=default,
            help=help,
            metavar="true|false",
        )

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[str] | None,
        option_string: str | None = None,
    ) -> None:
        word = "true" if values is None else str(values).lower()
        is_negative = str(option_string).startswith("--no-")
        if word not in TRUE_WORDS | FALSE_WORDS:
            parser.error(f"argument {option_string}: expected true or false, not {values!r}")
        setattr(namespace, self.dest, (word in TRUE_WORDS) != is_negative)


REQUIRED = object()  # the default of a required flag


@dataclass(frozen=True)
class Computed:
    """The default of a flag whose argument is None unless it is given. rule: how the program
    computes the value then, for --help.
    """

    rule: str


class Flag:
    """Declaration of a flag, or of a positional argument: the only way in which programs have them.

    names: the flag and its aliases, or a name without "--"; the first one names the argument.
    kind: `bool`, a tuple of choices, or a function that parses a string.
    needs: flags that this one requires, such as "--amp or --lr-decay poly".
    excludes: flags that cannot be combined with it.
    options: passed to argparse.
    tags: read by `Arguments.tagged` and `tagged_values`.
    """

    def __init__(
        self,
        names: str,
        kind: Any,
        default: Any,
        help: str,
        needs: Sequence[str] = (),
        excludes: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
        **tags: Any,
    ):
        self.names = names.split()
        self.kind = kind
        self.default = default
        self.help = help
        self.needs = needs
        self.excludes = excludes
        self.options = options or {}
        self.tags = tags
        self.name = self.options.get("dest") or argument_name(self.names[0])


def option(
    names: str,
    kind: Any,
    default: Any,
    help: str,
    needs: Sequence[str] = (),
    excludes: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    **tags: Any,
) -> Any:
    """A field of a dataclass that a flag sets. See `Flag` for the parameters."""
    flag = Flag(names, kind, default, help, needs, excludes, options, **tags)
    metadata = {"flag": flag}
    return field(default=MISSING if default is REQUIRED else default, metadata=metadata)


def value_of(flag: str, default: Any) -> Any:
    """A field of a dataclass with the value of a flag that another dataclass declares; `default`
    where there is no command line.
    """
    return field(default=default, metadata={"argument": argument_name(flag)})


def flags_of(*configs: "type[DataclassInstance]") -> list[Flag]:
    """The flags of the fields of dataclasses, without those of dataclasses in them."""
    return [
        field.metadata["flag"]
        for config in configs
        for field in fields(config)
        if "flag" in field.metadata
    ]


def argument_of(member: Field[Any]) -> str | None:
    """The argument that gives the value of a field; None if it has no flag."""
    flag = member.metadata.get("flag")
    return member.metadata.get("argument") if flag is None else flag.name


def tagged_values(config: "DataclassInstance", tag: str) -> dict[str, Any]:
    """The values of the fields whose flags have `tag`, by the flag's first name."""
    flags = {member.name: member.metadata.get("flag") for member in fields(config)}
    return {
        flag.names[0]: getattr(config, name)
        for name, flag in flags.items()
        if flag is not None and tag in flag.tags
    }


def from_flags(config: type[Config], args: Arguments, **values: Any) -> Config:
    """Makes `config` from the flags of its fields (see `option` and `value_of`) and from `values`.
    Fields that are such dataclasses themselves are made in the same way.

    values: instead of those of the flags, by argument; and those of fields without a flag.
    """
    chosen = {}
    for member in fields(config):
        argument = argument_of(member)
        name = argument or member.name
        if name in values:
            chosen[member.name] = values[name]
        elif isinstance(member.type, type) and is_dataclass(member.type):
            chosen[member.name] = from_flags(member.type, args, **values)
        elif argument is not None and argument in args:
            chosen[member.name] = vars(args)[argument]
    return config(**chosen)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description. Shows defaults, except for switches that are off, and for
    None and empty lists, whose meaning `help` explains. The usage names only what is required, and
    a flag's value stands once, after all of its names.
    """

    def _get_help_string(self, action: argparse.Action) -> str | None:
        hides_default = action.default in (None, (), []) or action.default is False
        return action.help if hides_default else super()._get_help_string(action)

    def _format_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None,
    ) -> str:
        shown: list[argparse.Action] = []
        has_other_flags = False
        for action in actions:
            if action.required or not action.option_strings:
                shown.append(action)
            elif action.dest != "help":
                has_other_flags = True
        text = super()._format_usage(usage, shown, groups, prefix)
        return f"{text.rstrip()} [FLAG ...]\n\n" if has_other_flags else text

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        names = list(action.option_strings)
        if isinstance(action, BooleanFlag):
            positives = [name for name in names if not name.startswith("--no-")]
            return ", ".join([*positives, f"--no-{positives[0][2:]}"])
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(names)} {value}"


class ForeignFlag(NamedTuple):
    """A flag of another system (see config/foreign_flags.py).

    is_accepted: it is read and does nothing, but must not be switched off; other flags are refused.
    reason: why it does nothing, or what to type instead.
    accepted_values: those with which a refused flag asks for what is done anyway.
    """

    is_accepted: bool
    reason: str
    accepted_values: tuple[str, ...]


class ArgumentParser(argparse.ArgumentParser):
    """argparse with the conventions of this module."""

    def __init__(self, **kwargs: Any):
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)
        self.flags: dict[str, Flag] = {}
        self.foreign: Mapping[str, ForeignFlag] = {}  # by flag, with hyphens

    def add_flags(self, title: str, flags: Iterable[Flag], **defaults: Any) -> None:
        """Adds a group of flags; positional arguments have argparse's own. `defaults` override
        those of `flags`, by argument name.
        """
        group = self.add_argument_group(title)
        for flag in flags:
            default = defaults.get(flag.name, flag.default)
            options = dict(flag.options)
            help_text = flag.help
            if isinstance(default, Computed):
                help_text = f"{flag.help} (default: {default.rule})"
                default = None
            is_positional = not flag.names[0].startswith("--")
            if is_positional and not isinstance(flag.kind, tuple):
                options.setdefault("metavar", flag.name.upper())
            if default is REQUIRED:
                default = None
                if not is_positional:
                    options["required"] = True
            if flag.kind is bool:
                options["action"] = BooleanFlag
            elif isinstance(flag.kind, tuple):
                options["choices"] = flag.kind
            else:
                options["type"] = flag.kind
            target = self if is_positional else group
            help_text = help_text.replace("%", "%%")  # which argparse formats
            target.add_argument(*flag.names, default=default, help=help_text, **options)
            self.flags[flag.name] = flag

    def parse_args(self, args: Sequence[str] | None = None, namespace: None = None) -> Arguments:
        argv = [hyphenated(word) for word in (sys.argv[1:] if args is None else args)]
        # Argparse would name what is missing first, though a misspelt flag may be why.
        if self._subparsers is None:
            argv = self._translated(argv)
        parsed, surplus = super().parse_known_args(argv, Arguments())
        if surplus:
            are_files = all(Path(word).is_file() for word in surplus)
            advice = ": put a pattern of several files in quotation marks" if are_files else ""
            self.error(f"unrecognized arguments: {' '.join(surplus)}{advice}")
        typed = [word.partition("=")[0] for word in argv if is_flag(word)]
        actions = list(self._actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                actions += action.choices[getattr(parsed, action.dest)]._actions
        owners = {option: action.dest for action in actions for option in action.option_strings}
        parsed._given = {owners[flag]: flag for flag in typed if flag in owners}
        parsed._defaults = {action.dest: action.default for action in actions}
        parsed._flags = self.flags
        parsed._program = self.prog
        parsed._frozen = True
        return parsed

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Of argparse, for each word of a value. Refuses an empty one, such as "$NAME" that is not
        set: it would be the working folder, no column, or a switch that is on.
        """
        if not arg_string and action.type is not any_text:
            raise argparse.ArgumentError(action, "the value is empty: give one, or leave it out")
        return super()._get_value(action, arg_string)

    def _translated(self, argv: list[str]) -> list[str]:
        """`argv` without flags of other systems. Exits with one error for all flags that are not
        known.
        """
        if "--error" in argv:  # what scripts/configs/unknown_preset.sh prints
            message = argv[argv.index("--error") + 1 :]
            self.error(" ".join(itertools.takewhile(lambda word: not is_flag(word), message)))
        words: list[str] = []
        complaints: list[str] = []
        unknown: list[str] = []
        skips_value = False  # whether this word is the value of a foreign flag that does nothing
        for word, following in zip(argv, [*argv[1:], ""], strict=False):
            if skips_value:
                skips_value = False
                continue
            if not is_flag(word):
                words.append(word)
                continue
            flag, _, value = word.partition("=")
            foreign = self.foreign.get(flag)
            if foreign is None:
                if flag in self._option_string_actions:
                    words.append(word)
                else:
                    unknown.append(word + suggestion(flag, self._option_string_actions))
                continue
            has_value_after = not value and following != "" and not is_flag(following)
            if foreign.is_accepted:
                # A word after a switch is its value only if it is a boolean.
                skips_value = has_value_after and following.lower() in TRUE_WORDS | FALSE_WORDS
                setting = following if skips_value else value or "true"
                if setting.lower() not in TRUE_WORDS:
                    complaints.append(f"{flag} cannot be switched off: {foreign.reason}")
                continue
            setting = following if has_value_after else value or "true"
            if setting.lower() in foreign.accepted_values:
                skips_value = has_value_after
            else:
                complaints.append(f"{flag} is not a flag of this program: {foreign.reason}")
        if unknown:
            complaints.append(f"unrecognized arguments: {' '.join(unknown)}")
        if complaints:
            self.error("; ".join(complaints))
        return words

    def refuse_without_effect(
        self, args: Arguments, effects: Iterable[tuple[Iterable[str], object, str]]
    ) -> None:
        """Exits with an error if given flags would be ignored. `effects`: names, whether they
        work, what they need.
        """
        self.refuse(
            sentence
            for names, works, needed in effects
            if not works
            for name in names
            for sentence in self._without_effect(args, name, needed)
        )

    def check_flags(self, args: Arguments) -> None:
        """Exits with one error if requirements or exclusions of flags are violated."""
        complaints = []
        for name, flag in self.flags.items():
            if not args.given(name):
                continue
            asks = not self._asks_nothing(vars(args)[name])
            for other in flag.excludes:
                if asks and self._is_chosen(args, other, without_flags=False):
                    complaints.append(
                        f"{args._given[name]} cannot be combined with {other}: leave one of them "
                        "out"
                    )
            for need in flag.needs:
                if not self._is_chosen(args, need, without_flags=True):
                    complaints += self._without_effect(args, name, need)
        self.refuse(complaints)

    def refuse(self, complaints: Iterable[str]) -> None:
        """Exits with one error if there are complaints."""
        if message := "; ".join(complaints):
            self.error(message)

    def _without_effect(self, args: Arguments, name: str, needed: str) -> Iterator[str]:
        """A sentence if the flag of the argument `name` is given, and asks for something."""
        if not args.given(name):
            return
        if not self._asks_nothing(vars(args)[name]) or self.get_default(name):
            flag = args._given[name]
            yield f"{flag} has no effect without {needed}: add that, or leave {flag} out"

    @staticmethod
    def _asks_nothing(value: Any) -> bool:
        return value is None or value is False or value == "none"

    def _is_chosen(self, args: Arguments, condition: str, without_flags: bool) -> bool:
        """Whether the values of flags satisfy `condition`, such as "--amp or --lr-decay poly": one
        of its flags has the value that follows it, or, without one, is not at its default.
        without_flags: the result in a program that has none of the flags.
        """
        values = vars(args)
        has_flags = False
        for part in condition.split(" or "):
            flag, _, expected = part.partition(" ")
            name = argument_name(flag)
            if name not in args:
                continue
            has_flags = True
            if expected:
                is_chosen = values[name] == expected
            else:
                is_chosen = values[name] != self.get_default(name)
            if is_chosen:
                return True
        return without_flags and not has_flags

    def error(self, message: str) -> NoReturn:
        if reports_errors():
            print_error(f"error: {error_line(message)} (see {self.prog} --help)")
        sys.exit(2)


def is_flag(word: str) -> bool:
    return len(word) > 2 and word.startswith("--")


def argument_name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def hyphenated(word: str) -> str:
    """`--max_steps=5` as `--max-steps=5`; values and short options stay as they are."""
    if not is_flag(word):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


@dataclass(frozen=True)
class Bounded:
    """Argument type: an `int` or `float` from `minimum` to `maximum`; `exclusive`: greater than
    `minimum`. A class, so that arguments can be sent to other processes.
    """

    kind: type
    minimum: float
    maximum: float = MAX_FLOAT32
    exclusive: bool = False

    def __call__(self, text: str) -> Any:
        expected = "expected a whole number" if self.kind is int else "expected a number"
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        try:
            value = self.kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{expected}, not {shown!r}") from error
        if value > self.maximum:
            raise argparse.ArgumentTypeError(f"{expected} <= {self.maximum:.12g}, not {shown}")
        if not value >= self.minimum or (self.exclusive and value == self.minimum):
            raise argparse.ArgumentTypeError(
                f"{expected} {'>' if self.exclusive else '>='} {self.minimum:.12g}, not {shown}"
            )
        return value


bounded_int, bounded_float = partial(Bounded, int), partial(Bounded, float)
positive_int = bounded_int(1, 2**31 - 1)
non_negative_int = bounded_int(0, 2**31 - 1)
random_seed = bounded_int(-(2**63), 2**64 - 1)  # what torch.manual_seed takes
positive_float = bounded_float(0, exclusive=True)
non_negative_float = bounded_float(0)
finite_float = bounded_float(-MAX_FLOAT32)
fraction = bounded_float(0, 1)


def plain_name(text: str) -> str:
    """A name for files, without a folder."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", text):
        raise argparse.ArgumentTypeError(
            "expected at most 100 letters, digits, '.', '_' and '-', without a folder"
        )
    return text


def fraction_below_one(text: str) -> float:
    value = fraction(text)
    if value == 1:
        raise argparse.ArgumentTypeError(f"expected a number < 1, not {text}")
    return value


def any_text(text: str) -> str:
    """Argument type of texts that may be empty."""
    return text


def optional_path(text: str) -> Path | None:
    """A path; `None` means that there is none."""
    return None if text.lower() == "none" else Path(text)


def settings_text(args: Arguments) -> list[str]:
    """Lines for the terminal, as --show-config asks: all settings, those that differ from the
    defaults (None), or none.
    """
    if args.show_config:
        return [format_arguments(args)]
    if args.show_config is not None:
        return []
    changed = [f"{flag} {as_words(value)}" for flag, value in args.changed().items()]
    return [f"settings that differ from the defaults: {' '.join(changed) or 'none'}"]


def as_words(value: Any) -> str:
    """A flag's value as it is typed in a shell."""
    values = value if isinstance(value, list) else [value]
    return shlex.join(map(str, values))


def format_arguments(arguments: Arguments) -> str:
    """All settings, one per line, for the terminal."""
    values = arguments.as_dict()
    width = max(map(len, values))
    lines = [
        f"  --{name.replace('_', '-'):<{width}}  {value}" for name, value in sorted(values.items())
    ]
    return "\n".join(["settings:", *lines])
