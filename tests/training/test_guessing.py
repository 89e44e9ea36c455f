"""What training ended at: a loss that is still that of guessing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from glue_runs import own_files, run

from bert_recipe.tasks.baselines import constant_loss
from bert_recipe.tasks.classification.labels import loss_of_guessing
from bert_recipe.tasks.classification.specs import custom_spec


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weights", [None, [0.5, 3.0, 1.0]])
@pytest.mark.parametrize("counts", [[10, 10, 10], [97, 2, 1], [5, 0, 5]])
def test_the_loss_of_guessing_is_the_least_of_equal_outputs(counts, weights, smoothing):
    labels = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    weight = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=500, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        outputs = logits.expand(len(labels), 3)
        options = {"reduction": "sum", "label_smoothing": smoothing}
        total = F.cross_entropy(outputs, labels, weight, **options) / len(labels)
        total.backward()
        return total

    for _ in range(5):
        optimizer.step(loss)
    shares = np.array(counts) / sum(counts)
    expected = constant_loss(shares, None if weights is None else np.array(weights), smoothing)
    assert float(loss().detach()) == pytest.approx(expected, abs=1e-4)


def test_numbers_and_several_labels_have_one_too():
    numbers = custom_spec("t", None, "l", regression=True)
    assert loss_of_guessing(np.array([1.0, 2.0, 6.0]), numbers, (), 0) == pytest.approx(14 / 3)
    spec = replace(custom_spec("t", None, "l", multi_label=True), labels=("a", "b"))
    values = np.array([[1, 0], [1, 1], [0, 0], [1, 0]])
    logits = torch.logit(torch.from_numpy(values.mean(axis=0))).expand(4, 2)
    expected = F.binary_cross_entropy_with_logits(logits, torch.from_numpy(values).double())
    several = loss_of_guessing(values, spec, (), 0)
    assert several == pytest.approx(float(expected))


@pytest.mark.parametrize(("rate", "is_said"), [(1e-7, True), (1e-2, False)])
def test_a_loss_that_is_that_of_guessing_is_said(glue_files, tmp_path, capsys, rate, is_said):
    flags = (*own_files(glue_files, "--do-train"), "--learning-rate", rate)
    assert run(glue_files, tmp_path, *flags) == 0
    assert ("is that of guessing" in capsys.readouterr().out) == is_said
