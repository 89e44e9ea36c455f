"""Which versions of DeepSpeed are used: newer ones if their optimizers have the few private
attributes that are read. Runs without DeepSpeed.
"""

from types import SimpleNamespace

import pytest
from conftest import assert_refused
from deepspeed_flags import PRETRAINING, engine_flags
from small_runs import run_here

from bert_recipe.config import deepspeed_config
from bert_recipe.parallel import deepspeed
from bert_recipe.parallel.deepspeed import (
    PRIVATE_1_AND_2,
    PRIVATE_3,
    PRIVATE_BF16,
    check_private_attributes,
)
from bert_recipe.utils.errors import UserError

ADAMW = ("--optimizer", "AdamW")
CASES = [(1, PRIVATE_BF16), (1, PRIVATE_1_AND_2), (2, PRIVATE_1_AND_2), (3, PRIVATE_3)]


@pytest.fixture
def newer(monkeypatch):
    monkeypatch.setattr(deepspeed, "installed_version", lambda: "0.20.1")


@pytest.mark.parametrize(("stage", "names"), CASES)
def test_a_version_with_the_private_attributes_is_used(stage, names, newer):
    check_private_attributes(SimpleNamespace(**dict.fromkeys(names)), stage)


@pytest.mark.parametrize(("stage", "names"), CASES)
def test_one_without_any_of_them_is_refused_with_its_name(stage, names, newer):
    for lacks in names:
        optimizer = SimpleNamespace(**dict.fromkeys(set(names) - {lacks}))
        with pytest.raises(UserError, match=f"DeepSpeed 0.20.1 .* ZeRO stage {stage} .* has no "):
            check_private_attributes(optimizer, stage)


def test_an_optimizer_that_divides_nothing_is_refused(newer):
    """As of DeepSpeed before 0.18.5 at stage 1 in bfloat16: two of its constants are equal."""

    class FP16_UnfusedOptimizer:
        fp16_groups = fp32_groups = ()

    with pytest.raises(UserError, match="its FP16_UnfusedOptimizer has no update_lp_params"):
        check_private_attributes(FP16_UnfusedOptimizer(), 1)


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [
        *((version, True) for version in ("0.19.0", "0.19.8", "0.19.8+cu128")),
        *((version, False) for version in ("0.19.10", "0.19.80", "1.0.0rc1")),
    ],
)
def test_a_version_that_was_not_tested_is_a_note(version, is_tested, monkeypatch):
    monkeypatch.setattr(deepspeed_config.importlib.metadata, "version", lambda _: version)
    note = deepspeed_config.note_on_version()
    assert (note is None) == is_tested
    assert is_tested or f"DeepSpeed {version} was not tested" in note


@pytest.mark.parametrize("version", ["0.9.10", "0.18.0", "0.18.9+cu128"])
def test_a_version_with_wrong_losses_is_refused(version, tmp_path, monkeypatch):
    monkeypatch.setattr(deepspeed_config.importlib.metadata, "version", lambda _: version)
    result = run_here([*PRETRAINING, *engine_flags(tmp_path, {}), *ADAMW])
    assert_refused(result, f"DeepSpeed {version} is too old", "requirements-deepspeed.txt")


def test_zero_1_in_float16_is_refused_where_its_losses_are_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(deepspeed_config.importlib.metadata, "version", lambda _: "0.19.7")
    config = {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}}
    result = run_here([*PRETRAINING, *engine_flags(tmp_path, config), *ADAMW])
    assert_refused(result, "DeepSpeed 0.19.7 gives wrong losses with ZeRO 1 in float16")
