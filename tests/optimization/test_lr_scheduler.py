"""Learning-rate schedules against published values and their formulas."""

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_recipe.config import DECAYS, ScheduleConfig
from bert_recipe.optimization.lr_scheduler import make_schedule
from bert_recipe.training.chosen_settings import count_steps

pytestmark = pytest.mark.fast

TOTALS = st.integers(1, 20_000)
PROPORTIONS = st.floats(0, 1)


def schedule_of(decay, lr, total, warmup_proportion=0.0, **options):
    return make_schedule(ScheduleConfig(lr, decay, warmup_proportion, **options), total)


def whole_updates(proportion: float, total: int) -> int:
    """Of the decimal number that a user types."""
    return math.floor(Decimal(repr(proportion)) * total)


@pytest.mark.parametrize(("proportion", "total"), [(0.29, 100), (0.07, 100), (0.57, 1000)])
def test_the_warmup_has_all_updates_of_its_decimal_share(proportion, total):
    warmup = round(proportion * total)
    for decay in DECAYS:
        if decay not in ("noam", "warmup_exp_decay_exp"):
            schedule = schedule_of(decay, 1.0, total, proportion)
            assert schedule(warmup - 1) == pytest.approx((warmup - 1) / warmup) and (
                schedule(warmup) == 1
            )


def test_epochs_take_the_updates_of_their_decimal_number():
    """1.1 * 100 is 110.00000000000001 in floats."""
    assert [count_steps(-1, 1.1, 10, samples) for samples in (100, 101)] == [11, 12]


@pytest.mark.parametrize(
    ("proportion", "step", "expected"),
    [
        *(
            (0.06, 0, 0.001),
            (0.06, 225, 0.00375),
            (0.06, 450, 0.012),
            (0.06, 1000, 0.009724),
            (0.06, 6149, 0.001996),
        ),
        *((0.02, 150, 0.012), (0.02, 450, 0.010694)),
    ],
)
def test_warmup_exp_decay_exp_matches_the_values_that_deepspeed_publishes(
    proportion, step, expected
):
    schedule = schedule_of(
        "warmup_exp_decay_exp", 11e-3, 7500, proportion, rate=0.90, decay_steps=250, offset=1e-3
    )
    assert schedule(step) == pytest.approx(expected, abs=5e-7)


@given(
    total=TOTALS,
    proportion=PROPORTIONS,
    start_lr=st.floats(0, 1),
    power=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_poly_rises_linearly_to_its_peak_and_falls_as_its_power(total, proportion, start_lr, power):
    lr = 1.5
    warmup = whole_updates(proportion, total)
    schedule = schedule_of("poly", lr, total, proportion, warmup_start_lr=start_lr, power=power)
    assert schedule(0) == pytest.approx(start_lr if warmup else lr)
    if warmup < total:
        assert schedule(warmup) == pytest.approx(lr)
    assert schedule(total) == schedule(total + 10) == 0
    for k in {0, warmup // 2, max(warmup - 1, 0)}:
        if k + 1 < warmup:  # a straight line
            assert schedule(k + 1) - schedule(k) == pytest.approx(
                (lr - start_lr) / warmup, abs=1e-12
            )
    for k in {warmup, (warmup + total) // 2, total - 1}:
        if warmup <= k < total:
            assert schedule(k) == pytest.approx(lr * ((total - k) / (total - warmup)) ** power)


@given(total=TOTALS, warmup=st.floats(0, 0.5), decay=st.floats(0, 0.5))
def test_warmup_stable_decay_is_a_trapezoid_whose_end_falls_with_the_square_root(
    total, warmup, decay
):
    schedule = schedule_of("warmup_stable_decay", 2.0, total, warmup, decay_proportion=decay)
    first = whole_updates(warmup, total)
    last = math.ceil(total - decay * total) - 1  # before the decay
    for k in {first, (first + last) // 2, last}:
        assert not first <= k <= last or schedule(k) == 2.0
    assert all(
        schedule(k) == pytest.approx(2.0 * k / first) for k in range(0, first, max(first // 5, 1))
    )
    if decay * total >= 1:
        assert schedule(total) == 0.0
        quarter = total - decay * total * 3 / 4
        assert schedule(quarter) == pytest.approx(1.0) and schedule(total + 5) == 0.0


@given(total=st.integers(2, 500), proportion=st.floats(0, 0.99), place=st.floats(0, 1))
def test_schedules_of_bmtrain_match_their_formulas(total, proportion, place):
    s = 3e-4
    w = whole_updates(proportion, total)
    e = total
    n = round(place * total)
    warm = n < w
    expected = {
        "noam": s * n / w**1.5 if warm else s / math.sqrt(max(n, 1)),
        "linear": s * n / w if warm else s * (e - n) / (e - w),
        "cosine": s * n / w if warm else s / 2 * (1 + math.cos(math.pi * (n - w) / (e - w))),
        "exponential": s * n / w if warm else s * 0.95 ** (n - w),
        "constant": s * n / w if warm else s,
    }
    for name, value in expected.items():
        rate = schedule_of(name, s, total, proportion, rate=0.95)
        assert rate(n) == pytest.approx(value, abs=1e-18), name


@pytest.mark.parametrize("decay", DECAYS)
@given(total=TOTALS, proportion=PROPORTIONS, place=st.floats(0, 1.2))
def test_schedules_are_finite_and_not_negative(decay, total, proportion, place):
    rate = schedule_of(decay, 1e-3, total, proportion)(round(place * total))
    assert math.isfinite(rate) and 0 <= rate <= 1e-3 * 1.0001


@pytest.mark.parametrize("decay", DECAYS)
def test_warmup_of_the_whole_run_rises_at_every_update(decay):
    rates = [schedule_of(decay, 1.0, 10, 1.0)(k) for k in range(10)]
    assert rates == sorted(rates) and rates[0] == 0
