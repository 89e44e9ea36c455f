"""What inference.py does with a model, by its head: answers, classes, tags, masked words or
sentence embeddings. Rows are predicted as by `--do-predict` (see predicted_rows.py).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from bert_recipe.checkpoint.calibration import calibrated
from bert_recipe.checkpoint.model_folder import ModelFolder
from bert_recipe.checkpoint.sentence_folders import EmbeddingSettings
from bert_recipe.model.encoders.config import ModelConfig
from bert_recipe.tasks.classification.frozen import FrozenEncoder
from bert_recipe.tasks.classification.options import CUSTOM, MULTI_LABEL, ClassificationOptions
from bert_recipe.tasks.classification.task import ClassificationTask
from bert_recipe.tasks.embeddings.options import EmbeddingTaskOptions
from bert_recipe.tasks.embeddings.task import texts_to_embed
from bert_recipe.tasks.fine_tuning import FineTuningOptions
from bert_recipe.tasks.masked_words import masked_rows
from bert_recipe.tasks.ner.options import TokenClassificationOptions
from bert_recipe.tasks.ner.task import TokenClassificationTask
from bert_recipe.tasks.predicted_rows import PredictedRows
from bert_recipe.tasks.squad.options import SquadOptions, SquadTaskOptions
from bert_recipe.tasks.squad.task import questions_to_predict
from bert_recipe.tokenization.tokenizer import Tokenizer
from bert_recipe.utils.errors import UserError
from bert_recipe.utils.tables import Row

MASKS = "masked_lm"


class Request(NamedTuple):
    """A model, and what the flags ask of it.

    options: of answers; `max_seq_length` also of other texts.
    has_pairs: whether rows have a second text.
    prompt_name: of embeddings.
    """

    config: ModelConfig
    folder: ModelFolder
    tokenizer: Tokenizer
    options: SquadOptions
    has_pairs: bool
    prompt_name: str | None


class Predictor(NamedTuple):
    """How a model predicts rows.

    head: a key of model/encoders/registry.py's MODELS.
    config: of the model to load.
    logits_axis: see FineTuningTask.
    rows: from their places, for errors, and what they have: the strings `text` and maybe `pair`, or
        `question` and `context`.
    logits_of: see FineTuningTask.
    """

    head: str
    config: ModelConfig
    logits_axis: str
    rows: Callable[[list[str], list[Row]], PredictedRows]
    logits_of: Callable[[np.ndarray], np.ndarray] = np.asarray


def answers(request: Request) -> Predictor:
    def rows(places: list[str], rows: list[Row]) -> PredictedRows:
        for place, row in zip(places, rows, strict=True):
            if not (row["question"] or row["context"]):  # an empty row of a table
                continue
            for name, what in (("question", "question"), ("context", "passage")):
                if not len(request.tokenizer.encode(row[name])):
                    raise UserError(f"{place}: the {what} has no words: give a text")
        return questions_to_predict(request.tokenizer, rows, request.options)

    return Predictor("question_answering", request.config, "token", rows)


def classes(request: Request) -> Predictor:
    config = request.config
    options = ClassificationOptions(
        task_name=MULTI_LABEL if config.multi_label else CUSTOM,
        text_column="text",
        pair_column="pair" if request.has_pairs else None,
        regression=config.is_number,
    )
    length = request.options.max_seq_length
    task = ClassificationTask.fine_tuned(options, length, config, request.folder.path)

    def rows(places: list[str], rows: list[Row]) -> PredictedRows:
        return task.rows_to_predict(request.tokenizer, rows)

    def logits_of(outputs: np.ndarray) -> np.ndarray:
        return calibrated(task.logits_of(outputs), request.folder.path)

    return Predictor(task.head, task.configure(config), task.logits_axis, rows, logits_of)


def tags(request: Request) -> Predictor:
    task = TokenClassificationTask.fine_tuned(
        TokenClassificationOptions(),
        request.options.max_seq_length,
        request.config,
        request.folder.path,
    )

    def rows(places: list[str], rows: list[Row]) -> PredictedRows:
        return task.texts_to_predict(request.tokenizer, [row["text"] for row in rows])

    return Predictor(task.head, request.config, task.logits_axis, rows)


def masked_words(request: Request) -> Predictor:
    def rows(places: list[str], rows: list[Row]) -> PredictedRows:
        predicted = masked_rows(request.tokenizer, places, [row["text"] for row in rows])
        maximum = request.options.max_seq_length
        # They are not cut, because a mask may be behind the cut.
        for place, length in zip(places, predicted.dataset.lengths, strict=True):
            if length > maximum:
                raise UserError(
                    f"{place}: the text has {length} tokens, and at most {maximum} are possible: "
                    "shorten it"
                )
        return predicted

    return Predictor(MASKS, request.config, "token", rows)


def embeddings(request: Request) -> Predictor:
    """As the folder's sentence-transformers files say, or as their default: mean, not
    normalized.
    """
    settings = EmbeddingSettings.read(request.folder.path)
    name = request.prompt_name
    if name is not None and not settings.prompts.get(name):
        names = [known for known, text in settings.prompts.items() if text]
        raise UserError(
            f"--prompt-name {name}: {request.folder.path} has {', '.join(names) or 'no prompts'}: "
            f"give another, or leave it out"
        )
    prompted = partial(settings.prompted, name)

    def rows(places: list[str], rows: list[Row]) -> PredictedRows:
        texts = [{field: prompted(text) for field, text in row.items()} for row in rows]
        return texts_to_embed(request.tokenizer, texts, settings, request.options.max_seq_length)

    config = replace(request.config, embedding_pooling=settings.pooling)
    return Predictor("sentence_embedding", config, "sequence", rows)


class Head(NamedTuple):
    """flags: of inference.py that it takes.
    max_length: see FineTuningOptions.fine_tuned_length.
    """

    flags: tuple[str, ...]
    max_length: Callable[[ModelConfig, ModelFolder], int]
    predictor: Callable[[Request], Predictor]


LENGTH = FineTuningOptions.fine_tuned_length
QUESTIONS = ("question", "context", "question_column", "context_column")
TEXTS = ("text", "text_column")
PAIRS = (*TEXTS, "text_pair", "pair_column")
EMBEDDINGS = Head(
    (*TEXTS, "pair_column", "embed", "prompt_name"),
    EmbeddingTaskOptions.fine_tuned_length,
    embeddings,
)
# Those whose head tells what a model is for; any encoder embeds texts.
HEADS = {
    "question_answering": Head(
        (*QUESTIONS, "doc_stride", "max_answer_length", "version_2_with_negative", "n_best_size"),
        SquadTaskOptions.fine_tuned_length,
        answers,
    ),
    "sequence_classification": Head((*PAIRS, "n_best_size"), LENGTH, classes),
    "token_classification": Head(TEXTS, LENGTH, tags),
    MASKS: Head(("fill_mask", "text_column", "n_best_size"), LENGTH, masked_words),
}
CLASSES = HEADS["sequence_classification"]


def heads_in(folder: ModelFolder, config: ModelConfig) -> dict[str, Head]:
    """The heads in `folder`, by the names of their models."""
    import torch

    from bert_recipe.checkpoint.weights import has_head
    from bert_recipe.model.encoders.registry import make_model

    if FrozenEncoder.read(folder.path) is not None:
        return {"classifier of vectors": CLASSES}
    config = replace(config, tie_word_embeddings=True)
    heads = {}
    for name, head in HEADS.items():
        with torch.device("meta"):  # for the names of its weights
            model = make_model(name, config)
        if has_head(model, folder.tensors):
            heads[model.architecture] = head
    # ModernBERT's classifiers of texts and of tokens have the same tensors.
    named = {name: head for name, head in heads.items() if name == folder.architecture}
    return named or heads
