"""The models; implemented in bert_recipe/model/encoders/, loaded and saved by
bert_recipe/checkpoint/pretrained.py.
"""

from bert_recipe.checkpoint import pretrained
from bert_recipe.checkpoint.pretrained import *  # noqa: F403

__all__ = pretrained.__all__
