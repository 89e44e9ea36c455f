"""Folders as --do-eval leaves them, for outputs that are drawn at random."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from conftest import VOCAB_FILE, write_json_lines

from bert_recipe.tasks.classification.options import ClassificationOptions
from bert_recipe.tasks.classification.specs import TASKS, custom_spec
from bert_recipe.tasks.classification.task import ClassificationTask
from bert_recipe.tasks.embeddings.options import EmbeddingTaskOptions
from bert_recipe.tasks.embeddings.task import EmbeddingTask
from bert_recipe.tasks.mistakes import without_mistakes
from bert_recipe.tasks.ner.options import TokenClassificationOptions
from bert_recipe.tasks.ner.task import TokenClassificationTask
from bert_recipe.tasks.squad.options import SquadTaskOptions
from bert_recipe.tasks.squad.task import SquadTask
from bert_recipe.tokenization.tokenizer import BertTokenizer
from bert_recipe.training.evaluation import only_numbers, with_nulls

TOKENIZER = BertTokenizer(VOCAB_FILE)
WORDS = ("sea", "ship", "whale", "captain", "river", "bank", "money", "clerk", "garden", "rose")
TAGS = ("O", "B-PER", "I-PER", "B-LOC")
STARTS = ("O", "B-PER", "B-LOC")
NUM_ROWS = 30


def texts(random: np.random.Generator) -> list[str]:
    """Some are equal."""
    return [" ".join(random.choice(WORDS, random.integers(2, 5))) for _ in range(NUM_ROWS)]


def classes(
    folder: Path, name: str, header: str, labels: tuple[str, ...]
) -> tuple[ClassificationTask, int]:
    """A published task's file, whose columns are texts but for the last, the label."""
    random = np.random.default_rng(0)
    spec = TASKS[name]
    files = spec.evaluation_files(folder)
    for path in files.values():
        count = header.count("\t")
        rows = [
            "\t".join([*random.choice(texts(random), count), random.choice(labels)])
            for _ in range(NUM_ROWS)
        ]
        path.write_text("\n".join([header, *rows]) + "\n")
    options = ClassificationOptions(task_name=name, data_dir=folder, do_eval=True)
    return ClassificationTask(options, spec), max(len(spec.labels), 1)


def custom(folder: Path, labels: list[str], classes: tuple[str, ...], **spec):
    path = folder / "eval.jsonl"
    rows = zip(texts(np.random.default_rng(1)), labels, strict=True)
    path.write_text("".join(json.dumps({"text": t, "label": y}) + "\n" for t, y in rows))
    own = replace(custom_spec("text", None, "label", **spec), labels=classes)
    options = ClassificationOptions(eval_file=path, do_eval=True)
    return ClassificationTask(options, own), max(len(classes), 1)


def custom_classes(folder: Path):
    labels = np.random.default_rng(2).choice(("a", "b", "c d"), NUM_ROWS).tolist()
    return custom(folder, labels, ("a", "b", "c d"))


def multi_label(folder: Path, separator: str = "|"):
    drawn = np.random.default_rng(3).random((NUM_ROWS, 3)) < 0.4
    names = np.array(("a", "b", "c d"))
    labels = [separator.join(names[row]) for row in drawn]
    return custom(
        folder, labels, tuple(names.tolist()), multi_label=True, label_separator=separator
    )


def numbers(folder: Path):
    labels = np.random.default_rng(4).normal(size=NUM_ROWS).round(3).astype(str).tolist()
    return custom(folder, labels, (), regression=True)


def tagged_words(folder: Path):
    random = np.random.default_rng(5)
    blocks = [
        "\n".join(f"{word}\t{random.choice(STARTS)}" for word in text.split())
        for text in texts(random)
    ]
    path = folder / "eval.tsv"
    path.write_text("\n\n".join(blocks) + "\n")
    return TokenClassificationTask(TokenClassificationOptions(eval_file=path), labels=TAGS), len(
        TAGS
    )


def texts_with_entities(folder: Path):
    random = np.random.default_rng(6)
    rows = [
        {"text": text, "spans": [{"start": 0, "end": len(text.split()[0]), "label": kind}]}
        for text, kind in zip(texts(random), random.choice(("PER", "LOC"), NUM_ROWS), strict=True)
    ]
    path = folder / "eval.jsonl"
    write_json_lines(path, rows)
    options = TokenClassificationOptions(eval_file=path)
    return TokenClassificationTask(options, labels=TAGS, label_all_tokens=True), len(TAGS)


def squad(folder: Path):
    random = np.random.default_rng(7)
    paragraphs = []
    for number, text in enumerate(texts(random)):
        start = text.index(" ") + 1
        answers = [{"text": text[start:], "answer_start": start}]
        question = {"id": str(number), "question": "what is it?", "answers": answers}
        paragraphs.append({"context": text, "qas": [question]})
    path = folder / "dev-v1.1.json"
    path.write_text(json.dumps({"version": "1.1", "data": [{"paragraphs": paragraphs}]}))
    return SquadTask(SquadTaskOptions(predict_file=path, do_eval=True)), 2


def pairs(folder: Path, score: str | None = None):
    random = np.random.default_rng(8)
    rows = zip(texts(random), texts(random), random.random(NUM_ROWS).tolist(), strict=True)
    path = folder / "eval.jsonl"
    path.write_text("".join(json.dumps({"q": q, "p": p, "s": s}) + "\n" for q, p, s in rows))
    columns = {"text_column": "q", "pair_column": "p"}
    if score is not None:
        columns["label_column"] = [score]
    return EmbeddingTask(EmbeddingTaskOptions(eval_file=path, **columns)), 8


def similarity(folder: Path):
    return pairs(folder, "s")


KINDS = {
    "MNLI": lambda folder: classes(
        folder, "mnli", "sentence1\tsentence2\tgold_label", TASKS["mnli"].labels
    ),
    "MRPC": lambda folder: classes(folder, "mrpc", "#1 String\t#2 String\tQuality", ("0", "1")),
    "STS-B": lambda folder: classes(folder, "sts-b", "sentence1\tsentence2\tscore", ("1.5", "4")),
    "classes": custom_classes,
    "several labels": multi_label,
    "several labels, other separator": lambda folder: multi_label(folder, "; "),
    "numbers": numbers,
    "words with tags": tagged_words,
    "texts with entities": texts_with_entities,
    "SQuAD": squad,
    "retrieval": pairs,
    "similarity": similarity,
}


def write_run(folder: Path, kind: str, seed: int) -> dict:
    """A run of the task `kind`; its scores as the task computes them."""
    folder.mkdir(parents=True, exist_ok=True)
    task, outputs = KINDS[kind](folder)
    scores = {}
    for number, one in enumerate(task.prediction_sets(TOKENIZER)):
        random = np.random.default_rng((seed, number))
        count = len(one.dataset)
        if task.logits_axis == "token":
            count = int(one.dataset.lengths.sum())
        logits = random.normal(size=(count, outputs))
        scores |= one.finish(logits.astype(np.float32), folder)
    content = without_mistakes(scores) | with_nulls(only_numbers(scores))
    (folder / "scores.json").write_text(json.dumps(content))
    return only_numbers(scores)


def remove_last_row(folder: Path) -> None:
    """Of the rows that a run has scored."""
    (path,) = folder.glob("eval_predictions.*")
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
