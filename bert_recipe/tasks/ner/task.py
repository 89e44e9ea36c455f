"""Token classification, such as named-entity recognition: loss, data set and entity-level scores.

Legend: n sentences, U units (see token_labels.py), T tokens, C tags.
"""

import itertools
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.model.encoders.heads import FirstOutputs
from bert_recipe.model.loss import summed_cross_entropy
from bert_recipe.model.token_stream import IGNORED_LABEL, BatchCounts, MicroBatch, TokenStream
from bert_recipe.tasks.baselines import WARNING, constant_loss, once
from bert_recipe.tasks.fine_tuning import FineTuningTask
from bert_recipe.tasks.labels import check_spelling
from bert_recipe.tasks.mistakes import Mistake, most_confident
from bert_recipe.tasks.ner.baselines import WordTags, tag_baselines
from bert_recipe.tasks.ner.files import (
    ROW_FORMATS,
    Sentence,
    SentenceForm,
    find_form,
    read_sentences,
)
from bert_recipe.tasks.ner.options import TokenClassificationOptions
from bert_recipe.tasks.ner.scores import accuracy, entity_scores
from bert_recipe.tasks.ner.tags import Entity, TagForm, entities, has_classes, tags_of, types_of
from bert_recipe.tasks.ner.token_labels import TaggedDataset, are_segmented
from bert_recipe.tasks.own_files import MAX_SEQ_LENGTH
from bert_recipe.tasks.predicted_rows import PredictedRows, Prediction, write_predicted
from bert_recipe.tasks.splits import Split
from bert_recipe.tasks.task import Number, PredictionSet, SeparableTask
from bert_recipe.utils.errors import UserError, listed, one_line
from bert_recipe.utils.files import write_atomically
from bert_recipe.utils.json_files import JsonObject
from bert_recipe.utils.output_tables import encode_table, names_like, quoted_lines
from bert_recipe.utils.progress import print_line, print_once
from bert_recipe.utils.tables import Row, read_rows
from bert_recipe.utils.text_files import TextFile, kind_of, table_parts

if TYPE_CHECKING:
    from bert_recipe.tokenization.tokenizer import Tokenizer

PREDICTED, COLUMNS_FILE = "predictions", "predictions.tsv"
SCORED_FILE = "eval_predictions.tsv"
SCORED_COLUMNS = ("word", "tag", "prediction", "probability")
SCORED_TEXTS = "eval_predictions.jsonl"  # texts with entities, whose tokens differ between models
NO_BREAKS = str.maketrans("\t\r\n", "   ")  # columns of words have no quoting
UNNAMED = re.compile(r"LABEL_\d+")  # transformers' names of classes that have none


@dataclass(frozen=True)
class TokenClassificationTask(FineTuningTask, SeparableTask):
    """Predicts a tag per word, or entities in texts. See TaggedDataset for the tokens that have
    labels.

    label_all_tokens: not only the first one of each word, as learnt from texts, and from words of
        scripts without spaces.
    form: of the files, once it is known.
    word_tags_of_training: what the baseline learns from.
    guessing_loss, first_outputs: see Task. A new output layer begins at the tags' shares.
    """

    options: TokenClassificationOptions
    max_seq_length: int = MAX_SEQ_LENGTH
    labels: tuple[str, ...] = ()
    label_all_tokens: bool = False
    form: SentenceForm | None = None
    split: Split | None = None
    guessing_loss: float | None = None
    first_outputs: FirstOutputs | None = None
    word_tags_of_training: WordTags | None = field(default=None, compare=False, repr=False)

    name = "ner"
    head = "token_classification"
    logits_axis = "token"
    defaults_kind = "words"
    counted = "sentences or parts of long ones"
    result_files = (*names_like(PREDICTED), SCORED_FILE, SCORED_TEXTS)

    @property
    def has_classes(self) -> bool:
        """Whether each word has a class, such as its part of speech."""
        return has_classes(self.labels)

    @property
    def score_names(self) -> tuple[str, ...]:
        return ("accuracy",) if self.has_classes else self.options.score_names

    @property
    def initial_loss(self) -> float | None:
        return self.guessing_loss

    def sums(self, model: nn.Module, micro_batch: MicroBatch) -> dict[str, Tensor]:
        logits_TC = model(TokenStream.from_batch(micro_batch, self.max_seq_length)).logits
        loss, correct = summed_cross_entropy(
            logits_TC, micro_batch["tags"], label_smoothing=self.options.label_smoothing
        )
        return {"loss": loss, "correct": correct}

    def loss(self, sums: Mapping[str, Number], counts: BatchCounts) -> Number:
        return sums["loss"] / counts.labelled_tokens

    def metrics(self, sums: dict[str, float], counts: BatchCounts) -> dict[str, float]:
        accuracy = sums["correct"] / counts.labelled_tokens
        return {"loss": self.loss(sums, counts), "accuracy": accuracy}

    def configure(self, config: ModelConfig) -> ModelConfig:
        label_all_tokens = True if self.label_all_tokens else None
        return replace(super().configure(config), label_all_tokens=label_all_tokens)

    @classmethod
    def learning(
        cls,
        options: TokenClassificationOptions,
        tokenizer: "Tokenizer",
        start: Path | None = None,
        split: Split | None = None,
    ) -> tuple["TokenClassificationTask", TaggedDataset]:
        form = form_of(options)
        path = options.training_file
        sentences = read_file(path, True, options, form)
        has_texts = any(sentence.text is not None for sentence in sentences)
        label_all_tokens = has_texts or are_segmented(sentences)
        tags = learnt_tags(sentences, label_all_tokens)
        if len(tags) < 2:
            raise UserError(f"{path}: all tags are {tags.pop()!r}: there must be at least two")
        labels = tuple(sorted(tags, key=lambda tag: (tag != "O", tag)))
        length = options.max_seq_length
        untrained = cls(options, length, labels)
        options.check_metric(untrained.score_names)
        kinds = sorted(untrained.kinds_of(labels))
        check_spelling(path, kinds)
        if form.tags.pattern is None:
            what = "entities of"
            if untrained.has_classes:
                what = f"each word has one of {len(kinds)} classes"
            print_once(f"note: {one_line(f'{path}: {what}: {listed(kinds, 30)}')}")
        if split is not None:
            is_held_out = untrained.held_out(sentences, split)
            sentences = list(itertools.compress(sentences, ~is_held_out))
        dataset = TaggedDataset(sentences, tokenizer, length, labels, label_all_tokens)
        warn_of_unreachable(path, dataset)
        tag_ids = dataset.labels["tags"]
        counts = np.bincount(tag_ids[tag_ids != IGNORED_LABEL], minlength=len(labels))
        guessing_loss = constant_loss(counts / counts.sum(), smoothing=options.label_smoothing)
        has_scores = options.eval_file is not None or split is not None
        word_tags = WordTags.draw(dataset) if options.baseline and has_scores else None
        log_shares = np.log(counts.clip(min=1) / counts.sum())
        first_outputs = (tuple(log_shares.tolist()), 1.0)
        parts = (split, guessing_loss, first_outputs, word_tags)
        task = cls(options, length, labels, label_all_tokens, form, *parts)
        return task, dataset

    @classmethod
    def fine_tuned(
        cls,
        options: TokenClassificationOptions,
        max_seq_length: int,
        config: ModelConfig,
        folder: Path,
    ) -> "TokenClassificationTask":
        form = TagForm.of(config.labels)
        predicts = f"{folder} does not predict tags such as B-PER, but"
        if not config.labels:
            raise UserError(f"{predicts} no classes: fine-tune it")
        labels = []
        for label in config.labels:
            tag = None if UNNAMED.fullmatch(label) else form.read(label)
            if tag is None:
                raise UserError(f"{predicts} {[label]}: fine-tune it")
            labels.append(tag)
        return cls(options, max_seq_length, tuple(labels), bool(config.label_all_tokens))

    def kinds_of(self, labels: Collection[str]) -> set[str]:
        """The types of entities in `labels`, or the classes."""
        return set(labels) if self.has_classes else types_of(labels)

    def counts_of(self, sentences: Sequence[Sentence]) -> Counter[str]:
        """The number of entities of each type, or of words of each class."""
        if self.has_classes:
            return Counter(tag for sentence in sentences for tag in sentence.tags)
        return Counter(kind for sentence in sentences for kind, _, _ in sentence.entities)

    def held_out(self, sentences: list[Sentence], split: Split) -> np.ndarray:
        """Whether each sentence of the training file is for development, [number of sentences]
        booleans. Those of each type of entities, such as LOC, have their share.
        """
        contents = [sentence.content for sentence in sentences]
        types = [tuple(sorted(self.counts_of([sentence]))) for sentence in sentences]
        return split.held_out(contents, types, [sentence.group for sentence in sentences])

    @property
    def scored_files(self) -> tuple[Path, ...]:
        if self.split is not None:
            return (self.options.training_file,)
        return () if self.options.eval_file is None else (self.options.eval_file,)

    def prediction_sets(self, tokenizer: "Tokenizer") -> list[PredictionSet]:
        form = self.form or form_of(self.options)
        sets = [self.scored_set(tokenizer, path, form) for path in self.scored_files]
        if self.options.predict_file is not None:
            sentences = read_file(self.options.predict_file, False, self.options, form)
            dataset = self.dataset(sentences, tokenizer)
            sets.append(PredictionSet(dataset, partial(self.write, dataset), False))
        return sets

    def scored_set(self, tokenizer: "Tokenizer", path: Path, form: SentenceForm) -> PredictionSet:
        sentences = read_file(path, True, self.options, form)
        if self.split is not None:
            sentences = list(itertools.compress(sentences, self.held_out(sentences, self.split)))
        self.check_types(path, sentences)
        dataset = self.dataset(sentences, tokenizer)
        undefined = None if self.counts_of(sentences) else "no sentence has an entity"
        baselines = None
        if self.word_tags_of_training is not None:
            parts = (self.word_tags_of_training, dataset, self.tag_scores, self.has_classes)
            baselines = once(partial(tag_baselines, *parts))
        return PredictionSet(dataset, partial(self.score, dataset), True, undefined, baselines)

    def dataset(self, sentences: Sequence[Sentence], tokenizer: "Tokenizer") -> TaggedDataset:
        """Sentences to predict."""
        return TaggedDataset(
            sentences, tokenizer, self.max_seq_length, label_all_tokens=self.label_all_tokens
        )

    def check_types(self, path: Path, sentences: list[Sentence]) -> None:
        """Warns of types of entities, or classes, in `path` that the model has not learnt; raises
        UserError if it knows none.
        """
        what = "words" if self.has_classes else "entities"
        known = self.kinds_of(self.labels)
        counts = self.counts_of(sentences)
        if unknown := sorted(counts.keys() - known):
            learnt = ", ".join(sorted(known))
            problem = f"{path} has {what} of {listed(unknown)}, and the model has learnt {learnt}"
            if not counts.keys() & known:
                raise UserError(f"{problem}: use a model that was fine-tuned on these types")
            print_once(f"warning: {one_line(problem)}: they count as not found")

    def unit_tags(self, dataset: TaggedDataset, logits_TC: np.ndarray) -> list[list[str]]:
        """The predicted tags of the units of each sentence."""
        label_ids_U = logits_TC[dataset.first_tokens].argmax(axis=1).tolist()
        tags = [self.labels[label_id] for label_id in label_ids_U]  # of all sentences
        tags_of_sentences = []
        start = 0
        for bounds in dataset.bounds:
            stop = start + len(bounds)
            tags_of_sentences.append(tags[start:stop])
            start = stop
        return tags_of_sentences

    def entities(self, dataset: TaggedDataset, tags: list[list[str]]) -> list[set[Entity]]:
        """The entities that the tags of units mark, in words or in characters; or each unit with
        its class.
        """
        marked = []
        for bounds, unit_tags in zip(dataset.bounds, tags, strict=True):
            units = {(tag, at, at + 1) for at, tag in enumerate(unit_tags)}
            spans = units if self.has_classes else entities(unit_tags)
            marked.append({(kind, bounds[a][0], bounds[b - 1][1]) for kind, a, b in spans})
        return marked

    def word_tags(self, sentence: Sentence, predicted_entities: set[Entity]) -> list[str]:
        """The tags of all words, such as ["B-PER", "I-PER", "O"], or their classes, such as
        ["NOUN", "VERB"], where a word without tokens has the first class.
        """
        num_words = len(sentence.words)
        if not self.has_classes:
            return tags_of(predicted_entities, [(word, word + 1) for word in range(num_words)])
        class_of_word = {start: kind for kind, start, _ in predicted_entities}
        return [class_of_word.get(word, self.labels[0]) for word in range(num_words)]

    def score(
        self, dataset: TaggedDataset, logits_TC: np.ndarray, folder: Path | None
    ) -> dict[str, Any]:
        predicted = self.unit_tags(dataset, logits_TC)
        scores = self.tag_scores(dataset, predicted)
        if folder is None:
            return scores
        expected = dataset.unit_tags()
        predicted_entities = self.entities(dataset, predicted)
        if not self.has_classes:
            if not any(predicted_entities):
                scores[WARNING] = f"no entity is predicted in {len(dataset.sentences)} sentences"
            predicted = list(map(tags_of, predicted_entities, dataset.bounds))
        if any(sentence.text is not None for sentence in dataset.sentences):
            write_texts(folder / SCORED_TEXTS, dataset.sentences, predicted_entities)
        logits_UC = logits_TC[dataset.first_tokens].astype(np.float64)
        shares_UC = np.exp(logits_UC - logits_UC.max(axis=1, keepdims=True))
        probability_U = (shares_UC.max(axis=1) / shares_UC.sum(axis=1)).tolist()
        return scores | most_confident(
            write_scored(
                folder / SCORED_FILE,
                dataset,
                expected,
                predicted,
                predicted_entities,
                probability_U,
            )
        )

    def tag_scores(self, dataset: TaggedDataset, predicted: list[list[str]]) -> dict[str, Any]:
        """The scores of the predicted tags of the units of each sentence."""
        expected = dataset.unit_tags()
        predicted_entities = self.entities(dataset, predicted)
        if self.has_classes:
            scores = entity_scores(self.entities(dataset, expected), predicted_entities)
            scores = {"per_class": scores["per_class"]}
        else:
            scores = entity_scores(dataset.entities(), predicted_entities)
            # Of any tags, those that mark the entities that they were read as.
            predicted = list(map(tags_of, predicted_entities, dataset.bounds))
        return {"accuracy": accuracy(expected, predicted)} | scores

    def texts_to_predict(self, tokenizer: "Tokenizer", texts: Sequence[str]) -> PredictedRows:
        dataset = self.dataset([Sentence(text=text) for text in texts], tokenizer)
        return PredictedRows(dataset, partial(self.predictions, dataset))

    def predictions(self, dataset: TaggedDataset, logits_TC: np.ndarray) -> list[Prediction]:
        """Of each text its entities, or words with classes: first character, end, and type; of
        words their tags.
        """
        entities_of = self.entities(dataset, self.unit_tags(dataset, logits_TC))
        predictions = []
        for sentence, marked in zip(dataset.sentences, entities_of, strict=True):
            columns: Row = {"spans": span_rows(marked)}
            if sentence.text is None:
                columns = {"ner_tags": self.word_tags(sentence, marked)}
            predictions.append(Prediction(columns))
        return predictions

    def write(
        self, dataset: TaggedDataset, logits_TC: np.ndarray, folder: Path | None
    ) -> JsonObject:
        if folder is None:
            return {}
        predictions = self.predictions(dataset, logits_TC)
        source = self.options.predict_file
        if source is not None and kind_of(table_parts(source)[0].name)[0] in ROW_FORMATS:
            table_format = self.options.table_format
            rows = []
            for part in table_parts(source):
                rows += [row for _, row in read_rows(TextFile(part, table_format=table_format))]
            write_predicted(folder / PREDICTED, rows, predictions, source, table_format)
            return {}
        path = folder / COLUMNS_FILE
        lines: list[str] = []
        for sentence, prediction in zip(dataset.sentences, predictions, strict=True):
            pairs = zip(sentence.words, prediction.columns["ner_tags"], strict=True)
            lines += [*(f"{word.translate(NO_BREAKS)}\t{tag}" for word, tag in pairs), ""]
        write_atomically(path, "\n".join(lines) + "\n")
        print_line(f"predictions for {len(dataset.sentences)} sentences in {path}")
        return {}


def form_of(options: TokenClassificationOptions) -> SentenceForm:
    """How all files of the task are read together."""
    files = [(options.train_file, True), (options.eval_file, True), (options.predict_file, False)]
    parts = []
    for path, tagged in files:
        if path is not None:
            parts += [(part, tagged) for part in table_parts(path)]
    return find_form(parts, options, options.columns)


def read_file(
    path: Path, tagged: bool, options: TokenClassificationOptions, form: SentenceForm
) -> list[Sentence]:
    """The sentences of a file or of the files that `table_parts` finds. tagged: with their tags."""
    columns = options.columns
    if not tagged:
        columns = columns._replace(tags=None, group=None)
    sentences = []
    for part in table_parts(path):
        sentences += read_sentences(part, tagged, options, columns, form)
    return sentences


def learnt_tags(sentences: Sequence[Sentence], label_all_tokens: bool) -> set[str]:
    """The tags of words, such as {"O", "B-PER"}; with `label_all_tokens` also those of the further
    tokens of entities, such as "I-PER".
    """
    tags: set[str] = set()
    for sentence in sentences:
        tags |= set(sentence.tags)
    if has_classes(tags) or not label_all_tokens:
        return tags
    tags.add("O")
    for sentence in sentences:
        for kind, _start, _stop in sentence.entities:
            tags |= {f"B-{kind}", f"I-{kind}"}
    return tags


def warn_of_unreachable(path: Path, dataset: TaggedDataset) -> None:
    """Warns of entities that the tags of tokens cannot mark."""
    lost = []
    total = 0
    for sentence, bounds, tags in zip(
        dataset.sentences, dataset.bounds, dataset.unit_tags(), strict=True
    ):
        if sentence.text is None:
            continue
        marked = {(kind, bounds[a][0], bounds[b - 1][1]) for kind, a, b in entities(tags)}
        total += len(sentence.entities)
        lost += [sentence.shown_entity(entity) for entity in sentence.entities - marked]
    if lost:
        print_once(
            f"warning: {one_line(str(path))}: {len(lost)} of {total} entities begin or end inside "
            f"a token, such as {lost[0]!r}: their edges cannot be learnt with this vocabulary"
        )


def write_scored(
    path: Path,
    dataset: TaggedDataset,
    expected: list[list[str]],
    predicted: list[list[str]],
    predicted_entities: list[set[Entity]],
    probability_U: list[float],
) -> list[Mistake]:
    """Writes each word, or token of a text, with its tag, the predicted tag and that one's
    probability; returns the sentences with mistakes. expected, predicted: tags of units.
    """
    lines: list[list[str]] = [[*SCORED_COLUMNS], []]
    mistakes = []
    probabilities = iter(probability_U)
    for sentence, bounds, true_tags, predicted_tags, sentence_entities in zip(
        dataset.sentences, dataset.bounds, expected, predicted, predicted_entities, strict=True
    ):
        doubt = 0.0
        for (start, stop), true, tag in zip(bounds, true_tags, predicted_tags, strict=True):
            probability = next(probabilities)
            word = sentence.shown_entity((tag, start, stop))
            lines.append([word, true, tag, repr(probability)])
            if tag != true:
                doubt = max(doubt, probability)
        lines.append([])
        if doubt > 0:
            truth = shown_entities(sentence, sentence.entities)
            prediction = shown_entities(sentence, sentence_entities)
            mistakes.append(Mistake(sentence.shown, truth, prediction, doubt))
    write_atomically(path, quoted_lines(lines, "\t"))
    return mistakes


def span_rows(spans: set[Entity]) -> list[dict[str, Any]]:
    """Entities as rows, in the order of the text."""
    return [
        {"start": start, "end": end, "label": kind}
        for kind, start, end in sorted(spans, key=lambda entity: entity[1:])
    ]


def write_texts(
    path: Path, sentences: Sequence[Sentence], predicted_entities: list[set[Entity]]
) -> None:
    """Writes each text, or words as a text, with its entities and the predicted ones."""
    rows = [
        {
            "text": sentence.shown,
            "entities": span_rows(sentence.in_characters(sentence.entities)),
            "predicted": span_rows(sentence.in_characters(sentence_entities)),
        }
        for sentence, sentence_entities in zip(sentences, predicted_entities, strict=True)
    ]
    write_atomically(path, encode_table(path, rows))


def shown_entities(sentence: Sentence, spans: set[Entity]) -> str:
    ordered = sorted(spans, key=lambda entity: entity[1:])
    return ", ".join(f"{sentence.shown_entity(entity)}: {entity[0]}" for entity in ordered)
