"""Losses of sentence embeddings against loops in float64, and scores of retrieval by hand."""

import numpy as np
import pytest
import torch
from conftest import VOCAB_FILE, write_json_lines

from bert_recipe.tasks.embeddings.files import TextTuples
from bert_recipe.tasks.embeddings.options import EmbeddingTaskOptions
from bert_recipe.tasks.embeddings.retrieval import mean_scores, nearest, ranking_scores
from bert_recipe.tasks.embeddings.task import EmbeddingTask
from bert_recipe.tokenization.tokenizer import BertTokenizer


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


BATCHES = {  # texts of each sample: an anchor, its positive, hard negatives
    "equal positives and anchors": (
        [[0, 10, 20], [1, 10, 21], [2, 12, 22], [2, 13, 23], [4, 14, 15], [5, 15, 24]]
    ),
    "neighbouring lines": [[0, 1], [1, 2], [2, 3], [3, 4], [7, 8], [8, 9]],
    "the positive of an equal anchor as a hard negative": (
        [[0, 10, 20], [0, 11, 21], [2, 12, 11], [3, 13, 10], [4, 14, 0], [0, 15, 14]]
    ),
    "an anchor of an equal positive, with a further positive": (
        [[0, 10], [1, 10], [1, 11], [3, 11], [10, 0], [5, 5]]
    ),
    "an own hard negative that is the anchor or a positive": (
        [[0, 10, 0], [0, 11, 10], [2, 2, 2], [3, 13, 13], [4, 14, 3], [14, 4, 24]]
    ),
}


@pytest.mark.parametrize("texts", BATCHES.values(), ids=BATCHES)
def test_the_contrastive_loss_is_that_of_a_loop_without_false_negatives(texts):
    vectors = np.random.default_rng(0).normal(size=(6, len(texts[0]), 8))
    pairs = {(row[0], row[1]) for row in texts}

    def forward(i: int, dim: int) -> float:
        anchor, total = vectors[i, 0, :dim], 0.0
        for j, row in enumerate(texts):
            for place in range(1, len(row)):
                is_known = row[place] == texts[i][0] or (texts[i][0], row[place]) in pairs
                if (j, place) == (i, 1) or not is_known:
                    total += np.exp(cosine(anchor, vectors[j, place, :dim]) / 0.05)
        return np.log(total) - cosine(anchor, vectors[i, 1, :dim]) / 0.05

    def backward(i: int, dim: int) -> float:
        positive, total = vectors[i, 1, :dim], 0.0
        for j, (anchor, *_) in enumerate(texts):
            is_known = anchor == texts[i][1] or (anchor, texts[i][1]) in pairs
            if j == i or not is_known:
                total += np.exp(cosine(positive, vectors[j, 0, :dim]) / 0.05)
        return np.log(total) - cosine(positive, vectors[i, 0, :dim]) / 0.05

    for symmetric, dims in ((False, ()), (True, ()), (True, (4, 8))):
        task = EmbeddingTask(EmbeddingTaskOptions(symmetric_loss=symmetric, matryoshka_dims=dims))
        losses = task.losses(torch.from_numpy(vectors), torch.tensor(texts), torch.zeros(6, 1))
        expected = [sum(forward(i, dim) for dim in dims or (8,)) for i in range(6)]
        if symmetric:
            back = [sum(backward(i, dim) for dim in dims or (8,)) for i in range(6)]
            expected = [(a + b) / 2 for a, b in zip(expected, back, strict=True)]
        np.testing.assert_allclose(losses.numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize("name", ["cosent", "cosine"])
def test_losses_of_scored_pairs_are_those_of_a_loop(name):
    vectors = np.random.default_rng(1).normal(size=(7, 2, 8))
    scores = np.array([0.1, 0.5, 0.5, 0.9, 0.0, 1.0, 0.3])
    cosines = [cosine(*pair) for pair in vectors]
    options = {"label_column": ["s"], "embedding_loss": name, "temperature": 0.1}
    task = EmbeddingTask(EmbeddingTaskOptions(**options))
    texts_nk = torch.zeros(7, 2, dtype=torch.int64)
    losses = task.losses(torch.from_numpy(vectors), texts_nk, torch.from_numpy(scores)[:, None])
    pairs = [(i, j) for i in range(7) for j in range(7) if scores[i] < scores[j]]
    expected = [np.log(1 + sum(np.exp((cosines[i] - cosines[j]) / 0.1) for i, j in pairs))] * 7
    if name == "cosine":
        expected = [(a - b) ** 2 for a, b in zip(cosines, scores, strict=True)]
    np.testing.assert_allclose(losses.numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize("count", [1, 3], ids=["a margin", "scores of three negatives"])
def test_margin_mse_is_that_of_sentence_transformers(tmp_path, count):
    """From the file to the loss of the batch."""
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    random = np.random.default_rng(2)
    vectors = torch.from_numpy(random.normal(size=(5, 2 + count, 8)))
    scores = random.normal(size=(5, 1 + count)).round(2)
    labels = scores if count > 1 else scores[:, 0] - scores[:, 1]
    negatives = [f"n{number}" for number in range(count)]
    columns = ["s", "s0", "s1", "s2"]
    columns = columns if count > 1 else ["s"]
    rows = []
    for number, values in enumerate(labels.reshape(5, -1).tolist()):
        texts = {name: f"{name} {number}" for name in ("q", "p", *negatives)}
        rows.append(texts | dict(zip(columns, values, strict=True)))
    path = tmp_path / "train.jsonl"
    write_json_lines(path, rows)
    options = EmbeddingTaskOptions(
        embedding_loss="margin-mse",
        temperature=0.1,
        text_column="q",
        pair_column="p",
        negative_columns=[*negatives],
        label_column=columns,
        train_file=path,
    )
    task, dataset = EmbeddingTask.learning(options, BertTokenizer(VOCAB_FILE))
    stream = dataset.stream(np.array([3, 0, 4, 2, 1]))
    read_nk = torch.from_numpy(stream["scores"].reshape(5, -1).astype(np.float64))
    order = torch.tensor([3, 0, 4, 2, 1])
    ours = task.losses(vectors[order], torch.zeros_like(read_nk), read_nk)

    def scaled_cosines(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cosine_similarity(a, b) / 0.1

    reference = losses.MarginMSELoss(None, similarity_fct=scaled_cosines)
    columns_nE = list(vectors.unbind(dim=1))
    expected = reference.compute_loss_from_embeddings(columns_nE, torch.from_numpy(labels))
    assert float(ours.mean()) == pytest.approx(float(expected), rel=1e-6)


def test_retrieval_scores_are_those_worked_out_by_hand():
    rankings = [range(10), range(10, 20), range(10)]
    relevant = [{0}, {3}, {2, 4, 30}]
    scores = mean_scores(list(map(ranking_scores, rankings, relevant)))
    ndcg = (1 / np.log2(4) + 1 / np.log2(6)) / (1 + 1 / np.log2(3) + 1 / np.log2(4))
    assert scores == pytest.approx(
        {
            "ndcg@10": (1 + ndcg) / 3,
            "mrr@10": (1 + 1 / 3) / 3,
            "recall@1": 1 / 3,
            "recall@10": (1 + 2 / 3) / 3,
        }
    )


def test_a_text_is_not_to_find_itself():
    """Neighbouring lines: each but the first and the last is an anchor and a positive."""
    vectors = np.array([[1.0, 0.0], [0.9, 0.1], [0.6, 0.4], [0.0, 1.0]])
    scores = EmbeddingTask(EmbeddingTaskOptions()).finish(
        TextTuples(list("abcd"), [[0, 1], [1, 2], [2, 3]], None, list("abcd")), vectors, None
    )
    assert (scores["recall@1"], scores["recall@10"]) == (pytest.approx(2 / 3), 1.0)


def test_the_nearest_texts_are_those_of_a_full_sort():
    """Of equal ones, the first one comes first."""
    random = np.random.default_rng(0)
    queries, corpus = random.integers(-2, 3, (1030, 4)), random.integers(-2, 3, (50, 4))
    for count in (1, 7, 60):
        rows = nearest(queries, corpus, count)
        expected = np.argsort(-(queries @ corpus.T), axis=1, kind="stable")[:, :count]
        assert (rows == expected).all()
