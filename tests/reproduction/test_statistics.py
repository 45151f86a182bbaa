"""Means, ranks and numbers for files and messages."""

import pytest
import torch

from reproduction.harness import duration, mean, mean_sem, plain, rank_correlation, spaced, steps_to


def test_numbers_for_json_and_people() -> None:
    assert plain({1: (1 / 3, float("nan"), [float("inf"), True])}) == {"1": [0.333333, None, [None, True]]}
    assert mean([1.0, None]) == float("inf")
    assert mean_sem([1.0, 3.0]) == {"mean": 2.0, "sem": 1.0}
    assert duration(3.14159) == "3.14 s"
    assert duration(600) == "10 min"
    assert spaced(1000, 4) == [1, 10, 100, 1000]


def test_a_goal_counts_once_it_is_kept() -> None:
    assert steps_to(0.1, [1, 0.1, 0.05]) == 2
    assert steps_to(0.1, [1, 0.05, 0.2, 0.1, 0.01], at=[1, 2, 4, 8, 16]) == 8  # it was there before, and left
    assert steps_to(0.1, [0.05, None]) == steps_to(0.1, [0.05, 0.2]) == float("inf")


def test_rank_correlation() -> None:
    def of(x: list[int], y: list[int]) -> float:
        return rank_correlation(torch.tensor(x), torch.tensor(y))

    assert of([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert of([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert of([1, 1, 1], [3, 2, 1]) == 0
    assert of([1, 1, 2], [1, 2, 3]) == pytest.approx(0.75**0.5)  # ranks 1.5, 1.5, 3
