"""The registry of encoders and their heads. Each encoder is a file in model/encoders/: its config,
layers and models.

To add an encoder, write its file, add its config and models to `MODELS`, and import its classes in
modeling.py.
"""

from bert_recipe.model.encoders import bert, distilbert, electra, modernbert, neobert, roberta
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.model.encoders.config import ModelConfig, UnsupportedModelError
from bert_recipe.model.encoders.heads import MaskedLanguageModel, ModelsByHead
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import JsonObject

MODELS: dict[type[ModelConfig], ModelsByHead] = {
    bert.BertConfig: bert.MODELS,
    modernbert.ModernBertConfig: modernbert.MODELS,
    roberta.RobertaConfig: roberta.MODELS,
    distilbert.DistilBertConfig: distilbert.MODELS,
    electra.ElectraConfig: electra.MODELS,
    neobert.NeoBertConfig: neobert.MODELS,
}


def make_model(head: str, config: ModelConfig) -> PreTrainedModel:
    """Makes the model with `head`, a key of `MODELS`, for the encoder of `config`; see
    `check_tied`.
    """
    model = MODELS[type(config)][head]
    check_tied(model, config)
    return model(config)


def check_tied(model: type[PreTrainedModel], config: ModelConfig) -> None:
    """Raises UserError if the head of `model` is tied to the word embeddings and the config says
    that it is not.
    """
    is_tied = getattr(model, "output_weight", None) is MaskedLanguageModel.output_weight
    if is_tied and not config.tie_word_embeddings:
        raise UserError(
            f"tie_word_embeddings is False in the config, and {model.__name__} has no other output "
            f"layer: use another model (docs/choose_a_model.md has one for each use)"
        )


def config_from_dict(values: JsonObject) -> ModelConfig:
    """The config in the content of a `config.json`, by its `model_type`. Raises ValueError if it is
    not supported, an UnsupportedModelError if the architecture is not.
    """
    model_type = values.get("model_type", "bert")
    for config_class in MODELS:
        if model_type in config_class.model_types:
            return config_class.from_dict(values)
    known = [name for config_class in MODELS for name in config_class.model_types]
    known.remove(bert.PRE_LN_MODEL_TYPE)  # of this project's own folders
    raise UnsupportedModelError(
        f"model_type is {model_type!r}, and only {', '.join(known)} are supported: use such a "
        f"model (docs/choose_a_model.md has one for each use)"
    )
