"""Files of other tools: the lines of docs/other_tools.md that convert them."""

import json
import re
import subprocess
import sys
from pathlib import Path

from conftest import ROOT, write_json_lines

from bert_recipe.tasks.classification.files import read_examples
from bert_recipe.tasks.classification.specs import custom_spec
from bert_recipe.tasks.embeddings.files import read_tuples
from bert_recipe.tasks.ner.files import read_sentences

PAGE = (ROOT / "docs/other_tools.md").read_text()
LABELS = custom_spec("text", None, "mood", multi_label=True)


def convert(title: str, folder: Path) -> None:
    """Runs the lines below `title` in `folder`."""
    (code,) = re.findall(rf"## {title}\n.*?```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(code.splitlines()) <= 20
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)


def entities_in(path: Path) -> list[list[tuple[str, str]]]:
    return [
        [(entity[0], sentence.shown_entity(entity)) for entity in sorted(sentence.entities)]
        for sentence in read_sentences(path, True)
    ]


def test_all_titles_of_the_page_are_tried():
    code = Path(__file__).read_text()
    titles = re.findall("^## (.*)$", PAGE, re.MULTILINE)
    assert titles and all(f'convert("{title}"' in code for title in titles)


def test_kaggles_tags(tmp_path):
    rows = 'Sentence #,Word,POS,Tag\nSentence: 1,In,IN,O\n,Iraq,NNP,B-geo\nSentence: 2,"""",``,O\n'
    (tmp_path / "ner_dataset.csv").write_text(rows)
    convert("Kaggle's tags: a sentence in several rows", tmp_path)
    sentences = read_sentences(tmp_path / "train.txt", True)
    assert [[*sentence.words] for sentence in sentences] == [["In", "Iraq"], ['"']]
    assert entities_in(tmp_path / "train.txt") == [[("geo", "Iraq")], []]


def test_entities_of_label_studio(tmp_path):
    """As its export has them: an emoji counts as two, one annotation was skipped, one task is not
    done, and there is a relation.
    """
    span = {"start": 3, "end": 7, "text": "Anna", "labels": ["PER"]}
    done = [{"value": span, "type": "labels"}, {"type": "relation", "from_id": "a", "value": {}}]
    tasks = [
        {"data": {"text": "😀 Anna"}, "annotations": [{"was_cancelled": True}, {"result": done}]},
        {"data": {"text": "left"}, "annotations": [{"result": []}]},
        {"data": {"text": "not done"}, "annotations": []},
    ]
    (tmp_path / "project.json").write_text(json.dumps(tasks))
    convert("Label Studio: entities", tmp_path)
    assert entities_in(tmp_path / "train.jsonl") == [[("PER", "Anna")], []]


def test_classes_of_label_studio(tmp_path):
    result = [{"from_name": "mood", "value": {"choices": ["good", "long"]}}]
    result.append({"from_name": "other", "value": {"choices": ["x"]}})
    tasks = [
        {"data": {"text": "a film"}, "annotations": [{"result": result}]},
        {"data": {"text": "not done"}, "annotations": []},
    ]
    (tmp_path / "project.json").write_text(json.dumps(tasks))
    convert("Label Studio: classes", tmp_path)
    examples = read_examples(tmp_path / "train.jsonl", LABELS, labelled=True)
    assert (examples.texts, examples.label_sets) == (["a film"], [("good", "long")])


def test_lines_of_fasttext(tmp_path):
    (tmp_path / "train.txt").write_text('__label__good "A" film, __label__new\n__label__bad no\n')
    convert("fastText", tmp_path)
    spec = custom_spec("text", None, "label", multi_label=True)
    examples = read_examples(tmp_path / "train.csv", spec, labelled=True)
    assert examples.texts == ['"A" film,', "no"]
    assert examples.label_sets == [("good", "new"), ("bad",)]


def test_judgements_of_beir(tmp_path):
    documents = [{"_id": "d1", "title": "T", "text": "one"}, {"_id": "d2", "text": "two"}]
    write_json_lines(tmp_path / "corpus.jsonl", documents)
    write_json_lines(tmp_path / "queries.jsonl", [{"_id": "q1", "text": "which"}])
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels/train.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td2\t0\n")
    convert("BEIR", tmp_path)
    tuples = read_tuples(tmp_path / "train.jsonl", ["query", "positive"], None)
    assert tuples.originals == ["which", "T one"]


def test_a_folder_of_brat(tmp_path):
    (tmp_path / "brat").mkdir()
    (tmp_path / "brat/a.txt").write_text("😀 Anna left\nOslo.\n")
    annotations = "T1\tPER 2 6\tAnna\nR1\tLives Arg1:T1 Arg2:T2\nT2\tLOC 12 14;15 16\tOs o\n"
    (tmp_path / "brat/a.ann").write_text(annotations)
    convert("brat", tmp_path)
    assert entities_in(tmp_path / "train.jsonl") == [[("LOC", "Os"), ("PER", "Anna")]]
