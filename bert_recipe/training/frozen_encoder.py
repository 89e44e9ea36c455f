"""The body of a run that does not train the encoder: a linear layer is fitted to its vectors, which
is saved, scored and predicts. Of few rows, its scores also stand beside those of a trained encoder.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from bert_recipe.checkpoint.calibration import CALIBRATION_FILE
from bert_recipe.checkpoint.folder import MODEL_FILE
from bert_recipe.checkpoint.model_card import ModelParts, card_of, write_card
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.progress import Progress
from bert_recipe.checkpoint.rows import TensorRows
from bert_recipe.checkpoint.start import StartKind, no_log
from bert_recipe.checkpoint.weights import check_loaded, checkpoint_shapes
from bert_recipe.checkpoint.writer import Checkpoint, CheckpointWriter
from bert_recipe.config.fine_tuning_defaults import MANY_ROWS
from bert_recipe.model.encoders.base import PreTrainedModel
from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.model.encoders.registry import make_model
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.baselines import FROZEN, WARNING, Baselines
from bert_recipe.tasks.classification.frozen import FrozenEncoder, kind_of
from bert_recipe.tasks.classification.task import ClassificationTask
from bert_recipe.tasks.text_sequences import TextDataset
from bert_recipe.training.evaluation import only_numbers, predict
from bert_recipe.training.prediction import load_fine_tuned, predict_all
from bert_recipe.training.run import Run
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import write_atomically

STEP = 1  # the name of the model's folder, as of a run of one update


def fit_and_predict(run: Run, runtime: Runtime) -> tuple[dict[str, float], int]:
    """Fits, saves, scores and predicts; returns the scores and the exit code. If the command is
    repeated, so is the fit.
    """
    if runtime.distributed.world_size > 1:
        raise UserError("--frozen-encoder fits in one process: start it without torchrun")
    source = run.start.weights
    if source is None:
        raise UserError(run.start.problem or "there is no encoder: give --init-checkpoint")
    num_pairs = cast(TextDataset, run.data.dataset).num_examples  # of two samples each
    run = replace(run, record=replace(run.record, num_samples=num_pairs))
    folder = run.folder.path
    task = cast(ClassificationTask, run.task)
    config = run.data.choice.config
    # First what may fail, so that --overwrite removes nothing before the fit can start.
    parallel = load_fine_tuned(task.head, config, source, runtime, run.settings.parallel)
    check_loaded(parallel, source)
    calibration = earlier_calibration(run)
    runtime.reporter.start(folder, STEP)
    runtime.reporter.log("PARAMETER", run.logged_settings(run.record.identity))
    run.claim_folder()
    run.folder.remove_results([*run.result_files, str(STEP)])
    frozen = fit(run, parallel, runtime)
    parts = replace(run.parts, files=frozen.files(task.max_seq_length))
    architecture, config, tensors = with_classifier(parallel.model, frozen)
    checkpoint = make_checkpoint(run, architecture, config, tensors, parts)
    writer = CheckpointWriter(folder, runtime.distributed)
    writer.write(checkpoint)
    writer.wait()
    if calibration is not None:
        write_atomically(folder / str(STEP) / CALIBRATION_FILE, calibration)
    fitted = replace(task, frozen=frozen)
    sets = list(run.data.sets)
    model = folder / str(STEP)
    scores = predict_all(run.settings, fitted, parallel, sets, folder, runtime, model)
    if scores:
        card = card_of(architecture, config, run.record, parts, STEP, only_numbers(scores))
        write_card(model, replace(card, warning=str(scores.get(WARNING, ""))))
    return scores, 0


def earlier_calibration(run: Run) -> bytes | None:
    """The calibration of an earlier fit, since the same fit gives the same model."""
    if run.start.kind is not StartKind.RESUMED or run.start.source is None:
        return None
    path = run.start.source.path / CALIBRATION_FILE
    return path.read_bytes() if path.is_file() else None


def fit(run: Run, parallel: Any, runtime: Runtime) -> FrozenEncoder:
    """The layer for the training file."""
    task = cast(ClassificationTask, run.task)
    dataset = cast(TextDataset, run.data.dataset)
    batch_size = run.settings.prediction.batch_size
    started = time.perf_counter()
    vectors, _ = predict(parallel, dataset, "sequence", batch_size, runtime)
    embedded = time.perf_counter()
    frozen = fit_rows(task, dataset, vectors)
    seconds = {"vector_seconds": embedded - started, "fit_seconds": time.perf_counter() - embedded}
    text = (
        f"{kind_of(values_of(dataset)).method} on the vectors of {len(dataset):,} texts: "
        f"{seconds['vector_seconds']:.1f} s for the vectors, {seconds['fit_seconds']:.1f} s for "
        f"the fit; model in {run.folder.path / str(STEP)}"
    )
    runtime.reporter.log((), seconds, text)
    return frozen


def fit_rows(task: ClassificationTask, dataset: TextDataset, vectors: np.ndarray) -> FrozenEncoder:
    """The layer for the rows of `dataset`, whose vectors are [sequences, E]."""
    is_balanced = task.options.class_weights == "balanced"
    frozen = cast(FrozenEncoder, task.frozen)
    return frozen.fit(vectors, values_of(dataset), task.labels, is_balanced, dataset.groups)


def values_of(dataset: TextDataset) -> np.ndarray:
    """What the rows are labelled with (see label_values)."""
    return cast(np.ndarray, dataset.values)[:: dataset.texts_per_row]


@dataclass(frozen=True)
class FrozenBaselines:
    """The baselines of a run and the scores of --frozen-encoder; equal for all seeds, which share
    the rows.
    """

    known: Callable[[], Baselines | None]
    source: ModelFolder = field(compare=False)
    run: Run = field(compare=False)
    runtime: Runtime = field(compare=False)

    @lru_cache(maxsize=1)  # noqa: B019  # a run at a time
    def compute(self) -> Baselines | None:
        known = self.known()
        if known is None:
            return None
        try:
            scores = frozen_scores(self.run, self.source, self.runtime)
        except UserError:  # of how the encoder's folder embeds texts
            return known
        return known._replace(scores={**known.scores, FROZEN: scores})


def beside_frozen(run: Run, runtime: Runtime) -> Run:
    """The run, where it trains on few rows with the scores of --frozen-encoder among its baselines:
    what the encoder's vectors show at once has to be learnt from many rows, above all how two texts
    compare.
    """
    task = run.task
    if not isinstance(task, ClassificationTask) or task.frozen is not None or not run.saves:
        return run
    is_few = run.data.num_rows < MANY_ROWS and runtime.distributed.world_size == 1
    source, sets = run.start.weights, list(run.data.sets)
    places = [place for place, scored in enumerate(sets) if scored.baselines]
    if task.spec.negatives or not (is_few and places) or source is None:
        return run
    first = sets[places[0]]  # the scores of further sets have other names
    baselines = FrozenBaselines(cast(Any, first.baselines), source, run, runtime)
    sets[places[0]] = replace(first, baselines=baselines.compute)
    return replace(run, data=replace(run.data, sets=sets))


def frozen_scores(run: Run, source: ModelFolder, runtime: Runtime) -> dict[str, float]:
    """The scores of --frozen-encoder on the rows of a run, with the encoder in `source`."""
    trained = cast(ClassificationTask, run.task)
    choice, size = run.data.choice, run.settings.prediction.batch_size
    task = replace(trained, frozen=FrozenEncoder.of_encoder(source.path, trained.text_pairs))
    config = task.configure(choice.config)
    parallel = load_fine_tuned(task.head, config, source, runtime, log=no_log)
    parallel.prepare_for_inference(runtime.precision.dtype)

    def embed(texts: TextDataset) -> tuple[TextDataset, np.ndarray]:
        dataset = task.text_dataset(choice.tokenizer, *texts.columns, texts.values)
        dataset.groups = texts.groups
        return dataset, predict(parallel, dataset, "sequence", size, runtime)[0]

    frozen = fit_rows(task, *embed(cast(TextDataset, run.data.dataset)))
    scores: dict[str, float] = {}
    for scored_set in run.data.scored_sets:
        _, vectors = embed(cast(TextDataset, scored_set.dataset))
        scores |= only_numbers(scored_set.finish(frozen.logits(vectors), None))
    return scores


def with_classifier(
    model: PreTrainedModel, frozen: FrozenEncoder
) -> tuple[str, ModelConfig, dict[str, Tensor]]:
    """The class, the config and the tensors of the model to save. The classifier is among the
    tensors if the architecture's own head can hold it; else it is only in the files of `frozen`.
    """
    shapes = checkpoint_shapes(model)
    tensors = {}
    for name, parameter in model.named_parameters():
        rows = parameter.detach()
        tensors[name] = rows[: shapes[name][0]] if shapes[name] else rows
    settings = frozen.settings
    config = model.config.with_linear_head(settings.pooling)
    if (
        config is None
        or frozen.compares
        or settings.default_prompt is not None
        or settings.do_lower_case
    ):
        return model.architecture, model.config, tensors
    with torch.device("meta"):
        classifier = make_model("sequence_classification", config)
    for name, parameter in classifier.named_parameters():
        if name in tensors:
            continue
        # The dense layer and the norm of the head change nothing but what LayerNorm does.
        is_matrix = parameter.dim() == 2
        tensors[name] = torch.eye(len(parameter)) if is_matrix else torch.zeros(parameter.shape)
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones(parameter.shape)
    tensors["classifier.weight"] = torch.from_numpy(frozen.weight_CF)
    tensors["classifier.bias"] = torch.from_numpy(frozen.bias_C)
    return classifier.architecture, config, tensors


def make_checkpoint(
    run: Run,
    architecture: str,
    config: ModelConfig,
    tensors: dict[str, Tensor],
    parts: ModelParts,
) -> Checkpoint:
    rows = [TensorRows(name, tuple(tensor.shape), tensor) for name, tensor in tensors.items()]
    prefix = run.settings.prefix
    files = {MODEL_FILE: rows}
    progress = Progress(
        **vars(run.record),
        step=STEP,
        samples_consumed=run.record.num_samples,
        schedule_start=0,
        optimizer="",
        loss_scale={},
        train_seconds=0.0,
        raw_train_seconds=0.0,
    )
    return Checkpoint(
        STEP, files, config, architecture, asdict(progress), run.record, parts, prefix
    )
