"""JSON files: read, checked against the types that a reader expects, written atomically, hashed."""

import functools
import hashlib
import json
import sys
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import GenericAlias, NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import IS_POINTER, LFS_POINTER, write_atomically

JsonObject = dict[str, Any]

KIND_NAMES = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    NoneType: "null",
}

type_hints = functools.cache(get_type_hints)  # a SQuAD file has 100,000 questions


def read_json(path: str | Path, description: str, kind: Any = dict[str, Any]) -> Any:
    """The JSON value in the file `path`, of the type `kind` as for `from_json`, by default an
    object. `description` names the kind of file in errors.

    Raises UserError for a missing file, invalid JSON, a key twice in one object, and a value of
    another type.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{description} {path} does not exist: check the path")
    return parse_json(path.read_bytes(), f"{description} {path}", kind)


def parse_json(content: bytes, description: str, kind: Any = dict[str, Any]) -> Any:
    """The JSON value in `content`, as for `read_json`. `description` names it in errors."""
    if content.startswith(LFS_POINTER):
        raise UserError(f"{description} {IS_POINTER}")
    try:
        value = json.loads(content.decode("utf-8-sig"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:  # also UnicodeDecodeError and too long integers
        raise UserError(
            f"{description} is not valid JSON ({error}): correct it, or fetch it again"
        ) from error
    return from_json(kind, value, description)


def write_json(path: str | Path, value: Any, indent: int | None = 2) -> None:
    """Writes `value` as JSON to the file `path`, atomically."""
    write_atomically(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")


def json_bytes(value: Any) -> bytes:
    """`value` as the content of a JSON file in ASCII."""
    return json.dumps(value, indent=2).encode() + b"\n"


def json_digest(value: Any) -> str:
    """Identifies a JSON value: 16 digits of its SHA-256."""
    content = json.dumps(value, sort_keys=True, default=str).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def list_of(kind: Any) -> GenericAlias:
    """A kind for `from_json`: a list whose items have the types of `kind`, a dict."""
    return GenericAlias(list, (kind,))


def object_of(kind: Any) -> GenericAlias:
    """A kind for `from_json`: an object with any keys, whose values have the types of `kind`."""
    return GenericAlias(dict, (str, kind))


def unique_keys(pairs: list[tuple[str, Any]]) -> JsonObject:
    """The object of `pairs`, for json.loads. Raises ValueError if a key is given twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return value


def from_json(kind: Any, value: Any, where: str) -> Any:
    """`value` if it is of the type `kind`: a dataclass (made from an object, without keys that are
    no fields), a dict of the types of some keys (those that may be missing are None then),
    list[...], dict[str, ...], a union, Any, or a plain type; an int is made a float for one. Raises
    UserError, naming `where` it is, otherwise.
    """
    origin = get_origin(kind)
    kinds = get_args(kind) if origin is UnionType else (kind,)
    if kind is Any or type(value) in kinds:
        return value
    if origin is UnionType:
        return union_member(kind, value, where)
    if kind is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    if isinstance(value, dict):
        if is_dataclass(kind):
            return dataclass_from_json(kind, value, where)
        if isinstance(kind, dict):
            return value | values_from_json(kind, value, where)
        if origin is dict:
            _, value_kind = get_args(kind)
            return values_from_json(dict.fromkeys(value, value_kind), value, where)
    if isinstance(value, list) and origin is list:
        (item_kind,) = get_args(kind)
        return [from_json(item_kind, item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise wrong_kind(kind, value, where)


def union_member(kind: UnionType, value: Any, where: str) -> Any:
    """`value` as the first type of the union that it has."""
    for member_kind in get_args(kind):
        try:
            return from_json(member_kind, value, where)
        except UserError:
            continue
    raise wrong_kind(kind, value, where)


def values_from_json(types: JsonObject, value: JsonObject, where: str) -> JsonObject:
    return {
        name: from_json(kind, value.get(name), f"{where}: {name}") for name, kind in types.items()
    }


def dataclass_from_json(kind: Any, value: JsonObject, where: str) -> Any:
    for field in fields(kind):
        is_required = field.default is MISSING and field.default_factory is MISSING
        if is_required and field.name not in value:
            raise UserError(
                f"{where}: {field.name} is missing: correct the file, or fetch it again"
            )
    types = {name: field_kind for name, field_kind in type_hints(kind).items() if name in value}
    return kind(**values_from_json(types, value, where))


def wrong_kind(kind: Any, value: Any, where: str) -> UserError:
    kinds = get_args(kind) if get_origin(kind) is UnionType else (kind,)
    expected = " or ".join(map(kind_name, kinds))
    shown = repr(value) if len(repr(value)) <= 60 else type(value).__name__
    return UserError(
        f"{where} is {shown}, expected {expected}: correct the file, or fetch it again"
    )


def kind_name(kind: Any) -> str:
    if isinstance(kind, dict) or is_dataclass(kind):
        return KIND_NAMES[dict]
    return KIND_NAMES[get_origin(kind) or kind]
