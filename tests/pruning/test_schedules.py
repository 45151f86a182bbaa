"""Schedules rise and end exactly at their target."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fishleg import schedule
from fishleg.pruning.schedules import check_sparsities

KINDS = ("exponential", "cubic", "linear")


targets = st.tuples(st.floats(0.0, 0.4), st.floats(0.5, 0.99), st.integers(1, 20))


@pytest.mark.parametrize("kind", KINDS)
@given(targets)
def test_schedules_rise_and_end_at_the_target(kind: str, drawn: tuple[float, float, int]) -> None:
    start, target, steps = drawn
    values = schedule(kind, target, steps, start=start)
    assert len(values) == steps
    assert values[-1] == target
    assert values[0] > start
    assert check_sparsities(values) == values


@given(targets)
def test_exponential_shrinks_by_the_same_factor(drawn: tuple[float, float, int]) -> None:
    start, target, steps = drawn
    kept = [1 - start, *(1 - value for value in schedule("exponential", target, steps, start=start))]
    ratio = ((1 - target) / (1 - start)) ** (1 / steps)
    assert [b / a for a, b in pairwise(kept)] == pytest.approx([ratio] * steps)


def test_other_schedules_by_hand() -> None:
    assert schedule("linear", 0.8, 4) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert schedule("linear", 0.8, 3, start=0.5) == pytest.approx([0.6, 0.7, 0.8])
    assert schedule("cubic", 0.8, 2) == pytest.approx([0.7, 0.8])
    assert schedule("cubic", 0.9, 3, start=0.63) == pytest.approx([0.82, 0.89, 0.9])
    assert schedule("one-shot", 0.8, 7) == [0.8]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: schedule("sine", 0.5, 3), "exponential, cubic, linear, one-shot, got 'sine'"),
        (lambda: schedule("linear", 0.5, 0), "at least 1 step, got 0"),
        (lambda: schedule("linear", 1.0, 3), "start < target < 1, got 0.0 and 1.0"),
        (lambda: schedule("linear", 0.4, 3, start=0.5), "start < target < 1, got 0.5 and 0.4"),
        (lambda: check_sparsities([]), "got an empty list"),
        (lambda: check_sparsities([0.5, 1.5]), r"sparsity must be in \(0, 1\), got 1.5"),
        (lambda: check_sparsities([0.5, 0.5]), "sparsities must rise, got 0.5 before 0.5"),
    ],
)
def test_errors(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
