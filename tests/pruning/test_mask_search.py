"""The search for better masks: its rounds, and its results in a pruning step."""

import copy
import itertools
import logging
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from helpers import QUICK_DIGITS
from torch import Tensor, nn

from fishleg import PruningOptions, Surgeon
from fishleg.pruning.mask_search import search_masks
from fishleg.pruning.patterns import Masks, Unstructured
from fishleg.workloads.digits_net import DigitsNet

WORTH = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


START = {"w": torch.tensor([True, True, True, False, False, False])}  # the worst choice


def choose(scores: Mapping[str, Tensor]) -> Masks:
    return Unstructured().select(scores, 0.5)


def judge(masks: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Weights that do not know each other."""
    return float(WORTH[~masks["w"]].sum()), {"w": WORTH}


def test_weights_of_twice_the_score_change_places(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fishleg"):
        found = search_masks(START, judge, choose, 12)
    assert found["w"].tolist() == [False, False, True, False, True, True]  # 3 · 2 > 4
    assert "swapped 2 weights: predicted loss increase 7, was 15" in caplog.text
    assert search_masks(START, judge, choose, 0) is START


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["loss", "scores"])
def test_scores_that_are_not_finite_change_no_mask(
    bad: float, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(masks: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        loss, scores = judge(masks)
        if where == "loss":
            return bad, scores
        return loss, {"w": scores["w"].index_fill(0, torch.tensor(2), bad)}

    assert search_masks(START, broken, choose, 12) is START
    assert "not finite" in caplog.text

    def broken_later(masks: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        return judge(masks) if masks is START else broken(masks)

    assert search_masks(START, broken_later, choose, 12) is START


def test_a_round_that_does_not_lower_the_loss_is_discarded() -> None:
    def contrary(masks: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        return -judge(masks)[0], {"w": WORTH}

    assert search_masks(START, contrary, choose, 12) is START


@pytest.mark.parametrize(("gain", "rounds"), [(0.1, 12), (0.002, 1)])
def test_rounds_end_when_the_gain_is_small(gain: float, rounds: int) -> None:
    judged = 0

    def slow(masks: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        """Always better, and two other weights are always worth more."""
        nonlocal judged
        judged += 1
        return (1 - gain) ** judged, {"w": torch.where(masks["w"], 1.0, 4.0)}

    search_masks(START, slow, choose, 12)
    assert judged == 1 + rounds


@pytest.mark.parametrize(("pattern", "share"), [("global", 0.97), ("layer", 0.97), ("2:4", 0.995)])
def test_mask_search_lowers_the_predicted_loss(
    pattern: str, share: float, model: DigitsNet, images: Any
) -> None:
    sparsity = 0.5 if pattern == "2:4" else 0.85
    surgeon = Surgeon(model, images, options=PruningOptions(**QUICK_DIGITS, pattern=pattern))
    q = surgeon.curvature.estimate(surgeon.masks)
    first = surgeon.pruner.select(q, sparsity, surgeon.masks)
    better = surgeon.pruner.search(q, first, surgeon.masks)
    counts = [sum(int((~mask).sum()) for mask in masks.values()) for masks in (first, better)]
    assert counts[0] == counts[1]
    assert any(not torch.equal(first[name], better[name]) for name in first)
    before, after = (sum(surgeon.pruner.predict(q, masks).values()) for masks in (first, better))
    assert after < share * before
    plain = Surgeon(
        copy.deepcopy(model),
        images,
        options=PruningOptions(**QUICK_DIGITS, pattern=pattern, mask_search_rounds=0),
    )
    assert all(
        torch.equal(mask, first[name]) for name, mask in plain.pruner.search(q, first, plain.masks).items()
    )
    assert plain.prune(sparsity, inverse=q).predicted == pytest.approx(before)
    assert surgeon.prune(sparsity, inverse=q).predicted == pytest.approx(after)


@pytest.mark.parametrize("options", [{"mask_search_across_layers": False}, {"pattern": "layer"}])
def test_mask_search_within_layers_keeps_their_counts(
    options: dict[str, Any], model: DigitsNet, images: Any
) -> None:
    surgeon = Surgeon(model, images, options=PruningOptions(**options, **QUICK_DIGITS))
    q = surgeon.curvature.estimate(surgeon.masks)
    first = surgeon.pruner.select(q, 0.85, surgeon.masks)
    better = surgeon.pruner.search(q, first, surgeon.masks)
    assert {n: int(m.sum()) for n, m in better.items()} == {n: int(m.sum()) for n, m in first.items()}
    before, after = surgeon.pruner.predict(q, first), surgeon.pruner.predict(q, better)
    assert all(after[name] <= before[name] * 1.0001 for name in first)  # no layer pays for another
    assert sum(after.values()) < 0.97 * sum(before.values())


def test_mask_search_comes_near_the_best_of_all_masks() -> None:
    """Against every choice of half of 14 weights: the search recovers a quarter of the avoidable loss."""
    choices = torch.tensor(list(itertools.combinations(range(14), 7)))
    gap = []
    for seed in range(8):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(7, 2, bias=False))
        mixed = torch.randn(7, 7)
        batches = [torch.randn(64, 7) @ mixed for _ in range(4)]
        surgeon = Surgeon(model, batches, options=PruningOptions(samples=64, floor=0.0))
        q = surgeon.curvature.estimate(surgeon.masks)
        Q, w = q.operator("0").dense().detach(), model[0].weight.detach().flatten()

        def loss(removed: Tensor, Q: Tensor = Q, w: Tensor = w) -> Tensor:
            """½ w_Pᵀ (Q_PP)⁻¹ w_P for each row P of removed weights."""
            block = Q[removed.unsqueeze(-1), removed.unsqueeze(-2)]
            return (w[removed] * torch.linalg.solve(block, w[removed])).sum(-1) / 2

        least, first = loss(choices).min(), surgeon.pruner.select(q, 0.5, surgeon.masks)
        found = [
            (~masks["0.weight"]).flatten().nonzero().T
            for masks in (first, surgeon.pruner.search(q, first, surgeon.masks))
        ]
        gap.append([float(loss(removed) / least - 1) for removed in found])
    before, after = (sum(column) for column in zip(*gap, strict=True))
    assert after < 0.75 * before
    assert all(b <= a + 1e-3 for a, b in gap)
