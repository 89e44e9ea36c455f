"""What inference.py does with a model, by its head: answers, classes, tags, masked words or
sentence embeddings.
"""

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from bert_recipe.checkpoint.calibration import read_temperature
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.sentence_folders import EmbeddingSettings
from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.model.token_stream import TokenStream
from bert_recipe.tasks.classification.frozen import FrozenEncoder
from bert_recipe.tasks.classification.labels import check_pairs
from bert_recipe.tasks.classification.scores import prediction_columns
from bert_recipe.tasks.embeddings.options import EmbeddingTaskOptions
from bert_recipe.tasks.embeddings.retrieval import normalized
from bert_recipe.tasks.fine_tuning import FineTuningOptions
from bert_recipe.tasks.ner.files import Sentence
from bert_recipe.tasks.ner.options import TokenClassificationOptions
from bert_recipe.tasks.ner.task import TokenClassificationTask
from bert_recipe.tasks.ner.token_labels import TaggedDataset
from bert_recipe.tasks.squad.files import Question, Squad, SquadOptions
from bert_recipe.tasks.squad.options import SquadTaskOptions
from bert_recipe.tasks.squad.task import SquadDataset, decode
from bert_recipe.tasks.text_sequences import SequenceDataset, TextDataset, encode
from bert_recipe.tokenization.files import MASK
from bert_recipe.tokenization.tokenizer import Tokenizer
from bert_recipe.utils.errors import UserError, one_line
from bert_recipe.utils.tables import Row


@dataclass(frozen=True)
class Prediction:
    """Columns for a file, and lines for the terminal."""

    columns: Row
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Predictor(ABC):
    """A loaded model. A subclass is for one head, a key of modeling.MODELS.

    flags: flags of inference.py that it takes.
    max_length: the most tokens of a sequence if the user gives none.
    logits: see evaluation.predict.
    autocast: the context of a forward pass.
    prompt_name: of embeddings.
    """

    config: ModelConfig
    folder: Path
    tokenizer: Tokenizer
    num_results: int
    options: SquadOptions
    truncate: bool
    logits: Callable[[SequenceDataset, str], np.ndarray]
    autocast: Callable[[], AbstractContextManager[object]]
    model: nn.Module
    batch_size: int
    prompt_name: str | None = None

    head: ClassVar[str]
    flags: ClassVar[tuple[str, ...]]
    max_length = FineTuningOptions.fine_tuned_length

    @classmethod
    def configure(cls, config: ModelConfig, folder: ModelFolder) -> ModelConfig:
        """The config of the model to load."""
        return config

    @abstractmethod
    def prepare(self, places: list[str], rows: list[Row]) -> Callable[[], list[Prediction]]:
        """Checks `rows`, which have the strings `text` and maybe `pair`, or `question` and
        `context`, and returns a function that predicts them. places: names of the rows in errors.
        """

    def check_length(
        self, place: str, what: str, tokens: int, maximum: int, advice: str = "shorten it"
    ) -> None:
        if tokens > maximum:
            raise UserError(
                f"{place}: the {what} has {tokens} tokens, and at most {maximum} are possible: "
                f"{advice}"
            )

    def best_lines(self, title: str, results: Iterable[tuple[float, str]]) -> list[str]:
        shown = itertools.islice(results, self.num_results)
        return [title, *(f"  {value:.3f}  {one_line(text)}" for value, text in shown)]


def named(name: str, value: str) -> str:
    return f"{name:<13}{one_line(value)}"


class AnswerPredictor(Predictor):
    """Answers to questions about passages."""

    head = "question_answering"
    flags = (
        "question",
        "context",
        "question_column",
        "context_column",
        "doc_stride",
        "max_answer_length",
        "version_2_with_negative",
        "n_best_size",
    )
    max_length = SquadTaskOptions.fine_tuned_length

    def prepare(self, places: list[str], rows: list[Row]) -> Callable[[], list[Prediction]]:
        for place, row in zip(places, rows, strict=True):
            for name, what in (("question", "question"), ("context", "passage")):
                if not len(self.tokenizer.encode(row[name])):
                    raise UserError(f"{place}: the {what} has no words: give a text")
            length = len(self.tokenizer.encode(row["question"]))
            self.check_length(place, "question", length, self.options.max_query_length)
        questions = [Question(str(i), row["question"], i, ()) for i, row in enumerate(rows)]
        squad = Squad(
            Path(),
            [row["context"] for row in rows],
            questions,
            self.options.version_2_with_negative,
        )
        return partial(self.answers, SquadDataset(squad, self.tokenizer, self.options))

    def answers(self, dataset: SquadDataset) -> list[Prediction]:
        decoded = decode(dataset, self.logits(dataset, "token"), self.options)
        none = (
            "(the passage has no answer)"
            if self.options.version_2_with_negative
            else "(none found)"
        )
        predictions = []
        for question in dataset.squad.questions:
            text, best = decoded.answers[question.id], decoded.nbest[question.id]
            probability = next(
                candidate["probability"] for candidate in best if candidate["text"] == text
            )
            lines = [named("answer", text or none), named("probability", f"{probability:.3f}")]
            lines += self.best_lines(
                "n best",
                ((candidate["probability"], candidate["text"] or none) for candidate in best),
            )
            predictions.append(Prediction({"answer": text, "probability": probability}, lines))
        return predictions


class ClassPredictor(Predictor):
    """Classes, labels or numbers of texts and pairs of texts."""

    head = "sequence_classification"
    flags = ("text", "text_pair", "text_column", "pair_column", "truncate", "n_best_size")

    def text_dataset(self, places: list[str], rows: list[Row]) -> TextDataset:
        pairs = [row["pair"] for row in rows] if "pair" in rows[0] else None
        texts = [row["text"] for row in rows]
        maximum = self.options.max_seq_length
        dataset = TextDataset(self.tokenizer, maximum if self.truncate else 2**30, texts, pairs)
        for place, length in zip(places, dataset.lengths, strict=True):
            self.check_length(place, "text", length, maximum, "shorten it, or add --truncate")
        return dataset

    def prepare(self, places: list[str], rows: list[Row]) -> Callable[[], list[Prediction]]:
        check_pairs(self.config, self.folder, "pair" in rows[0])
        return partial(self.classes, self.text_dataset(places, rows))

    def class_logits(self, dataset: TextDataset) -> np.ndarray:
        return self.logits(dataset, "sequence")

    def classes(self, dataset: TextDataset) -> list[Prediction]:
        """The class of each text, or its labels if the model is multi-label, or its number, with
        their probabilities.
        """
        logits_nC = self.class_logits(dataset)
        num_outputs = logits_nC.shape[1]
        labels = self.config.labels or tuple(f"LABEL_{index}" for index in range(num_outputs))
        if num_outputs > 1 or self.config.multi_label:
            logits_nC = logits_nC / np.float32(read_temperature(self.folder))
        predictions = []
        for columns in prediction_columns(logits_nC, labels, self.config.multi_label):
            if "score" in columns:
                lines = [named("score", f"{columns['score']:.4f}")]
                predictions.append(Prediction(columns, lines))
                continue
            ranked = [(columns[f"probability {label}"], label) for label in labels]
            ranked.sort(key=lambda entry: entry[0], reverse=True)
            if "labels" in columns:
                lines = [named("labels", ", ".join(columns["labels"]) or "(none)")]
            else:
                (probability, label), *_ = ranked
                lines = [named("label", label), named("probability", f"{probability:.3f}")]
            predictions.append(Prediction(columns, lines + self.best_lines("n best", ranked)))
        return predictions


class FrozenClassPredictor(ClassPredictor):
    """Classes by a classifier that was fitted to the vectors of an encoder."""

    head = "sentence_embedding"

    @classmethod
    def configure(cls, config: ModelConfig, folder: ModelFolder) -> ModelConfig:
        return replace(config, embedding_pooling=frozen_encoder(folder.path).settings.pooling)

    def text_dataset(self, places: list[str], rows: list[Row]) -> TextDataset:
        pairs = [row["pair"] for row in rows] if "pair" in rows[0] else None
        texts, pairs = frozen_encoder(self.folder).prompted([row["text"] for row in rows], pairs)
        prompted: list[Row] = [{"text": text} for text in texts]
        if pairs is not None:
            prompted = [row | {"pair": pair} for row, pair in zip(prompted, pairs, strict=True)]
        return super().text_dataset(places, prompted)

    def class_logits(self, dataset: TextDataset) -> np.ndarray:
        return frozen_encoder(self.folder).logits(super().class_logits(dataset))


def frozen_encoder(folder: Path) -> FrozenEncoder:
    frozen = FrozenEncoder.read(folder)
    if frozen is None:
        raise UserError(f"{folder} has no classifier of vectors: train it with --frozen-encoder")
    return frozen


class TagPredictor(Predictor):
    """Entities in texts."""

    head = "token_classification"
    flags = ("text", "text_column")

    def prepare(self, places: list[str], rows: list[Row]) -> Callable[[], list[Prediction]]:
        length = self.options.max_seq_length
        task = TokenClassificationTask.fine_tuned(
            TokenClassificationOptions(), length, self.config, self.folder
        )
        sentences = [Sentence(text=row["text"]) for row in rows]
        return partial(self.entities, task, task.dataset(sentences, self.tokenizer))

    def entities(self, task: TokenClassificationTask, dataset: TaggedDataset) -> list[Prediction]:
        """The entities of each text: their types, starts and ends."""
        predictions = []
        spans_of_texts = task.spans(dataset, self.logits(dataset, "token"))
        for sentence, spans in zip(dataset.sentences, spans_of_texts, strict=True):
            lines = ["entities"]
            for span in spans:
                text = sentence.shown_entity((span["label"], span["start"], span["end"]))
                lines.append(f"  {one_line(span['label'])}  {one_line(text)}")
            if not spans:
                lines.append("  (none found)")
            predictions.append(Prediction({"spans": spans}, lines))
        return predictions


class MaskPredictor(Predictor):
    """The words that fit [MASK] in texts."""

    head = "masked_lm"
    flags = ("fill_mask", "text_column", "n_best_size")

    def prepare(self, places: list[str], rows: list[Row]) -> Callable[[], list[Prediction]]:
        tokenizer = self.tokenizer
        mask = re.compile("|".join(map(re.escape, {MASK, tokenizer.special_tokens["mask_token"]})))
        texts = [mask.split(row["text"]) for row in rows]  # as the parts between masks
        all_parts: list[str] = []
        for parts in texts:
            # A token may include the space before it, so the space before a mask belongs to it.
            all_parts += [part.rstrip() for part in parts]
        ids_of_all_parts, _ = encode(tokenizer, all_parts, "texts")
        sequences = []
        num_special = tokenizer.layout(1).num_special
        start = 0
        for place, parts in zip(places, texts, strict=True):
            if len(parts) == 1:
                raise UserError(
                    f"{place}: the text has no {MASK}: write it where a word is missing"
                )
            stop = start + len(parts)
            first, *others = ids_of_all_parts[start:stop]
            start = stop
            ids = [*first]
            for part_ids in others:
                ids += [tokenizer.mask_token_id, *part_ids]
            sequences.append([np.array(ids)])
            self.check_length(place, "text", len(ids) + num_special, self.options.max_seq_length)
        return partial(self.words, texts, SequenceDataset(tokenizer, sequences, {}))

    @torch.inference_mode()
    def words(self, texts: list[list[str]], dataset: SequenceDataset) -> list[Prediction]:
        """Each text with the best word in each of its masks. texts: as the parts between masks."""
        by_length = np.argsort(-dataset.lengths, kind="stable")
        words_of_text: dict[int, list[list[tuple[float, str]]]] = {}
        self.model.eval()
        for batch in np.split(by_length, range(self.batch_size, len(texts), self.batch_size)):
            words_of_masks = self.best_words(dataset, batch)
            start = 0
            for text in batch.tolist():
                stop = start + len(texts[text]) - 1  # a mask between two parts
                words_of_text[text] = words_of_masks[start:stop]
                start = stop
        return [self.prediction(parts, words_of_text[text]) for text, parts in enumerate(texts)]

    def best_words(
        self, dataset: SequenceDataset, batch: np.ndarray
    ) -> list[list[tuple[float, str]]]:
        """For each mask of the sequences `batch`: probabilities and words, best first."""
        device = next(self.model.parameters()).device
        stream = {
            name: torch.from_numpy(array).to(device)
            for name, array in dataset.stream(batch).items()
        }
        positions_M = (stream["input_ids"] == self.tokenizer.mask_token_id).nonzero().squeeze(1)
        tokens = TokenStream.from_batch(stream, int(dataset.lengths[batch].max()))
        with self.autocast():
            output = self.model(tokens, mlm_positions=positions_M)
        logits_MV = output.prediction_logits[:, : self.tokenizer.vocab_size]
        if not logits_MV.isfinite().all():
            raise UserError(
                "the model's logits are not finite: its weights are damaged, use another checkpoint"
            )
        num_results = min(self.num_results, logits_MV.shape[1])
        probs_MK, ids_MK = logits_MV.float().softmax(1).topk(num_results)
        results = []
        for probs_K, ids_K in zip(probs_MK.tolist(), ids_MK.tolist(), strict=True):
            words_K = [self.tokenizer.text_of(token_id) for token_id in ids_K]
            results.append(list(zip(probs_K, words_K, strict=True)))
        return results

    def prediction(self, parts: list[str], results: list[list[tuple[float, str]]]) -> Prediction:
        """The text with the best word in each mask.

        parts: the text before the first mask, between masks, and after the last one.
        results: for each mask probabilities and words, best first.
        """
        filled = parts[0]
        lists: list[str] = []
        for number, (best, part) in enumerate(zip(results, parts[1:], strict=True), 1):
            _, word = best[0]
            if word.startswith(" "):
                filled = (filled.rstrip() + word).lstrip()
            else:
                filled += word
            filled += part
            title = "n best" if len(results) == 1 else f"n best of {MASK} {number}"
            lists += self.best_lines(title, best)
        words: list[Any] = [{word: probability for probability, word in best} for best in results]
        return Prediction({"filled": filled, "words": words}, [named("text", filled), *lists])


class EmbeddingPredictor(ClassPredictor):
    """Sentence embeddings, as the folder's sentence-transformers files say, or as its default:
    mean, not normalized.
    """

    head = "sentence_embedding"
    flags = ("text", "text_column", "pair_column", "truncate", "embed", "prompt_name")
    max_length = EmbeddingTaskOptions.fine_tuned_length

    @classmethod
    def configure(cls, config: ModelConfig, folder: ModelFolder) -> ModelConfig:
        return replace(config, embedding_pooling=EmbeddingSettings.read(folder.path).pooling)

    def prepare(self, places: list[str], rows: list[Row]) -> Callable[[], list[Prediction]]:
        settings = EmbeddingSettings.read(self.folder)
        name = self.prompt_name
        if name is not None and not settings.prompts.get(name):
            names = [known for known, text in settings.prompts.items() if text]
            raise UserError(
                f"--prompt-name {name}: {self.folder} has {', '.join(names) or 'no prompts'}: give "
                f"another, or leave it out"
            )
        prompted = [
            {field: settings.prompted(name, text) for field, text in row.items()} for row in rows
        ]
        return partial(self.embeddings, self.text_dataset(places, prompted))

    def embeddings(self, dataset: TextDataset) -> list[Prediction]:
        vectors_NE = self.logits(dataset, "sequence")
        if EmbeddingSettings.read(self.folder).normalize:
            vectors_NE = normalized(vectors_NE)
        return [Prediction({"embedding": vector.tolist()}) for vector in vectors_NE]


# Those whose head tells what a model is for, and all of them: any encoder embeds texts.
HEAD_PREDICTORS: tuple[type[Predictor], ...] = (
    AnswerPredictor,
    ClassPredictor,
    TagPredictor,
    MaskPredictor,
)
PREDICTORS: tuple[type[Predictor], ...] = (*HEAD_PREDICTORS, EmbeddingPredictor)
