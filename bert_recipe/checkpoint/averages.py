"""The exponential moving average of the weights, on each rank for its rows, and the model folder
with it.
"""

from pathlib import Path

import torch
from torch import Tensor

from bert_recipe.checkpoint.folder import (
    AVERAGES_FOLDER,
    AVERAGES_SUFFIX,
    MANIFEST_FILE,
    MODEL_FILE,
    OPTIMIZER_SUFFIX,
    PROGRESS_SUFFIX,
    is_valid,
    link_part_of_step,
    read_manifest,
)
from bert_recipe.checkpoint.model_card import copy_card
from bert_recipe.checkpoint.rows import LazyTensor
from bert_recipe.checkpoint.trained import TrainedModel
from bert_recipe.checkpoint.weights import copy_rows
from bert_recipe.utils.files import atomic_folder, remove


class WeightAverages:
    """average = decay * average + (1 - decay) * weights after each update, from the weights that it
    is made with. A step that is skipped is no update.
    """

    def __init__(self, parallel: TrainedModel, decay: float):
        self.parallel, self.decay = parallel, decay
        folder_tensors = parallel.model.folder_tensors
        self.tensors = {
            name: p.detach().clone()
            for name, p in parallel.named_parameters().items()
            if name in folder_tensors
        }

    def update(self, is_skipped: Tensor) -> None:
        """is_skipped: a boolean scalar on the device, which is not read."""
        parameters = self.parallel.named_parameters()
        weights = [parameters[name].detach() for name in self.tensors]
        share = torch.where(is_skipped, 0.0, 1 - self.decay).float()
        torch._foreach_lerp_(list(self.tensors.values()), weights, [share] * len(weights))

    def load(self, stored: dict[str, LazyTensor]) -> None:
        """Copies this rank's rows of the averages in a checkpoint."""
        for name, tensor in self.tensors.items():
            copy_rows(tensor, self.parallel.row_start(name), stored[name])

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchanges the averages and the weights of the model."""
        parameters = self.parallel.named_parameters()
        for name in self.tensors:
            p = parameters[name]
            weights = p.detach().clone()
            p.copy_(self.tensors[name])
            self.tensors[name].copy_(weights)
        self.parallel.write_back()


def publish_averages(step: Path, prefix: str) -> None:
    """Writes the model folder `averages` beside the checkpoint folder `step`, with the averages in
    that checkpoint as its weights; its files are hard links where possible. Removes the folder if
    the checkpoint has no averages. Does nothing if it is up to date: this is also called at the
    start, since a run may have been stopped between a checkpoint and its averages.

    prefix: of the names of the checkpoint's files.
    """
    folder = step.parent / AVERAGES_FOLDER
    averages_file = prefix + AVERAGES_SUFFIX
    files = read_manifest(step)
    if averages_file not in files:
        remove(folder)
        return
    left_out = {MODEL_FILE, averages_file, prefix + OPTIMIZER_SUFFIX, prefix + PROGRESS_SUFFIX}
    # The file of the checkpoint for each file of the new folder.
    sources = {MODEL_FILE: averages_file}
    sources |= {name: name for name in files if name not in left_out}
    expected = {name: files[source] for name, source in sources.items()}
    has_manifest = (folder / MANIFEST_FILE).is_file()
    if has_manifest and is_valid(folder) and read_manifest(folder) == expected:
        return
    with atomic_folder(folder) as temporary:
        link_part_of_step(temporary, step, sources)
        copy_card(step, temporary, folder)
