#!/usr/bin/env python3
"""Scores of fine-tuning as it comes, on tables of several kinds and sizes, beside other settings of
it, the trainers of transformers and sentence-transformers as they come, and tf-idf.

    python3 benchmarks/fine_tuning_defaults.py --data SHARED_DATA --model minilm=FOLDER \\
        --tables sentiment authors --rows 300 1000 --contestants default trainer tf-idf 16:1e-4:5

A contestant is `default` (no flag but the files), `untrained`, `frozen` (--frozen-encoder), `B:R:E`
(this project with batches of B, the peak rate R and E epochs), `trainer` (batches of 8, 5e-5, 3
epochs, no warmup) or `tf-idf` (of words, with scikit-learn's logistic regression or ridge; for
embeddings, its cosines). A seed draws the training rows, and is that of the run; the rows to score
are the same in all runs. Every run goes into the result file as it ends; rerun the command to
continue.
SHARED_DATA has the folders glue, squad and books; --entities the files of WNUT 2017; --published a
checkout of each repository that `benchmarks/common/published_tables.py` names.
"""

import contextlib
import csv
import io
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import run_embeddings
import run_glue
import run_ner
import run_squad
from benchmarks.common.fine_tuning_tables import Row, Table, drawn, make_table, write_rows
from benchmarks.common.published_tables import published_table
from benchmarks.common.results import (
    CPU,
    RESULTS,
    benchmark_parser,
    machine_info,
    read_records,
)
from bert_recipe.checkpoint.progress import GLOBAL_BATCH
from bert_recipe.checkpoint.record import read_record
from bert_recipe.reporting.markdown import markdown_table
from bert_recipe.reporting.paired_scores import MeanScore, compare_scores
from bert_recipe.utils.command_line import REQUIRED, Flag
from bert_recipe.utils.errors import run_main
from bert_recipe.utils.json_files import read_json, write_json
from bert_recipe.utils.progress import print_line

PEERS = ("trainer", "tf-idf")
VECTOR_PROGRAMS = (run_glue, run_embeddings)  # with texts that tf-idf can tell apart


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
        trains = case.contestant != "untrained"
        words = ["--do-eval", "--output-dir", str(folder / "out"), *flags]
        words += ["--show-config", "false"]
        if trains:
            words += ["--do-train", "--train-file", str(files[0]), "--seed", str(case.seed)]
        eval_flag = "--predict-file" if table.program is run_squad else "--eval-file"
        words += [eval_flag, str(files[1])]
        if table.ending == "csv":
            words += ["--text-column", "text"]
            if "label" in rows[0]:
                words += ["--label-column", "label"]
        if case.contestant == "frozen":
            words.append("--frozen-encoder")
        elif trains:
            words += ["--num-steps-per-checkpoint", "1000000"]
        if ":" in case.contestant:
            batch, rate, epochs = case.contestant.split(":")
            words += ["--train-batch-size", batch, "--learning-rate", rate, "--epochs", epochs]
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = table.program.main([*words, *table.flags])
        if code:
            raise SystemExit(f"error: {case} ended with {code}: {output.getvalue()[-500:]}")
        run = next((folder / "out").glob("*/*/scores.json"), None)
        if run is None:  # such as of a run that --steps-this-run ends
            raise SystemExit(f"error: {case} ended without scores: {output.getvalue()[-500:]}")
        scores = read_json(run, "scores")
        result: Row = {"score": scores[table.metric]}
        if table.program is run_squad:
            result["score"] /= 100
        if not trains:
            return result
        kept = ("--learning-rate", GLOBAL_BATCH, "--max-steps", "--epochs")
        values = read_record(run.parent).hyperparameters
        result["chosen"] = {key: value for key, value in values.items() if key in kept}
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
        for record in read_records(report)
        if isinstance(record["data"].get("loss"), float)
    ]
    return round(losses[-1], 4) if losses else None


def spearman(predicted: Any, scored: Sequence[Row]) -> float:
    return float(stats.spearmanr(predicted, [float(row["label"]) for row in scored])[0])


def ndcg(similar: np.ndarray, scored: Sequence[Row], contexts: list[str]) -> float:
    """nDCG at 10 of the contexts, by how similar they are to each of the rows to score."""
    ranks = [
        int((line > line[contexts.index(row["pair"])]).sum())
        for line, row in zip(similar, scored, strict=True)
    ]
    return float(np.mean([1 / np.log2(r + 2) if r < 10 else 0.0 for r in ranks]))


def texts_of(rows: Sequence[Row]) -> list[str]:
    return [row["text"] for row in rows]


def run_tf_idf(table: Table, rows: Sequence[Any], scored: Sequence[Any]) -> Row:
    """Scores of tf-idf of words, with scikit-learn's defaults; of pairs with the cosine of both."""
    from scipy.sparse import csr_matrix, hstack
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.metrics import f1_score
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.preprocessing import MultiLabelBinarizer

    vectorizer = TfidfVectorizer(sublinear_tf=True)
    texts = texts_of(rows) + [row["pair"] for row in rows if "pair" in row]
    vectorizer.fit(texts)

    def columns_of(part: Sequence[Row]) -> list[Any]:
        columns = [vectorizer.transform(texts_of(part))]
        if "pair" in part[0]:
            columns.append(vectorizer.transform([row["pair"] for row in part]))
            products = columns[0].multiply(columns[1])
            columns += [products, abs(columns[0] - columns[1]), csr_matrix(products.sum(axis=1))]
        return columns

    def features(part: Sequence[Row]) -> Any:
        return hstack(columns_of(part)).tocsr()

    if table.program is run_embeddings and table.metric == "spearman":
        products = columns_of(scored)[2]
        return {"score": spearman(np.asarray(products.sum(axis=1)).ravel(), scored)}
    if table.program is run_embeddings:
        contexts = sorted({row["pair"] for row in scored})
        vectorizer.fit(texts + contexts)
        similar = vectorizer.transform(texts_of(scored)) @ vectorizer.transform(contexts).T
        return {"score": ndcg(similar.toarray(), scored, contexts)}
    labels, expected = ([row["label"] for row in part] for part in (rows, scored))
    if table.metric == "spearman":
        predicted = Ridge().fit(features(rows), np.float64(labels)).predict(features(scored))
        return {"score": spearman(predicted, scored)}
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


def trained(
    case: Case, model: Any, collator: Any, rows: list[Row], scored: list[Row]
) -> tuple[float, Any]:
    """The mean loss of transformers' Trainer on encoded rows, and what it predicts for others."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory(prefix="defaults_") as work:
        arguments = TrainingArguments(
            work, seed=case.seed, report_to=[], save_strategy="no", disable_tqdm=True
        )
        trainer = Trainer(model, arguments, collator, rows)
        loss = trainer.train().training_loss
        return round(loss, 4), trainer.predict(scored)


def run_trainer(
    case: Case, table: Table, model: Path, rows: Sequence[Any], scored: Sequence[Any], length: int
) -> Row:
    """Scores of transformers' Trainer with its default arguments."""
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        set_seed,
    )

    set_seed(case.seed)
    if table.program is run_ner:
        return run_tagger(case, model, rows, scored, length)
    if table.program is run_embeddings:
        return run_sentence_transformers(case, table, model, rows, scored, length)
    if table.program is run_squad:
        return run_answers(case, model, rows, scored, length)
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
    collator = DataCollatorWithPadding(tokenizer)
    loss, output = trained(case, classifier, collator, encoded(rows), encoded(scored))
    logits = torch.tensor(output.predictions)
    expected = [row["label"] for row in scored]
    result: Row = {"loss": loss}
    if table.metric == "spearman":
        return result | {"score": spearman(logits[:, 0], scored)}
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
    )

    from bert_recipe.tasks.ner.scores import entity_scores
    from bert_recipe.tasks.ner.tags import entities

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
    collator = DataCollatorForTokenClassification(tokenizer)
    parts = [[encoded(block) for block in part] for part in (rows, scored)]
    loss, output = trained(case, tagger, collator, *parts)
    predicted_entities, true_entities = [], []
    for block, logits, labels in zip(scored, output.predictions, output.label_ids, strict=True):
        tags = words_and_tags(block)[1]
        predicted = [names[index] for index in logits[labels != -100].argmax(1)]
        predicted_entities.append(entities([*predicted, *["O"] * (len(tags) - len(predicted))]))
        true_entities.append(entities(tags))
    score = entity_scores(true_entities, predicted_entities)["f1"]
    return {"loss": loss, "score": float(score)}


def run_answers(
    case: Case, model: Path, rows: Sequence[Row], scored: Sequence[Row], length: int
) -> Row:
    """Transformers' Trainer on windows of passages, decoded as in its example run_qa.py."""
    from transformers import (
        AutoModelForQuestionAnswering,
        AutoTokenizer,
        DataCollatorWithPadding,
    )

    from bert_recipe.tasks.squad.scores import f1

    tokenizer = AutoTokenizer.from_pretrained(model)

    def windows(documents: Sequence[Row]) -> Iterator[tuple[int, Row, list[Any]]]:
        """Document, inputs with the answer, and characters of the tokens that may be one."""
        for index, document in enumerate(documents):
            (paragraph,) = document["paragraphs"]
            (question,) = paragraph["qas"]
            batch = tokenizer(
                question["question"],
                paragraph["context"],
                truncation="only_second",
                max_length=length,
                stride=min(128, length // 2),
                return_overflowing_tokens=True,
                return_offsets_mapping=True,
            )
            answer = question["answers"][0]
            first = answer["answer_start"]
            last = first + len(answer["text"]) - 1
            for row in range(len(batch["input_ids"])):
                pairs = zip(batch["offset_mapping"][row], batch.sequence_ids(row), strict=True)
                bounds = [place if part == 1 else None for place, part in pairs]
                positions = [batch.char_to_token(row, at, 1) for at in (first, last)]
                start, end = (0, 0) if None in positions else positions
                names = ("input_ids", "token_type_ids", "attention_mask")
                inputs = {name: batch[name][row] for name in names}
                yield index, inputs | {"start_positions": start, "end_positions": end}, bounds

    answerer = AutoModelForQuestionAnswering.from_pretrained(model)
    parts = [[*windows(documents)] for documents in (rows, scored)]
    inputs = [[row for _, row, _ in part] for part in parts]
    loss, output = trained(case, answerer, DataCollatorWithPadding(tokenizer), *inputs)
    best = dict.fromkeys(range(len(scored)), (-np.inf, 0, 0))
    for (index, _, bounds), starts, ends in zip(parts[1], *output.predictions[:2], strict=True):
        tops = [np.argsort(logits[: len(bounds)])[-20:] for logits in (starts, ends)]
        for start, end in itertools.product(*tops):
            if start <= end < start + 30 and bounds[start] and bounds[end]:
                score = (starts[start] + ends[end], bounds[start][0], bounds[end][1])
                best[index] = max(best[index], score)
    scores = []
    for index, document in enumerate(scored):
        (paragraph,) = document["paragraphs"]
        predicted = paragraph["context"][best[index][1] : best[index][2]]
        answers = paragraph["qas"][0]["answers"]
        scores.append(max(f1(predicted, answer["text"], False) for answer in answers))
    return {"loss": loss, "score": float(np.mean(scores))}


def run_sentence_transformers(
    case: Case, table: Table, model: Path, rows: Sequence[Row], scored: Sequence[Row], length: int
) -> Row:
    """sentence-transformers' trainer with its default arguments."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import CoSENTLoss, MultipleNegativesRankingLoss

    encoder = SentenceTransformer(str(model), device="cpu")
    encoder.max_seq_length = length
    with tempfile.TemporaryDirectory(prefix="defaults_") as work:
        arguments = SentenceTransformerTrainingArguments(
            work, seed=case.seed, report_to=[], save_strategy="no", disable_tqdm=True
        )
        pairs: Row = {name: [row[name] for row in rows] for name in ("text", "pair")}
        loss: Any = MultipleNegativesRankingLoss(encoder)
        if table.metric == "spearman":
            pairs["score"] = [float(row["label"]) for row in rows]
            loss = CoSENTLoss(encoder)
        trainer = SentenceTransformerTrainer(
            encoder, arguments, Dataset.from_dict(pairs), loss=loss
        )
        outcome = trainer.train()
    if table.metric == "spearman":
        vectors = [
            encoder.encode([row[name] for row in scored], normalize_embeddings=True)
            for name in ("text", "pair")
        ]
        score = spearman((vectors[0] * vectors[1]).sum(axis=1), scored)
        return {"loss": round(outcome.training_loss, 4), "score": score}
    contexts = sorted({row["pair"] for row in scored})
    vectors = [
        encoder.encode(part, normalize_embeddings=True) for part in (texts_of(scored), contexts)
    ]
    score = ndcg(vectors[0] @ vectors[1].T, scored, contexts)
    return {"loss": round(outcome.training_loss, 4), "score": score}


def mean_score(runs: Sequence[Row]) -> float:
    return float(np.mean([run["score"] for run in runs]))


def shown_score(runs: Sequence[Row]) -> str:
    """Mean score in percent, and the mean of the last training losses."""
    if not runs:
        return ""
    text = f"{100 * mean_score(runs):.1f}"
    losses = [run["loss"] for run in runs if run.get("loss") is not None]
    return f"{text} ({np.mean(losses):.3f})" if losses else text


def shown_difference(runs: Sequence[Row], others: Sequence[Row]) -> str:
    """Mean difference of the runs of equal seeds in points with its 95% interval: that of
    compare.py where it is known which rows are right, of one seed over the rows alone; else over
    the seeds.
    """
    other_of = {run["seed"]: run for run in others}
    pairs = [(run, other_of[run["seed"]]) for run in runs if run["seed"] in other_of]
    if not pairs:
        return ""
    differences = np.array([run["score"] - other["score"] for run, other in pairs])
    text = f"{100 * differences.mean():+.1f}"
    if all("right" in run for pair in pairs for run in pair):
        sides = [
            [MeanScore(np.array([*map(int, run["right"])], float)) for run in side]
            for side in zip(*pairs, strict=True)
        ]
        low, high = compare_scores(*sides, same_seeds=True).interval
        half = (high - low) / 2
    elif len(pairs) > 1:
        deviation = differences.std(ddof=1) / np.sqrt(len(pairs))
        half = stats.t.ppf(0.975, len(pairs) - 1) * deviation
    else:
        return f"{text} (one seed)"
    return f"{text} ± {100 * half:.1f}"


def markdown(result: Row) -> str:
    """The table of a result file: score and training loss of each setting and of the peers."""
    groups: dict[tuple, dict[str, list[Row]]] = {}
    for run in result["runs"]:
        key = (run["table"], run["num_rows"], run["model"])
        groups.setdefault(key, {}).setdefault(run["contestant"], []).append(run)
    lines = []
    for key, runs_of in groups.items():
        peers = [runs_of.get(name, []) for name in PEERS]
        for contestant, runs in runs_of.items():
            if contestant in PEERS:
                continue
            shown = [shown_score(runs), *map(shown_score, peers)]
            differences = [shown_difference(runs, peer) for peer in peers]
            lines.append([*map(str, key), contestant, str(len(runs)), *shown, *differences])
    header = ["table", "rows", "model", "settings", "seeds", "here", "Trainer", "tf-idf"]
    return markdown_table([*header, "beside the Trainer", "beside tf-idf"], lines)


def cases_of(args: Any) -> Iterator[Case]:
    for table in args.tables:
        for num_rows in args.rows:
            for name in args.model:
                for contestant in args.contestants:
                    for seed in range(args.seed, args.seed + args.num_seeds):
                        yield Case(table, num_rows, name.partition("=")[0], seed, contestant)


def main() -> None:
    required = None if "--show" in sys.argv else REQUIRED
    several = {"nargs": "+"}
    args = benchmark_parser(
        __doc__,
        Flag("--data", Path, None, "folder with glue, squad and books"),
        Flag("--entities", Path, None, "folder of WNUT 2017"),
        Flag("--published", Path, None, "folder with the repositories of published tables"),
        Flag(
            "--model", str, required, "NAME=FOLDER; may be repeated", options={"action": "append"}
        ),
        Flag("--tables", str, required, "tables to take rows from", options=several),
        Flag("--rows", int, required, "numbers of rows to train on", options=several),
        Flag("--contestants", str, required, "contestants to run", options=several),
        Flag("--seed", int, 1, "the first seed"),
        Flag("--num-seeds", int, 3, "seeds of each"),
        Flag("--max-seq-length", int, 128, "most tokens of a sequence"),
        Flag("--scored", int, 600, "rows to score, at most"),
        Flag("--flags", str, "none", "more flags of this project's programs, in one word"),
        Flag("--show", bool, False, "print the table of the result file, and exit"),
    ).parse_args()
    path = args.output or RESULTS / "fine_tuning_defaults.json"
    result: Row = {"machine_info": machine_info(CPU), "runs": []}
    if path.is_file():
        result = read_json(path, "results")
    if args.show:
        print_line(markdown(result))
        return
    if args.data is None and args.published is None:
        raise SystemExit("error: there are no tables: give --data or --published")
    models = dict(name.split("=", 1) for name in args.model)
    done = {tuple(run[name] for name in KEYS): run for run in result["runs"]}
    for case in cases_of(args):
        flags = [] if args.flags == "none" else args.flags.split()
        key = (*vars(case).values(), args.max_seq_length, args.flags)
        if key in done:
            continue
        if args.published is None:
            table = make_table(case.table, args.data, args.entities)
        else:
            table = published_table(case.table, args.published)
        rows, scored = case.of(table, args.scored)
        is_left_out = case.contestant == "tf-idf" and table.program not in VECTOR_PROGRAMS
        if len(rows) < case.num_rows or is_left_out:
            continue
        started = time.monotonic()
        folder = Path(models[case.model])
        if case.contestant == "tf-idf":
            outcome = run_tf_idf(table, rows, scored)
        elif case.contestant == "trainer":
            outcome = run_trainer(case, table, folder, rows, scored, args.max_seq_length)
        else:
            words = ["--init-checkpoint", str(folder), *flags]
            words += ["--max-seq-length", str(args.max_seq_length)]
            outcome = run_project(case, table, rows, scored, words)
        outcome["seconds"] = round(time.monotonic() - started, 1)
        done[key] = dict(zip(KEYS, key, strict=True)) | outcome
        write_json(path, {**result, "runs": [*done.values()]})
        shown = {name: value for name, value in outcome.items() if name != "right"}
        print_line(f"{' '.join(map(str, key))}: {shown}")


KEYS = ("table", "num_rows", "model", "seed", "contestant", "max_seq_length", "flags")

if __name__ == "__main__":
    run_main(main)
