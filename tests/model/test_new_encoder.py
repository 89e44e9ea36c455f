"""An encoder with names, norms and layers that no other encoder has: nothing in the model, the
optimizers or the checkpoints may depend on the names of BERT or ModernBERT.
"""

from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bert_recipe.checkpoint.pretrained import load_pretrained
from bert_recipe.checkpoint.weights import checkpoint_shapes
from bert_recipe.model.attention import PreparedAttention
from bert_recipe.model.encoders.base import EncoderModel, PreTrainedModel
from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.model.encoders.modules import Linear, VocabularyEmbedding
from bert_recipe.optimization.muon import hidden_matrices
from bert_recipe.optimization.protocol import undecayed_parameters
from bert_recipe.utils.json_files import write_json

pytestmark = pytest.mark.fast


@dataclass(frozen=True)
class NovelConfig(ModelConfig):
    model_types = ("novel",)
    model_type = "novel"
    embedding_dropout = 0.0


class NovelBlock(nn.Module):
    def __init__(self, config: NovelConfig):
        super().__init__()
        self.scale = nn.RMSNorm(config.hidden_size)
        self.gate_and_up = Linear(
            config.hidden_size, 2 * config.intermediate_size, bias=False, stacked=2
        )
        self.down = Linear(config.intermediate_size, config.hidden_size)


class NovelModel(EncoderModel):
    base_model_prefix = "novel"
    config_class = NovelConfig
    head_names = ()

    def __init__(self, config: NovelConfig):
        super().__init__(config, None)
        self.tokens = VocabularyEmbedding(config)
        self.blocks = nn.ModuleList(NovelBlock(config) for _ in range(config.num_hidden_layers))
        self.init_weights()

    @property
    def layers(self) -> nn.ModuleList:
        return self.blocks

    @property
    def embedding_modules(self) -> list[nn.Module]:
        return [self.tokens]

    def embed(self, stream) -> Tensor:
        return self.tokens(stream.input_ids)

    def add_encoder(self, pooling: str | None) -> None:
        self.novel = NovelModel(self.config)

    def draw_matrix(self, name: str, value: Tensor) -> None:
        value.fill_(0.5)

    def prepare_attentions(self, stream, hidden_TE: Tensor) -> list[PreparedAttention]:
        return []


@pytest.fixture
def model() -> PreTrainedModel:
    return NovelModel(NovelConfig(70, 8, 2, 2, 12))


def test_weights_of_any_normalization_start_at_one_and_have_no_weight_decay(model):
    for name, p in model.named_parameters():
        is_norm = "scale" in name
        is_bias = name.endswith("bias")
        assert (p[:70] == (1 if is_norm else 0 if is_bias else 0.5)).all(), name
        assert (name in undecayed_parameters(model)) == (is_norm or is_bias)


def test_muon_takes_the_matrices_of_the_layers_by_type(model):
    names = {
        f"blocks.{layer}.{name}.weight" for layer in (0, 1) for name in ("gate_and_up", "down")
    }
    assert hidden_matrices(model) == {name: 2 if "gate" in name else 1 for name in names}


def test_its_folder_has_no_vocabulary_padding_and_loads(model, tmp_path):
    assert model.tokens.weight.shape == (128, 8) and checkpoint_shapes(model)["tokens.weight"] == (
        70,
        8,
    )
    saved = {name: torch.randn(shape) for name, shape in checkpoint_shapes(model).items()}
    save_file(saved, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", model.config.to_dict())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bert_recipe.model.encoders.registry.MODELS", {NovelConfig: {}})
        loaded = load_pretrained(NovelModel, tmp_path).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
