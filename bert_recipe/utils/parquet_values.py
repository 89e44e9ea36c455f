"""The names of classes in Parquet files of Hugging Face's `datasets`."""

import json
from typing import Any


def class_names(metadata: dict[bytes, bytes] | None) -> dict[str, list[str]]:
    """The names of classes for each column of classes, or of lists of classes, such as `{"label":
    ["negative", "positive"]}`. `datasets` keeps them in the file's metadata, and stores numbers.
    """
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    if not isinstance(features, dict):
        return {}
    names = {}
    for column, feature in features.items():
        if isinstance(feature, list) and len(feature) == 1:  # as older versions have lists
            (feature,) = feature
        if isinstance(feature, dict) and "feature" in feature:  # a list
            feature = feature["feature"]
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
            names[column] = feature.get("names") or []
    return names


def named_class(value: Any, names: list[str]) -> Any:
    """The name of a class, or of each in a list; None for -1, which `datasets` writes where there
    is no label.
    """
    if isinstance(value, list):
        return [named_class(member, names) for member in value]
    if type(value) is not int or value >= len(names):
        return value
    return names[value] if value >= 0 else None
