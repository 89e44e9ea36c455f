"""Values of Parquet files in Python, with the names of classes in Hugging Face's data sets."""

import json
from typing import Any


def parquet_value(scalar: Any) -> Any:
    """The value of a cell in Python; as text if Python has no such value: nanoseconds, times after
    the year 9999, unknown time zones.
    """
    import pyarrow

    try:
        if not needs_nanoseconds(scalar):
            return scalar.as_py()
    except UnicodeDecodeError:
        raise
    except (ValueError, OverflowError, LookupError, pyarrow.ArrowException):
        pass
    if isinstance(scalar, pyarrow.MapScalar):
        return [tuple(map(parquet_value, pair.values())) for pair in scalar.values]
    if isinstance(scalar, pyarrow.StructScalar):
        return {name: parquet_value(value) for name, value in scalar.items()}
    if isinstance(scalar, pyarrow.ListScalar | pyarrow.LargeListScalar):
        return [parquet_value(value) for value in scalar.values]
    try:
        text = scalar.cast(pyarrow.string()).as_py()
    except pyarrow.ArrowException:  # an unknown time zone
        text = "<"
    if text.startswith("<") or isinstance(scalar, pyarrow.DurationScalar):  # no date, no unit
        return f"{scalar.value} {scalar.type}"
    return text


def needs_nanoseconds(scalar: Any) -> bool:
    """Whether pyarrow would give an object of pandas, or cut a time, where pandas is installed."""
    kind = scalar.type
    if not scalar.is_valid or "[ns" not in str(kind):
        return False
    return kind.num_fields > 0 or getattr(scalar, "value", 0) % 1000 != 0


def class_names(metadata: dict[bytes, bytes] | None) -> dict[str, list[str]]:
    """The names of classes by column, which `datasets` keeps beside their numbers: of a column of
    classes, or of lists of them.
    """
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    found = {}
    for name, feature in features.items() if isinstance(features, dict) else ():
        if isinstance(feature, dict):
            feature = feature.get("feature", feature)  # of a list
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
            found[name] = feature.get("names") or []
    return found


def named_class(value: Any, names: list[str]) -> Any:
    """The name of a class, or of each in a list; None for -1, which `datasets` writes where there
    is no label.
    """
    if isinstance(value, list):
        return [named_class(each, names) for each in value]
    if type(value) is not int or value >= len(names):
        return value
    return names[value] if value >= 0 else None
