"""The names of classes in Parquet files of Hugging Face's `datasets`."""

import json
from typing import Any


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
