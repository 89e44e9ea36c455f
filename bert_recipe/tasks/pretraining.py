"""BERT's pre-training: masked language modelling and next-sentence prediction (Devlin et al., 2018,
section 3.1).
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor, nn

from bert_recipe.checkpoint.model_choice import ModelChoice
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.record import DevelopmentData
from bert_recipe.config import (
    LoaderConfig,
    PretrainingConfig,
    RunConfig,
)
from bert_recipe.data_loading.loader import StreamDataset
from bert_recipe.data_loading.masking import DEFAULT_RATE, max_masked_at
from bert_recipe.data_loading.pretraining_dataset import (
    PretrainingDataset,
    files_digest,
    open_dataset,
    verify_checksums,
)
from bert_recipe.model.encoders.heads import MaskedLanguageModel, NextSentenceModel
from bert_recipe.model.encoders.registry import MODELS
from bert_recipe.model.loss import linear_cross_entropy, next_sentence_sums
from bert_recipe.model.token_stream import BatchCounts, MicroBatch, TokenStream
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.task import Number, SeparableTask, TaskData, TaskOptions
from bert_recipe.tokenization.files import Casing
from bert_recipe.tokenization.tokenizer import load_tokenizer
from bert_recipe.utils.command_line import value_of
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.json_files import JsonObject, json_digest
from bert_recipe.utils.progress import print_line


@dataclass(frozen=True)
class PretrainingOptions(PretrainingConfig, TaskOptions):
    """What the flags say of pre-training."""

    max_seq_length: int = value_of("--max-seq-length", LoaderConfig.max_seq_length)

    head = "pretraining"

    def in_sequences(
        self, loader: LoaderConfig, dataset: StreamDataset | None = None
    ) -> LoaderConfig:
        """A sample is a sequence, so only the number of masked tokens is filled in."""
        if dataset is not None:
            max_masked = dataset.max_labelled_per_sample
        elif loader.max_masked:
            max_masked = loader.max_masked
        else:
            rate = loader.masked_lm_prob or DEFAULT_RATE
            max_masked = max_masked_at(rate, loader.max_seq_length)
        return dataclasses.replace(loader, max_masked=max_masked)

    def open(
        self,
        choice: ModelChoice,
        folder: ModelFolder | None,
        config: RunConfig,
        runtime: Runtime,
        fold: int = 0,
    ) -> TaskData:
        distributed = runtime.distributed
        loader = config.loader
        asked = self.max_seq_length if config.arguments.given("max_seq_length") else None
        if self.input_dir is None:
            raise UserError("there are no shards to train on: give --input-dir")
        dataset = open_dataset(self.input_dir, choice.tokenizer, choice.config, loader, asked)
        length = dataset.sequence_length
        held_out = None
        if self.eval_dir is not None:
            held_out = open_dataset(
                self.eval_dir, choice.tokenizer, choice.config, loader, length, is_held_out=True
            )
            available = len(held_out)
            evaluated = min(available, self.max_eval_samples or available)
            if evaluated < config.world_size:
                raise UserError(
                    f"{self.eval_dir} has fewer samples than there are processes: make a larger "
                    f"held-out set, or raise --max-eval-samples"
                )
            if evaluated < available and distributed.is_main:
                print_line(f"evaluations: {evaluated:,} of the {available:,} held-out samples")
        datasets = [dataset] if held_out is None else [dataset, held_out]
        distributed.on_main(lambda: dataset.check_shards(held_out))
        if self.verify_data:
            verify_checksums(datasets, distributed, "--verify-data")
        data_files = distributed.on_main(lambda: files_digest(datasets))
        check_casing(datasets, folder)
        model = MODELS[type(choice.config)]["pretraining"]
        next_sentence = dataset.has_next_sentence and issubclass(model, NextSentenceModel)
        task = PretrainingTask(next_sentence, length, self, choice.config.vocab_size)
        development = None
        if config.trainer.eval_steps and held_out is not None:
            digest = distributed.on_main(held_out.digest)
            # None: where runs of 1.0.0 had the rate of masks, if a flag gave one.
            what_is_evaluated: list[str | int | None] = [digest, None]
            if self.max_eval_samples is not None:
                what_is_evaluated.append(self.max_eval_samples)
            development = DevelopmentData(json_digest(what_is_evaluated))
        return TaskData(
            task,
            with_casing(choice, dataset),
            dataset,
            held_out,
            self.max_eval_samples,
            development=development,
            data_files=data_files,
            text_passes=dataset.attributes.get("dupe_factor", 1),
        )


@dataclass(frozen=True)
class PretrainingTask(SeparableTask):
    """Both losses and their metrics.

    next_sentence: the data has sentence pairs, and the model the head for them.
    options: what the flags say.
    vocab_size: the model's.
    """

    next_sentence: bool = True
    max_seq_length: int = LoaderConfig.max_seq_length
    options: PretrainingOptions = field(default_factory=PretrainingOptions)
    vocab_size: int | None = None

    metric = "loss"
    lower_is_better = True
    logs_start = True
    learns_from_texts = True
    has_trained_head = True

    @property
    def name(self) -> str:
        return "phase2" if self.options.phase2 else "phase1"

    @property
    def head(self) -> str:
        return "pretraining" if self.next_sentence else "masked_lm"

    @property
    def initial_loss(self) -> float | None:
        if self.vocab_size is None:
            return None
        return math.log(self.vocab_size) + (math.log(2) if self.next_sentence else 0)

    @property
    def without_weights(self) -> str | None:
        advice = "phase 2 starts from random weights: give --from-phase1-final-params"
        return advice if self.options.phase2 else None

    def recheck(self, data: TaskData, runtime: Runtime) -> None:
        if not self.options.verify_data:  # then they are checked already
            opened = (data.dataset, data.held_out)
            datasets = [dataset for dataset in opened if isinstance(dataset, PretrainingDataset)]
            reason = "data copied or changed since the checkpoint"
            verify_checksums(datasets, runtime.distributed, reason)

    def logged_settings(self, data: TaskData, batch_size: int, max_steps: int) -> JsonObject:
        return {"batch_size_per_gpu": batch_size}

    def text_ids(self, stream: Mapping[str, np.ndarray]) -> np.ndarray:
        ids_T = stream["input_ids"].copy()
        ids_T[stream["mlm_positions"]] = stream["mlm_labels"]
        return ids_T

    def random_next_share(self, stream: Mapping[str, np.ndarray]) -> float | None:
        return float(stream["nsp_labels"].mean()) if self.next_sentence else None

    def sums(self, model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
        return model(micro_batch, objective=self.objective)

    def objective(self, model: MaskedLanguageModel, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """The sums, of the plain model."""
        stream = TokenStream.from_batch(micro_batch, self.max_seq_length)
        positions_M, labels_M = micro_batch["mlm_positions"], micro_batch["mlm_labels"]
        encoded = model.base_model(stream, output_positions=positions_M)
        cross_entropy = model.cross_entropy or linear_cross_entropy
        transformed_ME = model.transform(encoded.last_hidden_state)
        loss, correct = cross_entropy(transformed_ME, *model.output_layer(), labels_M)
        sums = {"mlm_loss": loss, "mlm_correct": correct}
        if self.next_sentence and isinstance(model, NextSentenceModel):
            logits_N2 = model.next_sentence_logits(encoded.pooler_output)
            loss, correct = next_sentence_sums(logits_N2, micro_batch["nsp_labels"])
            sums |= {"nsp_loss": loss, "nsp_correct": correct}
        return sums

    def loss(self, sums: Mapping[str, Number], counts: BatchCounts) -> Number:
        # Without masked tokens, only the next-sentence loss is used.
        loss = sums["mlm_loss"] / max(counts.labelled_tokens, 1)
        if self.next_sentence:
            loss = loss + sums["nsp_loss"] / counts.sequences
        return loss

    def metrics(self, sums: dict[str, float], counts: BatchCounts) -> dict[str, float]:
        metrics: dict[str, float] = {
            "loss": self.loss(sums, counts),
            "mlm_loss": sums["mlm_loss"] / max(counts.labelled_tokens, 1),
            "mlm_accuracy": sums["mlm_correct"] / max(counts.labelled_tokens, 1),
        }
        if self.next_sentence:
            metrics["nsp_loss"] = sums["nsp_loss"] / counts.sequences
            metrics["nsp_accuracy"] = sums["nsp_correct"] / counts.sequences
        return metrics


def with_casing(choice: ModelChoice, dataset: PretrainingDataset) -> ModelChoice:
    """The model with the casing that the shards were made with."""
    tokenizer = choice.tokenizer
    casing = Casing.of(dataset.attributes)
    if casing is None or casing.settings() == tokenizer.casing_settings():
        return choice
    if tokenizer.is_json:
        raise UserError(
            f"{dataset.folder} is {casing}, and {tokenizer.vocab_file} is "
            f"{Casing.of(tokenizer.casing_settings())}: give --vocab-file the one that the shards "
            "were made with"
        )
    return dataclasses.replace(choice, tokenizer=load_tokenizer(tokenizer.vocab_file, *casing))


def check_casing(datasets: list[PretrainingDataset], model: ModelFolder | None) -> None:
    """Raises UserError unless all shards, and the model folder that the run starts from, have the
    same casing.
    """
    casings = {dataset.folder: Casing.of(dataset.attributes) for dataset in datasets}
    # Not from the settings, which a tokenizer.json does not obey.
    if model is not None and model.tokenizer_settings["do_lower_case"] is not None:
        casings[model.path] = Casing.of(model.tokenizer.casing_settings())
    known = [(folder, casing) for folder, casing in casings.items() if casing is not None]
    for folder, casing in known[1:]:
        first, expected = known[0]
        if casing != expected:
            raise UserError(
                f"{first} is {expected}, and {folder} is {casing}: make the samples with one "
                "casing, the model's"
            )
