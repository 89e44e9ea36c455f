"""Temporary memory of an optimizer's step, besides gradients and state, on one rank: formulas by
the name of the optimizer. An optimizer without one needs none.
"""

from torch import nn

from bert_recipe.optimization.muon import batch_elements, hidden_matrices


def lamb_elements(
    model: nn.Module, multi_tensor: bool, shard_degree: int, _world_size: int
) -> float:
    """The updates of all tensors, or of the largest one."""
    sizes = [p.numel() for p in model.parameters()]
    return sum(sizes) / shard_degree if multi_tensor else max(sizes)


def muon_elements(
    model: nn.Module, multi_tensor: bool, shard_degree: int, world_size: int
) -> float:
    """Copies of a batch of matrices (see optimization.muon.make_batches), and, on several ranks,
    the owned matrices before and after.
    """
    sizes: dict[tuple[int, int], list[int]] = {}  # of parameters, by the shape of their matrices
    for name, count in hidden_matrices(model).items():
        rows, columns = model.get_parameter(name).shape
        sizes.setdefault((rows // count, columns), []).append(rows * columns)
    limit = batch_elements(not multi_tensor)
    # The largest batch of each shape: up to the limit, or one parameter.
    batches = [min(sum(same), max(limit, *same)) for same in sizes.values()]
    copies = 4 * max(batches, default=0)
    ranks = shard_degree if shard_degree > 1 else world_size
    if ranks == 1:
        return copies
    total = sum(sum(same) for same in sizes.values())
    return copies + 2 * total / ranks


UPDATE_ELEMENTS = {"Lamb": lamb_elements, "Muon": muon_elements, "NorMuon": muon_elements}


def update_elements(
    optimizer: str, model: nn.Module, multi_tensor: bool, shard_degree: int, world_size: int
) -> float:
    """Number of temporary float32 elements.

    multi_tensor: whether all tensors are updated at once, as on GPUs and on shards.
    shard_degree: number of ranks that share a copy of the model.
    """
    if optimizer not in UPDATE_ELEMENTS:
        return 0
    return UPDATE_ELEMENTS[optimizer](model, multi_tensor, shard_degree, world_size)
