"""What tells the layers of an encoder apart in training: learning rates that fall from each layer
to the one below it (Howard and Ruder, 2018, "Universal Language Model Fine-tuning for Text
Classification", section 3.2), and layers that are not trained.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.optimization.protocol import ParameterGroup
from bert_recipe.utils.errors import UserError


def layer_depths(model: PreTrainedModel) -> dict[str, int]:
    """The depth of each parameter: 0 in the embeddings, 1 to L in the L layers, L + 1 above."""
    below = model.base_model.embedding_modules
    depths = {p: 0 for module in below for p in module.parameters()}
    for depth, layer in enumerate(model.layers, 1):
        depths |= dict.fromkeys(layer.parameters(), depth)
    top = len(model.layers) + 1
    return {name: depths.get(p, top) for name, p in model.named_parameters()}


def freeze_lowest_layers(model: PreTrainedModel, count: int) -> None:
    """Lets the embeddings and the first `count` layers of a model never train. Raises UserError if
    there are fewer layers.
    """
    if count > len(model.layers):
        raise UserError(
            f"--freeze-layers {count}: the model has {len(model.layers)} layers: give fewer"
        )
    for name, depth in layer_depths(model).items():
        if depth <= count:
            model.get_parameter(name).requires_grad_(False)


def layerwise_groups(
    groups: list[ParameterGroup],
    lr: Tensor,
    decay: float,
    depths: Mapping[str, int],
    parameters: Mapping[str, nn.Parameter],
) -> list[ParameterGroup]:
    """The groups of parameters, divided by depth. The learning rate of depth d is `lr` times
    decay^(D - d), D being the largest depth; `apply_step` computes it before each step.

    depths: by name.
    parameters: those that the groups have, by name.
    """
    depth_of = {p: depths[name] for name, p in parameters.items()}
    top = max(depths.values())
    divided = []
    for group in groups:
        for depth in sorted({depth_of[p] for p in group["params"]}):
            is_inside = [depth_of[p] == depth for p in group["params"]]
            part = dict(group)
            for key in ("params", "rows"):  # of Muon's matrices
                if key in group:
                    pairs = zip(group[key], is_inside, strict=True)
                    part[key] = [value for value, is_kept in pairs if is_kept]
            rate = {"lr": lr.clone(), "base_lr": lr, "lr_factor": decay ** (top - depth)}
            divided.append(part | rate)
    return divided
