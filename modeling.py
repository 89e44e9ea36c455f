"""The models, for people who import them; see encoders/registry.py."""

from encoders.registry import MODELS, config_from_dict, make_model

__all__ = ["MODELS", "config_from_dict", "make_model"]
