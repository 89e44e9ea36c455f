"""Weights of model folders for a model: names, missing or extra heads, and strict checks."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.rows import LazyTensor
from bert_recipe.checkpoint.trained import TrainedModel
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.model.encoders.heads import MaskedLanguageModel
from bert_recipe.model.encoders.modules import VocabularyEmbedding
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.progress import print_line

CLASSIFIERS = ("ForQuestionAnswering", "ForSequenceClassification", "ForTokenClassification")


def canonical_names(
    tensors: Mapping[str, LazyTensor], model: PreTrainedModel
) -> dict[str, LazyTensor]:
    """Renames `tensors` to the names of `model`: renames old LayerNorm names (gamma, beta), drops
    buffers and copies of tied weights, and adds or removes the encoder's prefix, such as `bert.`.
    """
    renamed = {}
    for name, tensor in tensors.items():
        new = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
            "LayerNorm.beta", "LayerNorm.bias"
        )
        if not new.endswith("position_ids") and new not in model.tied_copies:
            renamed[new] = tensor
    prefix = f"{model.base_model_prefix}."
    if model.base_model is model:
        return {name.removeprefix(prefix): tensor for name, tensor in renamed.items()}
    if any(name.startswith(prefix) for name in renamed):
        return renamed
    return {
        name if name.startswith(model.head_names) else prefix + name: tensor
        for name, tensor in renamed.items()
    }


def has_head(model: PreTrainedModel, tensors: Mapping[str, LazyTensor]) -> bool:
    """Whether `tensors` have all tensors of the model's head."""
    head = {name for name, _ in model.named_parameters() if name.startswith(model.optional_heads)}
    return head <= canonical_names(tensors, model).keys()


def lacks_head(model: PreTrainedModel, tensors: Mapping[str, LazyTensor]) -> bool:
    """Whether `tensors` have no tensor of the model's heads; the pooler is none."""
    head = {name for name, _ in model.named_parameters() if name.startswith(model.head_names)}
    return bool(head) and head.isdisjoint(canonical_names(tensors, model))


def unused_pooler(
    model: PreTrainedModel, tensors: Mapping[str, LazyTensor], device: torch.device
) -> dict[str, Tensor]:
    """The pooler in `tensors` if `model` is a masked language model without one: fine-tuning, which
    needs it, would otherwise begin with a random one.
    """
    if not isinstance(model, MaskedLanguageModel):
        return {}
    given = canonical_names(tensors, model)
    prefix = f"{model.base_model_prefix}.pooler."
    unused = {name for name in given if name.startswith(prefix)} - checkpoint_shapes(model).keys()
    return {name: given[name].read().float().to(device) for name in sorted(unused)}


def check_head(folder: ModelFolder, architecture: str) -> None:
    """Raises UserError if the config in `folder` has another classifier, whose tensors may have the
    same names.
    """
    named = folder.architecture or ""
    # The names of XLM-RoBERTa and its kin differ before "For" only.
    is_other = named.partition("For")[2] != architecture.partition("For")[2]
    if is_other and named.endswith(CLASSIFIERS) and architecture.endswith(CLASSIFIERS):
        raise UserError(
            f"{folder} holds a {named}: it was not fine-tuned for this task: fine-tune it, or use "
            f"another"
        )


def checkpoint_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter in a checkpoint, which has no vocabulary padding."""
    # DeepSpeed's ZeRO stage 3 has the shape of a parameter in another attribute.
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}
    for prefix, module in model.named_modules():
        if isinstance(module, VocabularyEmbedding):
            shapes[f"{prefix}.weight"] = (module.vocab_size, *shapes[f"{prefix}.weight"][1:])
    return shapes


def folder_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Those of the parameters that a model folder has."""
    shapes, names = checkpoint_shapes(model), model.folder_tensors
    return {name: shape for name, shape in shapes.items() if name in names}


@torch.no_grad()
def copy_rows(target: Tensor, start: int, source: LazyTensor) -> None:
    """Copies rows [start, start + len(target)) of `source` to `target`. Rows beyond the end of
    `source` (vocabulary padding) become zero. Rows are single elements if `target` is a flattened
    part of a matrix.
    """
    if not target.dim():
        target.copy_(source.read())
        return
    # Rows of `target` per row of `source`: 1, or those of a flattened part.
    width = math.prod(source.shape[1:]) // math.prod(target.shape[1:])
    num_rows = source.shape[0] * width
    stop = max(start, min(start + len(target), num_rows))
    count = stop - start
    if count > 0:
        first_source_row = start // width
        stop_source_row = -(-stop // width)
        rows = source.read(first_source_row, stop_source_row).reshape(-1, *target.shape[1:])
        offset = start - first_source_row * width
        target[:count].copy_(rows[offset : offset + count])
    target[count:].zero_()


def load_weights(
    parallel: TrainedModel,
    folder: ModelFolder,
    log: Callable[[str], None],
    needs_head: bool = False,
) -> frozenset[str]:
    """Loads this rank's rows of a model folder's weights, see `select_weights`. Returns the names
    of the parameters.
    """
    tensors = folder.tensors
    if not needs_head and has_other_labels(parallel.model, folder):
        tensors = without_task_head(parallel.model, tensors)
    weights = select_weights(parallel.model, tensors, folder.path, log, needs_head)
    parameters = parallel.named_parameters()
    for name, tensor in weights.items():
        copy_rows(parameters[name], parallel.row_start(name), tensor)
    parallel.write_back()
    folder.forget_tensors()
    return frozenset(weights)


def check_loaded(parallel: TrainedModel, folder: ModelFolder) -> None:
    """Raises UserError on the main process if the weights that were loaded from `folder` are not
    finite, or the word embeddings are all zero: such a model would train without a word.
    """
    distributed = parallel.distributed
    failed, embeds = distributed.all_reduce_sum(
        [not parallel.has_finite_weights(), parallel.has_word_embeddings()]
    )

    def check() -> None:
        if not embeds:
            raise UserError(
                f"{folder}: all word embeddings are zero: the weights are damaged, or were saved "
                f"before they were loaded: use another model folder"
            )
        if failed:
            raise UserError(
                f"{folder}: the weights are not all finite: they are damaged, or of a run that "
                f"diverged: use another model folder"
            )

    distributed.on_main(check)


def has_other_labels(model: PreTrainedModel, folder: ModelFolder) -> bool:
    """Whether the classifier in `folder` has other labels than that of `model`, so that its weights
    would start from another task.
    """
    ours = model.config.labels
    theirs = folder.config.labels if ours and folder.has_config else ()
    # transformers' names without a meaning may stand for the same labels.
    have_names = any(label != f"LABEL_{index}" for index, label in enumerate(theirs))
    return have_names and theirs != ours


def select_weights(
    model: PreTrainedModel,
    tensors: Mapping[str, LazyTensor],
    source: str | Path,
    log: Callable[[str], None] = print_line,
    needs_head: bool = False,
) -> dict[str, LazyTensor]:
    """Selects the tensors for the parameters of `model`, by name. Skips heads of other tasks and
    heads missing from `tensors`; messages name both. Raises UserError for any other missing,
    unexpected or misshapen tensor.

    needs_head: the model's head must be present, for prediction.
    """
    given = canonical_names(tensors, model)
    wanted = folder_shapes(model)
    misshapen = [name for name in wanted if name in given and given[name].shape != wanted[name]]
    has_other_head = not needs_head and any(name.startswith(model.task_head) for name in misshapen)
    if has_other_head:
        given = without_task_head(model, given)
    missing, unexpected = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
    check_tensors(given, wanted, source)
    check_names(missing, unexpected, model.optional_heads, source, needs_head)
    if missing:
        shape = " of this shape" if has_other_head else ""
        log(
            f"note: {source} has no {', '.join(missing)}{shape}: they start from their initial "
            f"values"
        )
    if unexpected:
        names = ", ".join(unexpected)
        log(f"note: {source} has tensors that {model.architecture} does not use: {names}")
    return {name: given[name] for name in wanted if name in given}


def without_task_head(
    model: PreTrainedModel, tensors: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor]:
    head = model.task_head
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(head)}


def check_tensors(
    given: Mapping[str, LazyTensor], wanted: Mapping[str, tuple[int, ...]], source: str | Path
) -> None:
    """Raises UserError unless the tensors that a model has have its shapes, and are numbers that
    weights can be.
    """
    shapes, types = [], []
    for name, shape in wanted.items():
        if name not in given:
            continue
        if given[name].shape != shape:
            shapes.append(f"{name} is {list(given[name].shape)}, the model's is {list(shape)}")
        if not given[name].dtype.is_floating_point:
            types.append(name)
    refuse(
        source,
        shapes,
        "have another shape: use the config and the vocabulary that it was made with",
    )
    refuse(source, types, "are not floating-point numbers: fetch or write it again")


def check_names(
    missing: Sequence[str],
    unexpected: Sequence[str],
    heads: tuple[str, ...],
    source: str | Path,
    needs_head: bool,
) -> None:
    """Raises UserError for missing and unexpected tensors, but for those of heads. needs_head: the
    model's own head must not be missing.
    """
    if needs_head:
        untrained = [name for name in missing if name.startswith(heads)]
        problem = "are missing: it was not fine-tuned for this task: fine-tune it, or use another"
        refuse(source, untrained, problem)
    lacking = [name for name in missing if not name.startswith(heads)]
    refuse(source, lacking, "of the model are missing: use a complete one, and its own config")
    unknown = [name for name in unexpected if not name.startswith(heads)]
    refuse(source, unknown, "are not in the model: use its own config")


def refuse(source: str | Path, names: Sequence[str], problem: str) -> None:
    """Raises UserError if there are tensors with a problem."""
    if names:
        raise UserError(f"{source}: {len(names)} tensors {problem} ({', '.join(names[:3])})")
