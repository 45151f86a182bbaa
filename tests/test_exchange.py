"""Rounds of exchanges, with a judge that is known."""

import logging
import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from fishleg.pruning.mask_search import exchange
from fishleg.pruning.patterns import Masks, Unstructured

WORTH = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
START = {"w": torch.tensor([True, True, True, False, False, False])}  # the worst choice


def choose(scores: Mapping[str, Tensor]) -> Masks:
    return Unstructured().select(scores, 0.5)


def judge(masks: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Weights that do not know each other."""
    return float(WORTH[~masks["w"]].sum()), {"w": WORTH}


def test_what_is_worth_twice_as_much_changes_places(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fishleg"):
        found = exchange(START, judge, choose, 12)
    assert found["w"].tolist() == [False, False, True, False, True, True]  # 3 · 2 > 4
    assert "2 weights changed places: predicted loss increase 7, was 15" in caplog.text
    assert exchange(START, judge, choose, 0) is START


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["loss", "scores"])
def test_what_is_not_finite_decides_nothing(bad: float, where: str, caplog: pytest.LogCaptureFixture) -> None:
    def broken(masks: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        loss, scores = judge(masks)
        if where == "loss":
            return bad, scores
        return loss, {"w": scores["w"].index_fill(0, torch.tensor(2), bad)}

    assert exchange(START, broken, choose, 12) is START
    assert "not finite" in caplog.text

    def broken_later(masks: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        return judge(masks) if masks is START else broken(masks)

    assert exchange(START, broken_later, choose, 12) is START


def test_a_round_that_does_not_help_is_not_taken() -> None:
    def contrary(masks: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        return -judge(masks)[0], {"w": WORTH}

    assert exchange(START, contrary, choose, 12) is START


@pytest.mark.parametrize(("gain", "rounds"), [(0.1, 12), (0.002, 1)])
def test_rounds_end_when_one_hardly_helps(gain: float, rounds: int) -> None:
    judged = 0

    def slow(masks: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        """Always better, and two other weights are always worth more."""
        nonlocal judged
        judged += 1
        return (1 - gain) ** judged, {"w": torch.where(masks["w"], 1.0, 4.0)}

    exchange(START, slow, choose, 12)
    assert judged == 1 + rounds
