"""Development samples from the training file, against scikit-learn's stratified folds."""

from collections import Counter

import numpy as np
import pytest
from conftest import VOCAB_FILE
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

from bert_recipe.tasks.classification.files import read_examples
from bert_recipe.tasks.classification.options import ClassificationOptions
from bert_recipe.tasks.classification.specs import custom_spec
from bert_recipe.tasks.classification.task import ClassificationTask
from bert_recipe.tasks.ner.columns import SentenceColumns
from bert_recipe.tasks.ner.files import read_sentences
from bert_recipe.tasks.reading import ReadingOptions
from bert_recipe.tasks.splits import Split
from bert_recipe.tokenization.tokenizer import load_tokenizer
from bert_recipe.utils.errors import UserError

CLASSES = np.repeat(["a", "b", "c", "single"], [50, 13, 4, 1])
LABELS = [(name,) for name in CLASSES]
KEYS = [f"text {row}" for row in range(len(CLASSES))]


def test_folds_hold_out_each_sample_once_and_share_classes_as_scikit_learns():
    folds = [Split(None, 5, 0, fold).held_out(KEYS, LABELS) for fold in range(5)]
    assert (np.sum(folds, axis=0) == 1).all()
    for label in set(CLASSES):
        ours = sorted((CLASSES[fold] == label).sum() for fold in folds)
        with pytest.warns(UserWarning, match="least populated"):
            parts = list(StratifiedKFold(5).split(KEYS, CLASSES))
        theirs = sorted((CLASSES[held_out] == label).sum() for _, held_out in parts)
        assert ours == theirs
    sizes = [fold.sum() for fold in folds]
    assert max(sizes) - min(sizes) <= 1


def test_a_fraction_takes_its_share_of_each_class_and_the_seed_draws_it():
    held_out = Split(0.2, None, 0).held_out(KEYS, LABELS)
    counts = Counter(CLASSES[held_out])
    assert counts["a"] == 10 and counts["b"] in (2, 3) and counts["c"] in (0, 1)
    assert counts["single"] == 0  # nothing would be left to learn
    assert (held_out == Split(0.2, None, 0).held_out(KEYS, LABELS)).all()
    assert (held_out != Split(0.2, None, 1).held_out(KEYS, LABELS)).any()


def test_of_several_labels_each_has_its_share_though_many_sets_are_alone():
    rng = np.random.default_rng(0)
    rates = np.array([0.5, 0.5, 0.4, 0.3, *[0.05] * 12])
    has_NL = rng.random((600, len(rates))) < rates
    labels = [tuple(map(str, np.flatnonzero(row))) for row in has_NL]
    alone = np.array([labels.count(row) == 1 for row in labels])
    assert alone.mean() > 0.2
    held_out = Split(0.2, None, 0).held_out(list(range(600)), labels)
    assert held_out.mean() == pytest.approx(0.2, abs=0.01)
    assert held_out[alone].mean() == pytest.approx(0.2, abs=0.06)
    for column in has_NL.T:
        assert held_out[column].mean() == pytest.approx(0.2, abs=0.1)
    folds = [Split(None, 4, 0, fold).held_out(list(range(600)), labels) for fold in range(4)]
    assert (np.sum(folds, axis=0) == 1).all()
    groups = [str(row // 3) for row in range(600)]
    held_out = Split(0.2, None, 0, group_column="document").held_out([], labels, groups)
    for column in has_NL.T:
        assert held_out[column].mean() == pytest.approx(0.2, abs=0.06)


@pytest.mark.parametrize("num_labelled", [0, 30, 60])
def test_samples_without_labels_such_as_those_of_numbers_are_in_the_shares_of_groups(num_labelled):
    groups = [str(row // 5) for row in range(120)]
    labels = [("x",) if row < num_labelled else () for row in range(120)]
    held_out = Split(0.25, None, 0, group_column="document").held_out([], labels, groups)
    assert abs(held_out.sum() - 30) <= 5
    assert abs(held_out[:num_labelled].sum() - num_labelled / 4) <= 5
    folds = [
        Split(None, 4, 0, fold, "document").held_out([], labels, groups).sum() for fold in range(4)
    ]
    assert sum(folds) == 120 and max(abs(size - 30) for size in folds) <= 5


def test_a_small_share_of_few_samples_is_one():
    for seed in range(20):
        assert Split(0.01, None, seed).held_out(["a", "b", "b", "c"], [("x",)] * 4).sum() in (1, 2)


def test_equal_texts_are_on_one_side():
    keys = [f"text {row // 2}" for row in range(40)]
    held_out = Split(0.25, None, 3).held_out(keys, [("a",)] * 40)
    assert (held_out[::2] == held_out[1::2]).all() and held_out.sum() == 10
    with pytest.raises(UserError, match="holds out none of 2 samples: no label has two different"):
        Split(0.25, None, 3).held_out(["a", "b"], [("x",), ("y",)])


def drawn_groups(seed: int, number: int, largest: int) -> tuple[list[str], list[str]]:
    """Groups of unequal sizes, each with a leaning of its own to classes."""
    rng = np.random.default_rng(seed)
    groups, classes = [], []
    for group in range(number):
        size = rng.integers(1, largest, endpoint=True)
        groups += [f"document {group}"] * size
        classes += rng.choice(["a", "b", "c"], size, p=rng.dirichlet([3, 2, 1])).tolist()
    order = rng.permutation(len(groups))
    return [groups[row] for row in order], [classes[row] for row in order]


def unevenness(folds: list[np.ndarray], classes: list[str]) -> float:
    """The mean deviation of a class's share of a fold, relative to an even one."""
    values = np.array(classes)
    shares = [
        [(values[fold] == name).sum() / (values == name).sum() for fold in folds]
        for name in sorted(set(classes))
    ]
    return float(np.std(shares, axis=1).mean() * len(folds))


@pytest.mark.parametrize(("number", "largest"), [(5, 1), (5, 30), (12, 40), (60, 20), (200, 9)])
def test_groups_are_on_one_side_and_folds_as_even_as_scikit_learns(number, largest):
    ours, theirs = [], []
    for seed in range(8):
        groups, classes = drawn_groups(seed, number, largest)
        folds = [
            Split(None, 5, seed, fold, "document").held_out([], classes, groups)
            for fold in range(5)
        ]
        assert (np.sum(folds, axis=0) == 1).all() and all(fold.any() for fold in folds)
        for fold in folds:
            held_out, trained = (set(np.array(groups)[side]) for side in (fold, ~fold))
            assert not held_out & trained
        ours.append(unevenness(folds, classes))
        if number > 5:
            ids = np.unique(classes, return_inverse=True)[1]
            parts = [part for _, part in StratifiedGroupKFold(5).split(groups, ids, groups)]
            held_out = [np.isin(np.arange(len(groups)), part) for part in parts]
            theirs.append(unevenness(held_out, classes))
    assert not theirs or np.mean(ours) <= 1.1 * np.mean(theirs)


def test_a_share_of_groups_is_about_that_share_of_the_samples_and_the_seed_draws_it():
    groups, classes = drawn_groups(0, 80, 12)
    chosen = []
    for seed in range(5):
        split = Split(0.2, None, seed, group_column="document")
        held_out = split.held_out([], classes, groups)
        assert held_out.mean() == pytest.approx(0.2, abs=0.03)
        for name in "abc":
            is_class = np.array(classes) == name
            assert held_out[is_class].mean() == pytest.approx(0.2, abs=0.06)
        assert not set(np.array(groups)[held_out]) & set(np.array(groups)[~held_out])
        assert (held_out == split.held_out([], classes, groups)).all()
        chosen.append(tuple(held_out))
    assert len(set(chosen)) == 5
    few = ["x"] * 9 + ["y"] * 4
    small = Split(0.01, None, 0, group_column="document").held_out([], ["a"] * 13, few)
    assert small.tolist() == [False] * 9 + [True] * 4  # at least one group, and not all


@pytest.mark.parametrize(
    ("split", "groups", "message"),
    [
        (Split(0.5, None, 0, group_column="d"), ["x"] * 6, "all 6 samples are of the group 'x'"),
        (Split(None, 2, 0, group_column="d"), ["x"] * 6, "all 6 samples are of the group 'x'"),
        (Split(None, 4, 0, 3, "d"), ["x", "y", "z"] * 2, "3 groups are fewer than --num-folds 4"),
        (Split(None, 4, 0, 0, "d"), ["x", "y", "z"] * 2, "give --num-folds 3 or less"),
    ],
)
def test_too_few_groups_are_refused(split, groups, message):
    with pytest.raises(UserError, match=f"--group-column d: .*{message}"):
        split.held_out([], ["a"] * 6, groups)


def test_rows_without_a_group_are_bad_rows(tmp_path):
    skipping = ReadingOptions(skip_bad=True, output_dir=tmp_path)
    table = tmp_path / "a.csv"
    table.write_text("doc,text,label\n7,a,x\n,b,x\n 7 ,c,y\n")
    spec = custom_spec("text", None, "label")
    with pytest.raises(UserError, match=r"a.csv:3: 'doc' is '', expected the name of the row's gr"):
        read_examples(table, spec, True, group_column="doc")
    with pytest.raises(UserError, match="no column 'document'; it has 'doc'"):
        read_examples(table, spec, True, group_column="document")
    examples = read_examples(table, spec, True, reading=skipping, group_column="doc")
    assert examples.groups == ["7", "7"] and examples.texts == ["a", "c"]
    rows = tmp_path / "a.jsonl"
    rows.write_text(
        '{"doc": 1, "tokens": ["A"], "tags": ["B-X"]}\n{"doc": null, "tokens": ["B"], '
        '"tags": ["B-X"]}\n{"doc": "1", "text": "C", "spans": []}\n'
    )
    sentences = read_sentences(rows, True, skipping, SentenceColumns(group="doc"))
    assert [sentence.group for sentence in sentences] == ["1", "1"]
    words = tmp_path / "a.conll"
    words.write_text("A d1 B-X\nb d1 O\n\nC d1 O\nd d2 O\n\nE _ B-X\n\nF d2 B-X\n")
    sentences = read_sentences(words, True, skipping, SentenceColumns(group="2"))
    assert [sentence.group for sentence in sentences] == ["d1", "d2"]
    log = (tmp_path / "skipped_a.conll.log").read_text()
    assert "column 2 has d1, d2 in a sentence" in log and "column 2' is ''" in log


def test_labels_that_only_held_out_groups_have_are_named(tmp_path, capsys):
    rows = "".join(f"{row},{'abc'[row // 4]},{row // 4}\n" for row in range(12))
    (tmp_path / "a.csv").write_text("text,label,document\n" + rows)
    columns = {"text_column": "text", "label_column": ["label"], "group_column": "document"}
    options = ClassificationOptions(
        **columns, train_file=tmp_path / "a.csv", eval_fraction=0.3, seed=0
    )
    ClassificationTask.learning(options, load_tokenizer(VOCAB_FILE), split=options.split())
    output = capsys.readouterr().out
    assert "only held-out groups have" in output and "the model does not learn" in output
