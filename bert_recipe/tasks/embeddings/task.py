"""Sentence embeddings: losses of pairs over the whole global batch, and scores of similarity and
retrieval.

Legend: n samples of the global batch, k texts of a sample (an anchor, its positive, hard
negatives), N sequences of a micro-batch, E hidden size.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bert_recipe.checkpoint.sentence_folders import PROMPTS, EmbeddingSettings
from bert_recipe.data_loading.packing import Label
from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.model.loss import contrastive_losses, cosent_losses, margin_mse_losses
from bert_recipe.model.token_stream import MicroBatch, TokenStream, to_device
from bert_recipe.parallel.runtime import Runtime
from bert_recipe.tasks.baselines import Baselines, once, tfidf
from bert_recipe.tasks.classification.scores import load_metrics
from bert_recipe.tasks.embeddings.files import TextTuples, read_tuples
from bert_recipe.tasks.embeddings.options import (
    MARGIN_MSE,
    SIMILARITY_SCORES,
    EmbeddingTaskOptions,
)
from bert_recipe.tasks.embeddings.retrieval import (
    CUTOFF,
    Vectors,
    mean_scores,
    nearest,
    normalized,
    pair_cosines,
    ranking_scores,
)
from bert_recipe.tasks.fine_tuning import FineTuningTask
from bert_recipe.tasks.own_files import MAX_SEQ_LENGTH
from bert_recipe.tasks.predicted_rows import PredictedRows, Prediction
from bert_recipe.tasks.splits import Split
from bert_recipe.tasks.task import BatchForward, PredictionSet
from bert_recipe.tasks.text_sequences import SequenceSamples, TextDataset
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.files import write_atomically
from bert_recipe.utils.json_files import json_digest
from bert_recipe.utils.output_tables import encode_table, names_like, write_like
from bert_recipe.utils.tables import Row, read_texts
from bert_recipe.utils.text_files import table_parts

if TYPE_CHECKING:
    from bert_recipe.tokenization.tokenizer import Tokenizer

# The rows that were scored: pairs with their cosine, or queries with the scores of each.
SCORED = "eval_predictions"
SCORED_QUERIES = f"{SCORED}.jsonl"

MAX_PRODUCTS = 400_000_000  # of tf-idf's queries with texts, which take seconds


@dataclass(frozen=True)
class EmbeddingTask(FineTuningTask):
    """Trains sentence embeddings and scores them by similarity (Spearman) or retrieval: of scored
    pairs, or of pairs to retrieve: an anchor's positives among those of all and the texts of
    --corpus-file.
    """

    options: EmbeddingTaskOptions
    max_seq_length: int = MAX_SEQ_LENGTH
    settings: EmbeddingSettings = field(default_factory=partial(EmbeddingSettings, normalize=True))

    name = "embedding"
    head = "sentence_embedding"
    scores_start = True
    logits_axis = "sequence"
    defaults_kind = "embeddings"
    result_files = tuple(names_like(SCORED))

    @property
    def learns_from_texts(self) -> bool:  # type: ignore[override]
        return not self.options.columns

    @property
    def scored_files(self) -> tuple[Path, ...]:
        return () if self.options.eval_file is None else (self.options.eval_file,)

    @property
    def development_files(self) -> tuple[Path, ...]:
        corpus = self.options.corpus_file
        return self.scored_files + (() if corpus is None else (corpus,))

    @classmethod
    def learning(
        cls,
        options: EmbeddingTaskOptions,
        tokenizer: "Tokenizer",
        start: Path | None = None,
        split: Split | None = None,
    ) -> tuple["EmbeddingTask", "TupleDataset"]:
        task = cls(options, options.max_seq_length, settings_for(options, start))
        task.check_prompts(tokenizer)
        tuples = read_tuples(
            options.training_file,
            (*options.columns, *(options.negative_columns or ())),
            options.score,
            task.settings,
            options,
            options.teacher,
            options.num_negatives,
            options.prompt_column,
        )
        largest = max(map(abs, tuples.scores or ()), default=0.0)
        if options.embedding_loss == "cosine" and largest > 1:
            scale = f"scores are up to {largest:g}, and cosines at most 1"
            raise UserError(
                f"{options.train_file}: {scale}: divide them, or leave out --embedding-loss cosine"
            )
        dataset = TupleDataset(tuples, tokenizer, task.max_seq_length, options.embedding_loss)
        dataset.texts.say_what_is_cut(options.training_file)
        return task, dataset

    @classmethod
    def fine_tuned(
        cls, options: EmbeddingTaskOptions, max_seq_length: int, config: ModelConfig, folder: Path
    ) -> "EmbeddingTask":
        return cls(options, max_seq_length, settings_for(options, folder))

    def check_prompts(self, tokenizer: "Tokenizer") -> None:
        """Raises UserError if prompts cut off the texts, which would have equal embeddings."""
        for prompt in map(self.settings.prompted, PROMPTS):
            length = len(tokenizer.encode(prompt))
            if length > self.max_seq_length // 2:
                raise UserError(
                    f"the prompt {prompt!r} has {length} tokens, more than half of "
                    f"--max-seq-length {self.max_seq_length}: shorten the prompt, or raise it"
                )

    def prediction_sets(self, tokenizer: "Tokenizer") -> list[PredictionSet]:
        options = self.options
        if options.eval_file is None:
            return []
        load_metrics()  # fail on a missing package before training
        tuples = read_tuples(
            options.eval_file,
            options.columns,
            options.score,
            self.settings,
            options,
            prompt=options.prompt_column,
        )
        if options.corpus_file is not None:
            column = options.corpus_column or options.columns[1]
            further = [
                row[column]
                for part in table_parts(options.corpus_file)
                for _, row in read_texts(part, [column], table_format=options.table_format)
                if row[column].strip()
            ]
            tuples = tuples.with_corpus(further, self.settings)
        dataset = TextDataset(tokenizer, self.max_seq_length, tuples.texts)
        dataset.num_rows = len(tuples.rows)
        if options.train_file is None:
            dataset.say_what_is_cut(options.eval_file)
        undefined = undefined_reason(tuples)
        baselines = None
        if options.baseline and options.train_file is not None:
            baselines = once(partial(tfidf_baseline, tuples))
        return [PredictionSet(dataset, partial(self.finish, tuples), True, undefined, baselines)]

    def finish(
        self, tuples: TextTuples, embeddings: np.ndarray, folder: Path | None
    ) -> dict[str, Any]:
        vectors = normalized(embeddings)
        if tuples.scores is None:
            rows = retrieval(tuples, vectors)
            if folder is not None:
                path = folder / SCORED_QUERIES
                write_atomically(path, encode_table(path, rows))
            return mean_scores(rows)
        cosines = pair_cosines(vectors, np.array(tuples.rows))
        if folder is not None:
            rows = pair_rows(tuples, cosines)
            source = cast(Path, self.options.eval_file)
            write_like(folder / SCORED, rows, source, self.options.table_format)
        return similarity_scores(tuples, cosines)

    def embed(self, model: nn.Module, micro_batch: MicroBatch) -> Tensor:
        """The embeddings [N, E], not normalized, in float32, without filler; in the order of the
        labels.
        """
        embeddings_NE = model(
            TokenStream.from_batch(micro_batch, self.max_seq_length)
        ).logits.float()
        return embeddings_NE[micro_batch["places"][: micro_batch["num_sequences"]]]

    def for_batch(
        self, micro_batches: Sequence[MicroBatch], model: nn.Module, runtime: Runtime, seed: int
    ) -> "GlobalBatch":
        batch = GlobalBatch(self, micro_batches, runtime, seed)
        if batch.is_cached:
            batch.compute_gradients(model, micro_batches)
        return batch

    def losses(self, embeddings_nkE: Tensor, texts_nk: Tensor, scores_nk: Tensor) -> Tensor:
        """The loss [n] of each sample; its mean is the loss of the batch.

        embeddings_nkE: of the k texts of each sample.
        texts_nk: numbers of these texts, equal for equal texts.
        scores_nk: see TupleDataset.
        """
        options, scores_n = self.options, scores_nk[:, 0]
        total_n = embeddings_nkE.new_zeros(len(embeddings_nkE))
        for dim in options.matryoshka_dims or (embeddings_nkE.shape[2],):
            vectors_nkE = F.normalize(embeddings_nkE[..., :dim], dim=2)
            cosines_n = (vectors_nkE[:, 0] * vectors_nkE[:, 1]).sum(dim=1)
            if options.embedding_loss == MARGIN_MSE:
                losses_n = margin_mse_losses(vectors_nkE, scores_nk, options.temperature)
            elif options.score is None:
                losses_n = contrastive_losses(
                    vectors_nkE, texts_nk, options.temperature, options.symmetric_loss
                )
            elif options.embedding_loss == "cosine":
                losses_n = (cosines_n - scores_n) ** 2
            else:
                losses_n = cosent_losses(cosines_n, scores_n, options.temperature)
            total_n = total_n + losses_n
        return total_n

    def stored_length(self, config: ModelConfig) -> int:
        """Training on short texts takes no length from a model that embeds longer ones."""
        return max(self.max_seq_length, min(self.settings.max_seq_length, config.max_length))

    def model_files(self, config: ModelConfig) -> dict[str, bytes]:
        return self.settings.files(config.hidden_size, self.stored_length(config))

    def configure(self, config: ModelConfig) -> ModelConfig:
        if (largest := max(self.options.matryoshka_dims or [0])) > config.hidden_size:
            raise UserError(
                f"--matryoshka-dims {largest} is above the hidden size {config.hidden_size}: lower "
                f"it"
            )
        return replace(config, embedding_pooling=self.settings.pooling)


def settings_for(options: EmbeddingTaskOptions, folder: Path | None) -> EmbeddingSettings:
    """Pooling and prompts of the flags, else those of the model in `folder`."""
    stored = EmbeddingSettings() if folder is None else EmbeddingSettings.read(folder)
    flags = {"query": options.query_prompt, "document": options.document_prompt}
    prompts = stored.prompts | {name: text for name, text in flags.items() if text is not None}
    pooling = options.pooling or stored.pooling
    return replace(stored, pooling=pooling, normalize=True, prompts=prompts)


class GlobalBatch(BatchForward):
    """The forward passes of one global batch, whose loss is of the embeddings of all micro-batches
    and ranks.

    With one micro-batch per rank, its embeddings are gathered. With several, as in GradCache (Gao
    et al., 2021), all embeddings are computed first without a graph, then the gradient of the loss
    with respect to them; the forward passes are repeated with the same dropout, and propagate these
    gradients.
    """

    def __init__(
        self, task: EmbeddingTask, micro_batches: Sequence[MicroBatch], runtime: Runtime, seed: int
    ):
        self.task, self.runtime, self.seed = task, runtime, seed
        # On the host, before the GPU has anything to wait for.
        self.texts_nk = self._gather_labels(micro_batches, "texts")
        self.scores_nk = self._gather_labels(micro_batches, "scores").float()
        self.num_done = 0  # micro-batches
        self.is_cached = len(micro_batches) > 1
        # Of each micro-batch: see `losses_and_gradient`.
        self.cache: Sequence[tuple[Tensor, Tensor]] = ()

    def _gather_labels(self, micro_batches: Sequence[MicroBatch], name: str) -> Tensor:
        """The labels of all ranks' samples, [n, k], on the device."""
        parts = [batch[name][: batch["num_sequences"]] for batch in micro_batches]
        labels_N, _ = self.runtime.distributed.gather_rows(torch.cat(parts))
        if self.runtime.device.type == "cuda":
            labels_N = labels_N.pin_memory()
        labels_nk = labels_N.view(-1, self.task.options.sequences_per_sample)
        return labels_nk.to(self.runtime.device, non_blocking=True)

    @torch.no_grad()
    def compute_gradients(self, model: nn.Module, micro_batches: Sequence[MicroBatch]) -> None:
        """Computes all embeddings without a graph, and from them the loss and its gradient, which
        `sums` reads from the cache.
        """
        device = self.runtime.device
        outputs = []  # the embeddings [N, E] of each micro-batch
        with self.runtime.precision.context(device):
            for number, micro_batch in enumerate(micro_batches):
                torch.manual_seed(self.seed + number)
                outputs.append(self.task.embed(model, to_device(micro_batch, device)))
        sizes = [len(embeddings_NE) for embeddings_NE in outputs]
        losses_N, gradient_NE = self.losses_and_gradient(torch.cat(outputs))
        self.cache = list(zip(losses_N.split(sizes), gradient_NE.split(sizes), strict=True))

    def sums(self, model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
        if not micro_batch["num_sequences"]:  # filler: no loss, but the same collectives
            return {"loss": (self.task.embed(model, micro_batch) * 0).sum()}
        if self.is_cached:
            torch.manual_seed(self.seed + self.num_done)  # dropout as in `compute_gradients`
            embeddings_NE = self.task.embed(model, micro_batch)
            losses_N, gradient_NE = self.cache[self.num_done]
        else:
            embeddings_NE = self.task.embed(model, micro_batch)
            losses_N, gradient_NE = self.losses_and_gradient(embeddings_NE.detach())
        self.num_done += 1
        # A number with the value of the loss, whose derivative by the embeddings is the gradient.
        linear = (embeddings_NE * gradient_NE).sum()
        return {"loss": losses_N.sum() + linear - linear.detach()}

    def losses_and_gradient(self, embeddings_NE: Tensor) -> tuple[Tensor, Tensor]:
        """Of this rank's embeddings: the losses [N] of their samples, at the first sequence of
        each, and the gradient [N, E] of the loss of all ranks.
        """
        all_NE, start = self.runtime.distributed.gather_rows(embeddings_NE)
        k = self.task.options.sequences_per_sample
        with torch.enable_grad(), torch.autocast(all_NE.device.type, enabled=False):
            all_NE.requires_grad_()
            all_nkE = all_NE.view(-1, k, all_NE.shape[1])
            losses_n = self.task.losses(all_nkE, self.texts_nk, self.scores_nk)
            (gradient_NE,) = torch.autograd.grad(losses_n.sum(), all_NE)
        stop = start + len(embeddings_NE)
        losses_N = embeddings_NE.new_zeros(len(embeddings_NE))
        losses_N[::k] = losses_n.detach()[start // k : stop // k]
        return losses_N, gradient_NE[start:stop]


def texts_to_embed(
    tokenizer: "Tokenizer", rows: Sequence[Row], settings: EmbeddingSettings, max_length: int
) -> PredictedRows:
    """rows: with `text` and maybe `pair`, which is embedded with it."""
    pairs = [row["pair"] for row in rows] if "pair" in rows[0] else None
    dataset = TextDataset(tokenizer, max_length, [row["text"] for row in rows], pairs)

    def predict(vectors_nE: np.ndarray) -> list[Prediction]:
        if settings.normalize:
            vectors_nE = normalized(vectors_nE)
        return [Prediction({"embedding": vector.tolist()}) for vector in vectors_nE]

    return PredictedRows(dataset, predict)


def undefined_reason(tuples: TextTuples) -> str | None:
    """Why the scores of `tuples` say nothing about a model, or None."""
    if tuples.scores is not None and len(set(tuples.scores)) < 2:
        return f"all scores are {tuples.scores[0]:g}"
    if tuples.scores is None and not relevant_texts(tuples):
        return "all pairs are a text and itself"
    return None


def relevant_texts(tuples: TextTuples) -> dict[int, set[int]]:
    """The positives of each anchor, but for the anchor itself, which it is not to find."""
    relevant: dict[int, set[int]] = {}
    for anchor, positive in tuples.rows:
        if tuples.originals[anchor] != tuples.originals[positive]:
            relevant.setdefault(anchor, set()).add(positive)
    return relevant


def similarity_scores(tuples: TextTuples, cosines: np.ndarray) -> dict[str, float]:
    metrics = load_metrics()
    scores = np.array(tuples.scores)
    return {name: float(metrics[name](scores, cosines)) for name in SIMILARITY_SCORES}


def tfidf_baseline(tuples: TextTuples) -> Baselines:
    """The scores of the tf-idf of the same texts instead of embeddings."""
    texts = tuples.originals
    vectors = tfidf(texts).fit_transform(texts)
    if tuples.scores is not None:
        scores = similarity_scores(tuples, pair_cosines(vectors, np.array(tuples.rows)))
        return Baselines({"tf-idf": scores}, None, len(tuples.scores))
    num_queries = len(relevant_texts(tuples))
    num_drawn = min(num_queries, max(100, MAX_PRODUCTS // len(texts)))
    name = "tf-idf"
    if num_drawn < num_queries:
        name = f"tf-idf, {num_drawn:,} of {num_queries:,} queries"
    scores = mean_scores(retrieval(tuples, vectors, num_drawn))
    return Baselines({name: scores}, None, num_queries)


def retrieval(tuples: TextTuples, vectors: Vectors, max_queries: int | None = None) -> list[Row]:
    """Ranks the corpus for each anchor. Returns a row for each anchor: the anchor, its positives,
    the first text of its ranking, and the scores of the ranking.

    vectors: of the texts of `tuples`, normalized.
    max_queries: rank for so many anchors, at equal distances, instead of for all.
    """
    relevant = relevant_texts(tuples)
    if not relevant:
        return []
    if max_queries is not None:
        anchors = list(relevant)
        places = np.arange(max_queries) * len(anchors) // max_queries
        relevant = {anchors[place]: relevant[anchors[place]] for place in places}
    # Texts are numbers, of which `texts` has the strings.
    texts = tuples.originals
    positives_of_all = [positive for _, positive in tuples.rows]
    corpus = np.unique([*positives_of_all, *tuples.corpus])
    digest = json_digest(sorted(texts[text] for text in corpus))
    # One more than the cutoff, since the nearest text may be the anchor itself.
    nearest_texts = corpus[nearest(vectors[list(relevant)], vectors[corpus], CUTOFF + 1)]
    rows = []
    for (anchor, positives), neighbours in zip(
        relevant.items(), nearest_texts.tolist(), strict=True
    ):
        others = [text for text in neighbours if texts[text] != texts[anchor]]
        ranking = others[:CUTOFF]
        rows.append(
            {
                "query": texts[anchor],
                "positives": sorted(texts[text] for text in positives),
                "prediction": texts[ranking[0]] if ranking else None,
                **ranking_scores(ranking, positives),
                "corpus": digest,
            }
        )
    return rows


def pair_rows(tuples: TextTuples, cosines: np.ndarray) -> list[Row]:
    """Scored pairs with the cosine of each as the prediction."""
    rows = []
    for (first, second), score, cosine in zip(
        tuples.rows, tuples.scores or (), cosines.tolist(), strict=True
    ):
        texts = {"text": tuples.originals[first], "pair": tuples.originals[second]}
        rows.append(texts | {"label": score, "prediction": cosine})
    return rows


class TupleDataset:
    """Samples of k texts each, as k sequences (see data_loading.loader.StreamDataset). Each
    distinct text is encoded once. The sequences of a stream are sorted by length, for attention.

    Labels of a sequence. texts: equal for texts that differ by their prompts only. scores: those of
    the teacher for margin MSE, 0 for the anchor; else that of the pair, and for the loss cosent its
    rank, since only their order counts, and float32 has not all of them. places: where the
    sequences of each sample are.
    """

    stream_labels = (
        Label("texts", "sequence"),
        Label("scores", "sequence"),
        Label("places", "sequence"),
    )
    max_labelled_per_sample = 0

    def __init__(
        self,
        tuples: TextTuples,
        tokenizer: "Tokenizer",
        max_seq_length: int,
        loss: str | None = None,
    ):
        self.texts = TextDataset(tokenizer, max_seq_length, tuples.texts)
        self.rows = np.array(tuples.rows)
        self.scores = np.array(tuples.teacher_scores or tuples.scores or [0.0] * len(self))
        # The label `scores` of each text of each sample.
        if loss == MARGIN_MSE:
            self.targets_nk = np.pad(self.scores, ((0, 0), (1, 0)))  # 0 for the anchor
        else:
            targets_n = self.scores
            if loss != "cosine":
                _, targets_n = np.unique(self.scores, return_inverse=True)  # ranks
            self.targets_nk = np.broadcast_to(targets_n[:, None], self.rows.shape)
        # The label `texts`: a number for each distinct text, in the order of their first use.
        numbers: dict[str, int] = {}
        for text in tuples.originals:
            numbers.setdefault(text, len(numbers))
        self.originals = np.array([numbers[text] for text in tuples.originals])
        self.num_examples, self.max_sequences_per_sample = self.rows.shape
        self.distinct_sequences = self.texts.distinct_sequences
        self.input_ids = self.texts.input_ids
        self.unknown_share = self.texts.unknown_share

    def __len__(self) -> int:
        return len(self.rows)

    def digest(self) -> str:
        parts = self.texts.digest().encode(), self.rows.tobytes(), self.scores.tobytes()
        return hashlib.sha256(b"".join(parts)).hexdigest()[:16]

    def read(
        self, indices: np.ndarray, seeds: np.ndarray | None = None, progress: float = 0.0
    ) -> SequenceSamples:
        lengths_n = self.texts.lengths[self.rows[indices]].sum(axis=1)
        labelled_n = np.zeros(len(indices), np.int64)  # tokens with a label: there are none
        sequences_n = np.full(len(indices), self.max_sequences_per_sample)
        return SequenceSamples(
            lengths_n, labelled_n, sequences_n, lambda rows: self.stream(indices[rows])
        )

    def stream(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        texts, scores = self.rows[indices].ravel(), self.targets_nk[indices].ravel()
        by_length = np.argsort(-self.texts.lengths[texts], kind="stable")
        labels = {
            "texts": self.originals[texts],
            "scores": scores.astype(np.float32),
            "places": np.argsort(by_length),
        }
        return self.texts.stream(texts[by_length]) | labels
