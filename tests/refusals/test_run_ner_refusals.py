"""What run_ner.py refuses, before anything is written."""

import json

from refusal_tables import Refusal, fine_tuning_command, refusals

import run_ner

SPAN = {"start": 0, "end": 4, "label": "PER"}
NESTED = "#\thttp://a.de\t[2009]\n1\tKölner\tB-ORG\tB-LOC\n2\tZoo\tI-ORG\tO\n"
NESTED += "\n1\tAnna\tB-LOC\tO\n"
CONLLU = "1\tAnna\tanna\tPROPN\t_\t_\t0\troot\t_\tSpaceAfter=No\n"
CONLLU += "2\t.\t.\tPUNCT\t_\t_\t0\troot\t_\t_\n"


def train(name: str, content: object, says: str, flags: str = "") -> tuple:
    """A row of a training file."""
    return (f"--do-train --train-file {{folder}}/{name} {flags}", says, {name: content})


def spans(*spans: dict) -> str:
    return json.dumps({"text": "Anna", "spans": spans})


COMMAND_LINES = [
    # Of the other fine-tuning programs.
    *(
        (f"--do-train --train-file t.conll {flag}", f"unrecognized arguments: {flag.split()[0]}")
        for flag in ("--pair-column p", "--decimal ,", "--data-dir d", "--class-weights balanced")
    ),
]
LINES = [
    train("a.conll", "Anna B-PER\nlives\n", ":2: 'lives' does not end in a tag"),
    train("a.conll", "Anna B-PER\rlives O\n", ":1: a carriage return inside the line"),
    train("a.conll", "a B-P\nb\n\ne O\nf\n", "2 bad rows: line 2: 'b' does not end in a tag"),
    train("a.conll", "Anna NNP\n", "all tags are 'NNP'"),
    train("a.conll", "\n\n", "has no sentences"),
    train("a.conll", "Anna O\n", "all tags are 'O'"),
    train("a.csv", "word,tag\nAnna,B-PER\n", "such as O or B-PER: ...give --delimiter ','"),
    *(
        train("a.conll", f"Anna B-PER\nran {mark}\n\nBob B-PER\n", "write O for words that are in")
        for mark in ("_", "-", "0", "NONE")
    ),
    train(
        "a.jsonl",
        '{"tokens": ["Anna", "ran"], "tags": ["B-PER", ""]}',
        "write O for words that are in no entity",
    ),
    # Columns of tags.
    train(
        "a.iob2",
        "1\tAnna\tB-PER\t-\tann\n2\tleft\tO\t-\tann\n",
        "last of its 5 columns has 'ann', which is no tag such as B-PER: say ...--label-column 3",
    ),
    train(
        "a.txt", "New York B-LOC\nis O\n", ":2: ...has 2 columns, and the first word of the file 3"
    ),
    train(
        "a.tsv",
        NESTED,
        "column 3 has tags of LOC, ORG, and column 4 of LOC: choose one with --label-column 3",
    ),
    train(
        "a.tsv",
        NESTED.replace("\tB-LOC\n", "\tO\n"),
        "column 3 has tags of LOC, ORG, and column 4 O only",
    ),
    train("a.conllu", CONLLU, "has remarks: choose one with --label-column, 4 for parts"),
    train(
        "a.conllu",
        "1\tzu\tADP\tO\n2\tZoo\tNOUN\tB-LOC\n\n" * 9 + "Anna\tX\tX\tO\n",
        ":28: ...Anna...does not begin with a number",
    ),
    train(
        "a.tsv",
        NESTED,
        "columns of ...have no names: give the number",
        "--text-column 2 --label-column ner",
    ),
    train("a.tsv", NESTED, "line 2: ...has no column 5", "--label-column 5"),
    train(
        "a.tsv", "Anna\tB-PER\n", "column 2 would have the words and the tags", "--text-column 2"
    ),
]
ROWS = [
    train("a.jsonl", '{"text": "Anna"}', ":1: 'spans' is None"),
    train("a.jsonl", '{"text": " ", "spans": []}', ":1: 'text' is ' '"),
    train("a.jsonl", spans({**SPAN, "end": 5}), ":1: span"),
    train("a.jsonl", spans({**SPAN, "start": True}), ":1: span"),
    train("a.jsonl", spans(SPAN, {**SPAN, "end": 2}), "overlap at character 0"),
    train(
        "a.jsonl",
        '{"tokens": ["a"]}',
        "no column 'tag'; it has 'tokens'",
        "--text-column tokens --label-column tag",
    ),
    train("a.jsonl", '{"tokens": ["Anna"], "ner_tags": [1]}', "give the hub's Parquet file"),
    train("a.jsonl", {"tokens": ["Anna"], "ner_tags": []}, "expected {{"),
    train("a.jsonl", {"tokens": ["Anna"], "tags": ["O", "O"]}, "1 tokens and 2 tags"),
    train(
        "a.jsonl",
        {"data": {"text": "Anna"}, "annotations": []},
        "a.jsonl: this is Label Studio's JSON: convert it as docs/other_tools.md says",
    ),
    train(
        "a.jsonl",
        '{"text": "a", "spans": [], "answer": "reject", "_task_hash": 1}',
        "Prodigy's answer is 'reject': leave the row out",
    ),
]


@refusals(*COMMAND_LINES, *LINES, *ROWS)
def test_run_ner_refuses(refusal: Refusal, inputs, tmp_path):
    refusal.check(run_ner.main, fine_tuning_command(inputs, tmp_path / "output"), tmp_path)
