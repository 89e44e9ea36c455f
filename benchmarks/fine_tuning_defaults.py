#!/usr/bin/env python3
"""Scores of fine-tuning as it comes, on tables of several kinds and sizes, beside other settings of
it, the trainers of transformers and sentence-transformers as they come, and tf-idf.

    python3 benchmarks/fine_tuning_defaults.py --data SHARED_DATA --model minilm=FOLDER \\
        --tables sentiment authors --rows 300 1000 --contestants default trainer tf-idf 16:1e-4:5

A contestant is `default` (no flag but the files), `frozen` (--frozen-encoder), `B:R:E` (this
project with batches of B, the peak rate R and E epochs), `trainer` (batches of 8, 5e-5, 3 epochs,
no warmup) or `tf-idf` (of words, with scikit-learn's logistic regression or ridge; for pairs to
find, its cosines). A seed draws the training rows, and is that of the run; the rows to score are
the same in all runs. Every run goes into the result file as it ends; rerun the command to continue.
SHARED_DATA has the folders glue, squad and books; --entities the files of WNUT 2017.
"""

import contextlib
import csv
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import run_embeddings
import run_glue
import run_ner
import run_squad
from benchmarks.common.results import CPU, RESULTS, benchmark_parser, machine_info
from bert_recipe.checkpoint.progress import GLOBAL_BATCH
from bert_recipe.utils.json_files import read_json, write_json
from bert_recipe.utils.progress import print_line

SIX = {
    "Austen": ("pride-and-prejudice", "sense-and-sensibility"),
    "Dickens": ("bleak-house", "great-expectations"),
    "Twain": ("adventures-of-huckleberry-finn", "the-adventures-of-tom-sawyer"),
    "Tolstoy": ("anna-karenina", "war-and-peace"),
    "Dostoevsky": ("crime-and-punishment", "the-brothers-karamazov"),
    "Bronte": ("jane-eyre", "wuthering-heights"),
}
# What is known of a book: several labels for each of its passages.
TRAITS = {
    "woman": "frankenstein jane-eyre little-women middlemarch pride-and-prejudice "
    "sense-and-sensibility wuthering-heights",
    "translated": "anna-karenina crime-and-punishment don-quixote les-mis-rables "
    "the-brothers-karamazov war-and-peace",
    "narrator": "adventures-of-huckleberry-finn david-copperfield frankenstein great-expectations "
    "jane-eyre moby-dick-or-the-whale the-time-machine treasure-island wuthering-heights",
    "american": "adventures-of-huckleberry-finn little-women moby-dick-or-the-whale "
    "the-adventures-of-tom-sawyer",
}
PASSAGE = 300  # characters

Row = dict[str, Any]
VECTOR_PROGRAMS = (run_glue, run_embeddings)  # with texts that tf-idf can tell apart


@dataclass(frozen=True)
class Table:
    """rows: to draw the training rows from, and those to score. flags: of the columns."""

    program: Any
    rows: Sequence[Any]
    scored: Sequence[Any]
    metric: str
    flags: list[str] = field(default_factory=list)
    ending: str = "csv"


def tab_separated(path: Path, columns: dict[str, int | str]) -> list[Row]:
    """The chosen columns of a file of GLUE, by the names that the table has."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = [line.rstrip("\r\n").split("\t") for line in file]
    header = lines[0]
    has_header = any(isinstance(column, str) for column in columns.values())
    indices = {
        name: header.index(column) if isinstance(column, str) else column
        for name, column in columns.items()
    }
    return [{name: line[index] for name, index in indices.items()} for line in lines[has_header:]]


def passages(books: Path, names: Sequence[str]) -> tuple[list[tuple[str, str]], ...]:
    """(book, passage) of the first four fifths of each book, and of the last fifth."""
    training, scored = [], []
    for name in names:
        paragraphs = (books / f"{name}.txt").read_text(encoding="utf-8").split("\n\n")
        texts = [" ".join(paragraph.split())[:PASSAGE] for paragraph in paragraphs]
        texts = [text for text in texts if len(text) >= PASSAGE // 2]
        end = len(texts) * 4 // 5
        training += [(name, text) for text in texts[:end]]
        scored += [(name, text) for text in texts[end:]]
    return training, scored


def book_table(
    data: Path, names: Sequence[str], label: Callable[[str], str], **options: Any
) -> Table:
    def rows(found: list[tuple[str, str]]) -> list[Row]:
        return [{"text": text, "label": label(name)} for name, text in found]

    training, scored = passages(data / "books", names)
    return Table(run_glue, rows(training), rows(scored), **options)


def traits_of(book: str) -> str:
    return "|".join(name for name, books in TRAITS.items() if book in books.split())


def glue_table(
    folder: Path, columns: dict[str, int | str], metric: str, flags: Sequence[str] = ()
) -> Table:
    parts = [tab_separated(folder / name, columns) for name in ("train.tsv", "dev.tsv")]
    if "pair" in columns:
        flags = [*flags, "--pair-column", "pair"]
    return Table(run_glue, *parts, metric, [*flags])


def sentences_of(path: Path) -> list[str]:
    """The sentences of a file of WNUT 2017, in CoNLL's columns."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = ["\t".join(part.split("\t")[:2]) for part in lines]
    return [block for block in "\n".join(rows).split("\n\n") if block.strip()]


def question_pairs(path: Path) -> list[Row]:
    articles = json.loads(path.read_text(encoding="utf-8"))["data"]
    return [
        {"text": question["question"], "pair": paragraph["context"]}
        for article in articles
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]


def questions(path: Path) -> list[Row]:
    """Each a document of SQuAD's file with one question."""
    articles = json.loads(path.read_text(encoding="utf-8"))["data"]
    return [
        {"title": "", "paragraphs": [{"context": paragraph["context"], "qas": [question]}]}
        for article in articles
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]


def make_table(name: str, data: Path, entities: Path | None) -> Table:
    glue, squad = data / "glue", data / "squad"
    if name == "sentiment":
        return glue_table(glue / "SST-2", {"text": "sentence", "label": "label"}, "accuracy")
    if name == "acceptability":
        return glue_table(glue / "CoLA", {"text": 3, "label": 1}, "accuracy")
    if name == "paraphrases":
        columns: dict[str, int | str] = {
            "text": "#1 String",
            "pair": "#2 String",
            "label": "Quality",
        }
        return glue_table(glue / "MRPC", columns, "accuracy")
    if name == "similarity":
        columns = {"text": "sentence1", "pair": "sentence2", "label": "score"}
        return glue_table(glue / "STS-B", columns, "spearman", ["--regression"])
    if name == "authors":
        books = {book: author for author, pair in SIX.items() for book in pair}
        return book_table(data, list(books), lambda book: books[book], metric="accuracy")
    if name == "books":
        books_there = sorted(path.stem for path in (data / "books").glob("*.txt"))
        return book_table(data, books_there, str, metric="accuracy")
    if name == "traits":
        books_there = sorted({book for books in TRAITS.values() for book in books.split()})
        flags = ["--task-name", "multi-label"]
        return book_table(data, books_there, traits_of, metric="f1_micro", flags=flags)
    if name == "entities" and entities is not None:
        parts = [
            sentences_of(entities / part)
            for part in ("wnut17train.conll", "emerging.test.annotated")
        ]
        return Table(run_ner, *parts, "f1", ending="conll")
    if name == "search":
        parts = [question_pairs(squad / f"{part}-v1.1.json") for part in ("train", "dev")]
        flags = ["--pair-column", "pair"]
        return Table(run_embeddings, *parts, "ndcg_at_10", flags)
    if name == "questions":
        parts = [questions(squad / f"{part}-v1.1.json") for part in ("train", "dev")]
        return Table(run_squad, *parts, "f1", ending="json")
    raise SystemExit(f"error: there is no table {name}, or --entities is missing")


def drawn(rows: Sequence[Any], count: int, seed: int) -> list[Any]:
    order = np.random.default_rng(seed).permutation(len(rows))[:count]
    return [rows[index] for index in order]


def write_rows(path: Path, table: Table, rows: Sequence[Any]) -> None:
    if table.ending == "conll":
        path.write_text("\n\n".join(rows) + "\n", encoding="utf-8")
        return
    if table.ending == "json":
        path.write_text(json.dumps({"version": "1.1", "data": rows}), encoding="utf-8")
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@dataclass(frozen=True)
class Case:
    """One run: what is trained, on what, and how."""

    table: str
    num_rows: int
    model: str
    seed: int
    contestant: str

    def of(self, table: Table, num_scored: int) -> tuple[list[Any], list[Any]]:
        return drawn(table.rows, self.num_rows, self.seed), drawn(table.scored, num_scored, 0)


def run_project(
    case: Case, table: Table, rows: Sequence[Any], scored: Sequence[Any], flags: list[str]
) -> Row:
    """Scores of this project's program."""
    with tempfile.TemporaryDirectory(prefix="defaults_") as work:
        folder = Path(work)
        files = [folder / f"{name}.{table.ending}" for name in ("train", "scored")]
        write_rows(files[0], table, rows)
        write_rows(files[1], table, scored)
        words = ["--do-train", "--do-eval", "--output-dir", str(folder / "out"), *flags]
        words += ["--train-file", str(files[0]), "--seed", str(case.seed)]
        words += ["--num-steps-per-checkpoint", "1000000", "--show-config", "false"]
        eval_flag = "--predict-file" if table.program is run_squad else "--eval-file"
        words += [eval_flag, str(files[1])]
        if table.ending == "csv":
            words += ["--text-column", "text"]
            if "label" in rows[0]:
                words += ["--label-column", "label"]
        if case.contestant == "frozen":
            words.append("--frozen-encoder")
        elif case.contestant != "default":
            batch, rate, epochs = case.contestant.split(":")
            words += ["--train-batch-size", batch, "--learning-rate", rate, "--epochs", epochs]
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = table.program.main([*words, *table.flags])
        if code:
            raise SystemExit(f"error: {case} ended with {code}: {output.getvalue()[-500:]}")
        (run,) = (folder / "out").glob("*/*/scores.json")
        scores = read_json(run, "scores")
        result: Row = {"score": scores[table.metric]}
        for name in ("hyperparameters",):
            record = read_json(run.parent / "run.json", "the record")
            kept = ("--learning-rate", GLOBAL_BATCH, "--max-steps", "--epochs")
            result["chosen"] = {key: value for key, value in record[name].items() if key in kept}
        result["loss"] = last_loss(run.parent / "report.json")
        predictions = run.parent / f"eval_predictions.{table.ending}"
        if table.metric == "accuracy":
            with predictions.open(encoding="utf-8", newline="") as file:
                pairs = [(row["label"], row["prediction"]) for row in csv.DictReader(file)]
            result["right"] = "".join("01"[label == other] for label, other in pairs)
        return result


def last_loss(report: Path) -> float | None:
    """Of training."""
    losses = [
        record["data"]["loss"]
        for line in report.read_text(encoding="utf-8").splitlines()
        if "loss" in (record := json.loads(line.removeprefix("DLLL "))).get("data", {})
        and isinstance(record["data"]["loss"], float)
    ]
    return round(losses[-1], 4) if losses else None


def texts_of(rows: Sequence[Row]) -> list[str]:
    return [row["text"] for row in rows]


def run_tf_idf(table: Table, rows: Sequence[Any], scored: Sequence[Any]) -> Row:
    """Scores of tf-idf of words, with scikit-learn's defaults."""
    from scipy.sparse import hstack
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.metrics import f1_score
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.preprocessing import MultiLabelBinarizer

    vectorizer = TfidfVectorizer(sublinear_tf=True)
    texts = texts_of(rows) + [row["pair"] for row in rows if "pair" in row]
    vectorizer.fit(texts)

    def features(part: Sequence[Row]) -> Any:
        columns = [vectorizer.transform(texts_of(part))]
        if "pair" in part[0]:
            columns.append(vectorizer.transform([row["pair"] for row in part]))
            columns += [columns[0].multiply(columns[1]), abs(columns[0] - columns[1])]
        return hstack(columns).tocsr()

    if table.program is run_embeddings:
        contexts = sorted({row["pair"] for row in scored})
        vectorizer.fit(texts + contexts)
        similar = vectorizer.transform(texts_of(scored)) @ vectorizer.transform(contexts).T
        ranks = [
            int((line > line[contexts.index(row["pair"])]).sum())
            for line, row in zip(similar.toarray(), scored, strict=True)
        ]
        return {"score": float(np.mean([1 / np.log2(r + 2) if r < 10 else 0.0 for r in ranks]))}
    labels, expected = ([row["label"] for row in part] for part in (rows, scored))
    if table.metric == "spearman":
        from scipy.stats import spearmanr

        predicted = Ridge().fit(features(rows), np.float64(labels)).predict(features(scored))
        return {"score": float(spearmanr(predicted, np.float64(expected))[0])}
    if table.metric == "f1_micro":
        names = MultiLabelBinarizer().fit([label.split("|") for label in labels + expected])
        model = OneVsRestClassifier(LogisticRegression(max_iter=1000))
        model.fit(features(rows), names.transform([label.split("|") for label in labels]))
        truth = names.transform([label.split("|") for label in expected])
        score = f1_score(truth, model.predict(features(scored)), average="micro")
        return {"score": float(score)}
    model = LogisticRegression(max_iter=1000).fit(features(rows), labels)
    return with_rows(list(model.predict(features(scored))), expected)


def with_rows(predicted: Sequence[str], expected: Sequence[str]) -> Row:
    """Accuracy, and which rows are right."""
    right = [a == b for a, b in zip(predicted, expected, strict=True)]
    return {"score": float(np.mean(right)), "right": "".join("01"[value] for value in right)}


def run_trainer(
    case: Case, table: Table, model: Path, rows: Sequence[Any], scored: Sequence[Any], length: int
) -> Row:
    """Scores of transformers' Trainer with its default arguments."""
    import torch
    from scipy.stats import spearmanr
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    set_seed(case.seed)
    if table.program is run_ner:
        return run_tagger(case, model, rows, scored, length)
    if table.program is run_embeddings:
        return run_sentence_transformers(case, model, rows, scored, length)
    tokenizer = AutoTokenizer.from_pretrained(model)
    names = sorted({row["label"] for row in [*rows, *scored]})
    options: Row = {"num_labels": len(names)}
    if table.metric == "spearman":
        options = {"num_labels": 1, "problem_type": "regression"}
    if table.metric == "f1_micro":
        names = sorted({name for row in rows for name in row["label"].split("|")})
        options = {"num_labels": len(names), "problem_type": "multi_label_classification"}

    def label_of(row: Row) -> Any:
        if table.metric == "spearman":
            return float(row["label"])
        if table.metric == "f1_micro":
            return [float(name in row["label"].split("|")) for name in names]
        return names.index(row["label"])

    def encoded(part: Sequence[Row]) -> list[Row]:
        return [
            {
                **tokenizer(row["text"], row.get("pair"), truncation=True, max_length=length),
                "labels": label_of(row),
            }
            for row in part
        ]

    classifier = AutoModelForSequenceClassification.from_pretrained(model, **options)
    with tempfile.TemporaryDirectory(prefix="defaults_") as work:
        arguments = TrainingArguments(
            work, seed=case.seed, report_to=[], save_strategy="no", disable_tqdm=True
        )
        trainer = Trainer(
            classifier,
            arguments,
            DataCollatorWithPadding(tokenizer),
            encoded(rows),
            processing_class=tokenizer,
        )
        trained = trainer.train()
        logits = torch.tensor(trainer.predict(encoded(scored)).predictions)
    expected = [row["label"] for row in scored]
    result: Row = {"loss": round(trained.training_loss, 4)}
    if table.metric == "spearman":
        return result | {"score": float(spearmanr(logits[:, 0], np.float64(expected))[0])}
    if table.metric == "f1_micro":
        from sklearn.metrics import f1_score

        truth = [label_of(row) for row in scored]
        return result | {"score": float(f1_score(truth, logits > 0, average="micro"))}
    return result | with_rows([names[index] for index in logits.argmax(1)], expected)


def words_and_tags(block: str) -> tuple[list[str], list[str]]:
    pairs = [line.split("\t") for line in block.splitlines() if line.strip()]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def run_tagger(
    case: Case, model: Path, rows: Sequence[str], scored: Sequence[str], length: int
) -> Row:
    """Transformers' Trainer on tags: the first token of a word is labelled, as in its examples."""
    from transformers import (
        AutoModelForTokenClassification,
        AutoTokenizer,
        DataCollatorForTokenClassification,
        Trainer,
        TrainingArguments,
    )

    from bert_recipe.tasks.ner.tags import entities
    from bert_recipe.tasks.ner.task import entity_scores

    tokenizer = AutoTokenizer.from_pretrained(model)
    names = sorted({tag for block in [*rows, *scored] for tag in words_and_tags(block)[1]})

    def encoded(block: str) -> Row:
        words, tags = words_and_tags(block)
        batch = tokenizer(words, is_split_into_words=True, truncation=True, max_length=length)
        ids = batch.word_ids()
        labels = [
            names.index(tags[word]) if word is not None and word != before else -100
            for word, before in zip(ids, [None, *ids], strict=False)
        ]
        return {**batch, "labels": labels}

    tagger = AutoModelForTokenClassification.from_pretrained(model, num_labels=len(names))
    with tempfile.TemporaryDirectory(prefix="defaults_") as work:
        arguments = TrainingArguments(
            work, seed=case.seed, report_to=[], save_strategy="no", disable_tqdm=True
        )
        trainer = Trainer(
            tagger,
            arguments,
            DataCollatorForTokenClassification(tokenizer),
            [encoded(block) for block in rows],
        )
        trained = trainer.train()
        output = trainer.predict([encoded(block) for block in scored])
    found, truth = [], []
    for block, logits, labels in zip(scored, output.predictions, output.label_ids, strict=True):
        tags = words_and_tags(block)[1]
        predicted = [names[index] for index in logits[labels != -100].argmax(1)]
        found.append(entities([*predicted, *["O"] * (len(tags) - len(predicted))]))
        truth.append(entities(tags))
    score = entity_scores(truth, found)["f1"]
    return {"loss": round(trained.training_loss, 4), "score": float(score)}


def run_sentence_transformers(
    case: Case, model: Path, rows: Sequence[Row], scored: Sequence[Row], length: int
) -> Row:
    """sentence-transformers' trainer with its default arguments."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    encoder = SentenceTransformer(str(model), device="cpu")
    encoder.max_seq_length = length
    with tempfile.TemporaryDirectory(prefix="defaults_") as work:
        arguments = SentenceTransformerTrainingArguments(
            work, seed=case.seed, report_to=[], save_strategy="no", disable_tqdm=True
        )
        pairs = {name: [row[name] for row in rows] for name in ("text", "pair")}
        trainer = SentenceTransformerTrainer(
            encoder, arguments, Dataset.from_dict(pairs), loss=MultipleNegativesRankingLoss(encoder)
        )
        trained = trainer.train()
    contexts = sorted({row["pair"] for row in scored})
    vectors = [
        encoder.encode(part, normalize_embeddings=True) for part in (texts_of(scored), contexts)
    ]
    ranks = [
        int((line > line[contexts.index(row["pair"])]).sum())
        for line, row in zip(vectors[0] @ vectors[1].T, scored, strict=True)
    ]
    score = float(np.mean([1 / np.log2(r + 2) if r < 10 else 0.0 for r in ranks]))
    return {"loss": round(trained.training_loss, 4), "score": score}


def cases_of(args: Any) -> Iterator[Case]:
    for table in args.tables:
        for num_rows in args.rows:
            for name in args.model:
                for contestant in args.contestants:
                    for seed in range(args.seed, args.seed + args.num_seeds):
                        yield Case(table, num_rows, name.partition("=")[0], seed, contestant)


def main() -> None:
    parser = benchmark_parser(__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with glue, squad and books")
    add("--entities", type=Path, help="folder of WNUT 2017")
    add("--model", action="append", required=True, help="NAME=FOLDER; may be repeated")
    add("--tables", nargs="+", required=True)
    add("--rows", nargs="+", type=int, required=True)
    add("--contestants", nargs="+", required=True)
    add("--seed", type=int, default=1, help="the first seed")
    add("--num-seeds", type=int, default=3)
    add("--max-seq-length", type=int, default=128)
    add("--scored", type=int, default=600, help="rows to score, at most")
    add("--flags", default="", help="more flags of this project's programs, in one word")
    args = parser.parse_args()
    models = dict(name.split("=", 1) for name in args.model)
    path = args.output or RESULTS / "fine_tuning_defaults.json"
    result: Row = {"machine_info": machine_info(CPU), "runs": []}
    if path.is_file():
        result = read_json(path, "results")
    done = {tuple(run[name] for name in KEYS): run for run in result["runs"]}
    for case in cases_of(args):
        flags = args.flags.split()
        key = (*vars(case).values(), args.max_seq_length, args.flags)
        if key in done:
            continue
        table = make_table(case.table, args.data, args.entities)
        rows, scored = case.of(table, args.scored)
        is_left_out = case.contestant == "tf-idf" and table.program not in VECTOR_PROGRAMS
        if len(rows) < case.num_rows or is_left_out:
            continue
        started = time.monotonic()
        folder = Path(models[case.model])
        if case.contestant == "tf-idf":
            found = run_tf_idf(table, rows, scored)
        elif case.contestant == "trainer":
            found = run_trainer(case, table, folder, rows, scored, args.max_seq_length)
        else:
            words = ["--init-checkpoint", str(folder), *flags]
            words += ["--max-seq-length", str(args.max_seq_length)]
            found = run_project(case, table, rows, scored, words)
        found["seconds"] = round(time.monotonic() - started, 1)
        done[key] = dict(zip(KEYS, key, strict=True)) | found
        write_json(path, {**result, "runs": [*done.values()]})
        shown = {name: value for name, value in found.items() if name != "right"}
        print_line(f"{' '.join(map(str, key))}: {shown}")


KEYS = ("table", "num_rows", "model", "seed", "contestant", "max_seq_length", "flags")

if __name__ == "__main__":
    main()
