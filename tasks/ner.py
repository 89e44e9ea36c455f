"""Token classification, such as named-entity recognition: loss, data set and entity-level scores.

Legend: n sentences, W words of all sentences, T tokens, C tags.
"""

import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from encoders.config import ModelConfig
from loss import summed_cross_entropy
from run_config import LearningOptions
from tasks import FineTuningTask, PredictionSet, SeparableTask
from tasks.glue_specs import MAX_SEQ_LENGTH
from tasks.labels import check_spelling, listed, warn_of_absent, warn_of_single
from tasks.mistakes import Mistake, most_confident
from tasks.ner_files import (
    FOUND_COLUMNS,
    TAG,
    Sentence,
    SentenceColumns,
    entities,
    read_sentences,
    to_iob2,
)
from tasks.reading import DEFAULT_READING, ReadingOptions
from tasks.splits import Split
from tasks.text_sequences import SequenceDataset, encode
from token_stream import IGNORED_LABEL, MicroBatch, TokenStream
from utils.errors import UserError, one_line
from utils.files import write_atomically
from utils.progress import print_line, print_once

SCORED_FILE = "eval_predictions.tsv"


@dataclass(frozen=True)
class TokenClassificationTask(LearningOptions, FineTuningTask, SeparableTask):
    """Predicts a tag per word. The label is on the first token of each word, as in transformers'
    examples.
    """

    max_seq_length: int = MAX_SEQ_LENGTH
    train_file: Path | None = None
    eval_file: Path | None = None
    predict_file: Path | None = None
    labels: tuple[str, ...] = ()
    reading: ReadingOptions = DEFAULT_READING
    split: Split | None = None
    columns: SentenceColumns = FOUND_COLUMNS

    name = "ner"
    head = "token_classification"
    logits_axis = "token"
    score_names = ("f1", "precision", "recall", "accuracy")
    result_files = ("predictions.tsv", "predictions.jsonl", SCORED_FILE)

    @property
    def initial_loss(self) -> float:
        return math.log(len(self.labels))

    def sums(self, model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
        logits_TC = model(TokenStream.from_batch(micro_batch, self.max_seq_length)).logits
        loss, correct = summed_cross_entropy(
            logits_TC, micro_batch["tags"], label_smoothing=self.label_smoothing
        )
        return {"loss": loss, "correct": correct}

    def loss(self, sums: dict[str, Tensor], num_sequences: float, num_labelled: float) -> Tensor:
        return sums["loss"] / num_labelled

    def metrics(
        self, sums: dict[str, float], num_sequences: float, num_labelled: float
    ) -> dict[str, float]:
        return {"loss": sums["loss"] / num_labelled, "accuracy": sums["correct"] / num_labelled}

    def training_set(self, tokenizer) -> tuple["TokenClassificationTask", "TaggedDataset"]:
        sentences = read_sentences(self.train_file, True, self.reading, self.columns)
        tags = {tag for sentence in sentences for tag in sentence.tags}
        if len(tags) < 2:
            raise UserError(
                f"{self.train_file}: all tags are {tags.pop()!r}: there must be at least two"
            )
        check_spelling(self.train_file, {tag[2:] for tag in tags - {"O"}})
        if self.split is not None:
            sentences = list(itertools.compress(sentences, ~self.held_out(sentences)))
        warn_of_single(self.train_file, counts_of(sentences))
        labels = tuple(sorted(tags, key=lambda tag: (tag != "O", tag)))
        dataset = TaggedDataset(sentences, tokenizer, self.max_seq_length, labels)
        return replace(self, labels=labels), dataset

    def for_model(self, config: ModelConfig, folder: Path) -> "TokenClassificationTask":
        wrong = [label for label in config.labels if not TAG.fullmatch(label)]
        if wrong or not config.labels:
            found = wrong[:1] or "no classes"
            raise UserError(
                f"{folder} does not predict tags such as B-PER, but {found}: fine-tune it"
            )
        return replace(self, labels=config.labels)

    def held_out(self, sentences: list[Sentence]) -> np.ndarray:
        """Whether each sentence of the training file is for development."""
        kinds = [tuple(sorted({tag[2:] for tag in each.tags})) for each in sentences]
        return self.split.held_out([tuple(each.words) for each in sentences], kinds)

    @property
    def scored_files(self) -> tuple[Path, ...]:
        return super().scored_files if self.split is None else (self.train_file,)

    def prediction_sets(self, tokenizer) -> list[PredictionSet]:
        sets = []
        eval_file = self.eval_file if self.split is None else self.train_file
        for path, tagged, finish in (
            (eval_file, True, self.score),
            (self.predict_file, False, self.write),
        ):
            if path is not None:
                columns = self.columns if tagged else self.columns._replace(tags=None)
                sentences = read_sentences(path, tagged, self.reading, columns)
                if tagged and self.split is not None:
                    sentences = list(itertools.compress(sentences, self.held_out(sentences)))
                if tagged:
                    self.check_types(path, sentences)
                dataset = TaggedDataset(sentences, tokenizer, self.max_seq_length)
                undefined = None
                if tagged and all(tag == "O" for each in sentences for tag in each.tags):
                    undefined = "no sentence has an entity"
                sets.append(PredictionSet(dataset, partial(finish, dataset), tagged, undefined))
        return sets

    def check_types(self, path: Path, sentences: list[Sentence]) -> None:
        """Warns of types of entities in `path` that the model has not learnt; raises UserError if
        it knows none.
        """
        known = {tag[2:] for tag in self.labels if tag != "O"}
        if self.train_file is not None:
            counts = dict.fromkeys(sorted(known), 0) | counts_of(sentences)
            warn_of_absent(path, counts, self.split is not None)
        types = {tag[2:] for sentence in sentences for tag in sentence.tags if tag != "O"}
        if unknown := sorted(types - known):
            learnt = ", ".join(sorted(known))
            found = (
                f"{path} has entities of {', '.join(unknown)}, and the model has learnt {learnt}"
            )
            if not types & known:
                raise UserError(f"{found}: use a model that was fine-tuned on these types")
            print_once(f"warning: {one_line(found)}: they count as not found")

    def predicted_tags(self, dataset: "TaggedDataset", logits_TC: np.ndarray) -> list[list[str]]:
        """The tags of each sentence."""
        tags = iter(
            [self.labels[index] for index in logits_TC[dataset.first_tokens].argmax(axis=1)]
        )
        return [[next(tags) for _ in sentence.words] for sentence in dataset.sentences]

    def score(
        self, dataset: "TaggedDataset", logits_TC: np.ndarray, folder: Path | None
    ) -> dict[str, Any]:
        expected = [sentence.tags for sentence in dataset.sentences]
        found = [to_iob2(tags) for tags in self.predicted_tags(dataset, logits_TC)]
        scores = entity_scores(expected, found)
        if folder is None:
            return scores
        warn_of_missing(expected, found)
        logits_WC = logits_TC[dataset.first_tokens].astype(np.float64)
        shares_WC = np.exp(logits_WC - logits_WC.max(axis=1, keepdims=True))
        probability_W = (shares_WC.max(axis=1) / shares_WC.sum(axis=1)).tolist()
        return scores | most_confident(
            write_scored(folder / SCORED_FILE, dataset.sentences, found, probability_W)
        )

    def spans(self, dataset: "TaggedDataset", logits_TC: np.ndarray) -> list[list[dict[str, Any]]]:
        """The entities of each sentence: first character, end, and type."""
        spans = []
        for sentence, tags in zip(
            dataset.sentences, self.predicted_tags(dataset, logits_TC), strict=True
        ):
            found = sorted(entities(tags), key=lambda entity: entity[1])
            starts, ends = zip(*sentence.offsets, strict=True)
            spans.append(
                [{"start": starts[a], "end": ends[b - 1], "label": kind} for kind, a, b in found]
            )
        return spans

    def write(
        self, dataset: "TaggedDataset", logits_TC: np.ndarray, folder: Path
    ) -> dict[str, float]:
        sentences, lines = dataset.sentences, []
        has_spans = sentences[0].text is not None
        if has_spans:
            for sentence, spans in zip(sentences, self.spans(dataset, logits_TC), strict=True):
                lines.append(
                    json.dumps({"text": sentence.text, "spans": spans}, ensure_ascii=False)
                )
        else:
            for sentence, tags in zip(
                sentences, self.predicted_tags(dataset, logits_TC), strict=True
            ):
                lines += [
                    *(f"{word}\t{tag}" for word, tag in zip(sentence.words, tags, strict=True)),
                    "",
                ]
        path = folder / self.result_files[has_spans]
        write_atomically(path, "\n".join(lines) + "\n")
        print_line(f"predictions for {len(sentences)} sentences in {path}")
        return {}


class TaggedDataset(SequenceDataset):
    """Sentences as `[CLS] words [SEP]`, divided if longer than `max_seq_length`. `first_tokens`
    [W]: index in `input_ids` of each word's first token, which has the word's tag as label. labels:
    tags by id, for training.
    """

    def __init__(
        self, sentences: list[Sentence], tokenizer, max_seq_length: int, labels: Sequence[str] = ()
    ):
        self.sentences = sentences
        words = [word for sentence in sentences for word in sentence.spaced_words()]
        ids_W, _ = encode(tokenizer, words, "words")
        unknown = np.array([tokenizer.unk_token_id])  # for words of control characters only
        pieces_W = iter(ids[: max_seq_length - 2] if len(ids) else unknown for ids in ids_W)
        texts: list[list[np.ndarray]] = []  # the words of each sequence
        first_tokens, place = [], 0  # place: where the next word begins in `input_ids`
        for sentence in sentences:
            length = max_seq_length  # a sentence begins a sequence
            for _ in sentence.words:
                piece = next(pieces_W)
                if length + len(piece) + 1 > max_seq_length:
                    texts.append([])
                    place, length = place + (2 if first_tokens else 1), 1  # [SEP] and [CLS]
                texts[-1].append(piece)
                first_tokens.append(place)
                place, length = place + len(piece), length + len(piece)
        self.first_tokens = np.array(first_tokens)
        tags = {}
        if labels:
            ids = {label: index for index, label in enumerate(labels)}
            tags["tags"] = np.full(place + 1, IGNORED_LABEL, np.int64)
            tags["tags"][self.first_tokens] = [
                ids[tag] for sentence in sentences for tag in sentence.tags
            ]
        super().__init__(
            tokenizer, [[np.concatenate(words)] for words in texts], tags, label_axis="token"
        )


def counts_of(sentences: Sequence[Sentence]) -> Counter[str]:
    """The number of entities of each type."""
    return Counter(kind for each in sentences for kind, _, _ in entities(each.tags))


def write_scored(
    path: Path,
    sentences: Sequence[Sentence],
    predicted: list[list[str]],
    probability_W: list[float],
) -> list[Mistake]:
    """Writes each word with its tag, the predicted tag and that one's probability; returns the
    sentences with mistakes.
    """
    lines = []
    mistakes = []
    probabilities = iter(probability_W)
    for sentence, tags in zip(sentences, predicted, strict=True):
        doubt = 0.0
        for word, true, tag in zip(sentence.words, sentence.tags, tags, strict=True):
            probability = next(probabilities)
            lines.append(f"{word}\t{true}\t{tag}\t{probability:.4f}")
            if tag != true:
                doubt = max(doubt, probability)
        lines.append("")
        if doubt:
            shown = (named_entities(sentence.words, each) for each in (sentence.tags, tags))
            mistakes.append(Mistake(" ".join(sentence.words), *shown, doubt))
    write_atomically(path, "\n".join(["word\ttag\tpredicted\tprobability", "", *lines]) + "\n")
    return mistakes


def named_entities(words: Sequence[str], tags: Sequence[str]) -> str:
    found = sorted(entities(tags), key=lambda entity: entity[1])
    return ", ".join(f"{' '.join(words[start:stop])}: {kind}" for kind, start, stop in found)


def warn_of_missing(expected: list[list[str]], predicted: list[list[str]]) -> None:
    """Warns of types of entities in the file that are predicted nowhere."""
    found, wanted = (
        {tag[2:] for tags in side for tag in tags if tag != "O"} for side in (predicted, expected)
    )
    if missing := sorted(wanted - found):
        names = one_line(listed(missing))
        print_line(
            f"warning: the model predicts no entity of {names}, though the file has some: train "
            f"longer, or with more samples of it"
        )


def entity_scores(expected: list[list[str]], predicted: list[list[str]]) -> dict[str, Any]:
    """Precision, recall and F1 of entities, overall and per type, and the accuracy of tags. Without
    entities in the file, recall and F1 are NaN, and precision is, too, if none is predicted; of a
    type they are None.
    """
    sides = [
        {(row, *entity) for row, tags in enumerate(side) for entity in entities(tags)}
        for side in (expected, predicted)
    ]

    def scores_of(kinds: set[str], undefined: float | None = 0.0) -> dict[str, Any]:
        wanted, found = ({entity for entity in side if entity[1] in kinds} for side in sides)
        correct = len(wanted & found)
        return {
            "precision": correct / len(found) if found else undefined,
            "recall": correct / len(wanted) if wanted else undefined,
            "f1": 2 * correct / max(len(wanted) + len(found), 1),
            "support": len(wanted),
        }

    kinds = sorted({entity[1] for side in sides for entity in side})
    scores = scores_of(set(kinds))
    if not scores.pop("support"):
        scores |= {"recall": math.nan, "f1": math.nan}
        scores["precision"] = 0.0 if sides[1] else math.nan
    pairs = list(zip(itertools.chain(*expected), itertools.chain(*predicted), strict=True))
    scores["accuracy"] = sum(a == b for a, b in pairs) / len(pairs)
    return scores | {"per_class": {kind: scores_of({kind}, None) for kind in kinds}}
