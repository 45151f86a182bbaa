"""Saliency against brute-force solutions of the same constrained problem."""

import pytest
import torch
from hypothesis import given, settings
from obs_problems import KRONECKER, STRUCTURES, brute_force, problem, small
from operator_makers import Dims

from fishleg.inverse.operators import Diagonal
from fishleg.pruning.saliency import group_saliency, row_saliency, saliency


@pytest.mark.parametrize("name", STRUCTURES)
@settings(max_examples=5)
@given(small)
def test_saliency_is_the_constrained_minimum(name: str, d: Dims) -> None:
    w, q, _ = problem(name, d)
    scores = saliency(w, q).flatten()
    for i in range(q.n):
        single = (torch.arange(q.n) == i).view(q.shape)
        assert float(scores[i]) == pytest.approx(brute_force(w, q.dense(), single)[1], rel=1e-9)


@pytest.mark.parametrize("name", STRUCTURES)
def test_group_saliency_is_the_constrained_minimum(name: str) -> None:
    w, q, _ = problem(name, Dims(3, 2, 2, 3, 5))
    generator = torch.Generator().manual_seed(0)
    groups = torch.stack([torch.randperm(q.n, generator=generator)[:3] for _ in range(5)])
    scores = group_saliency(w, q, groups)
    for group, score in zip(groups, scores, strict=True):
        chosen = torch.zeros(q.n, dtype=torch.bool).index_fill(0, group, True).view(q.shape)
        assert float(score) == pytest.approx(brute_force(w, q.dense(), chosen)[1], rel=1e-9)


def test_group_saliency_beyond_one_chunk() -> None:
    w, q = torch.randn(10_000, 2), Diagonal((10_000, 2))
    groups = torch.arange(20_000).view(-1, 2)
    torch.testing.assert_close(group_saliency(w, q, groups), 0.5 * w.square().sum(1))


@pytest.mark.parametrize("name", [*KRONECKER, "gram-full", "low-rank", "diagonal"])
def test_row_saliency_is_the_constrained_minimum(name: str) -> None:
    w, q, _ = problem(name, Dims(3, 2, 2, 3, 7))
    scores = row_saliency(w, q)
    assert scores.shape == (3,)
    for row, score in enumerate(scores):
        chosen = torch.zeros(q.shape, dtype=torch.bool)
        chosen[row] = True
        assert float(score) == pytest.approx(brute_force(w, q.dense(), chosen)[1], rel=1e-9)
