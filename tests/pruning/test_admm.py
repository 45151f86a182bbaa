"""Mask search by ADMM, against brute force and in a pruning step."""

import itertools
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from fishleg import InverseFisher, PruningOptions, Surgeon
from fishleg.inverse.operators import FullFactor, Gram, Operator
from fishleg.pruning.admm import admm_masks
from fishleg.pruning.compensation import compensate
from fishleg.pruning.patterns import Masks, Unstructured


def correlated(seed: int, n: int = 10) -> tuple[Tensor, Operator]:
    """Weights and a Q in which some weights can replace others."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    F = mixing @ mixing.mT + 0.1 * torch.eye(n, dtype=torch.float64)
    operator = Gram((1, n), FullFactor(n)).double()
    with torch.no_grad():
        operator.factor.matrix.copy_(torch.linalg.cholesky(torch.linalg.inv(F)))
    return torch.randn(1, n, generator=generator, dtype=torch.float64), operator


def loss(w: Tensor, q: Operator, mask: Tensor) -> float:
    return compensate(w, q, ~mask).predicted


@torch.no_grad()
def found_by_admm(w: Tensor, q: Operator, start: Tensor) -> Tensor:
    def choose(scores: Mapping[str, Tensor]) -> Masks:
        return Unstructured().select(scores, 0.6)

    return admm_masks({"w": w}, {"w": q}, {"w": start}, choose, lambda _, mask: ~mask)["w"]


@torch.no_grad()
def test_masks_are_close_to_the_best_of_all() -> None:
    by_score, by_admm = [], []
    for seed in range(20):
        w, q = correlated(seed)
        start = Unstructured().select({"w": w.square() / q.diag()}, 0.6)["w"]
        best = min(
            loss(w, q, torch.zeros(1, 10).index_fill(1, torch.tensor(kept), 1).bool())
            for kept in itertools.combinations(range(10), 4)
        )
        found = found_by_admm(w, q, start)
        assert int(found.sum()) == 4
        by_score.append(loss(w, q, start) / best)
        by_admm.append(loss(w, q, found) / best)
    assert min(by_admm) > 1 - 1e-6  # nothing is better than the best
    assert sum(r < 1 + 1e-6 for r in by_admm) >= 8
    assert sum(by_admm) / 20 < 1.35
    assert sum(by_admm) < 0.6 * sum(by_score)


@torch.no_grad()
def test_independent_weights_go_by_their_size_alone() -> None:
    w = torch.tensor([[3.0, -1.0, 0.5, 2.0, -4.0]], dtype=torch.float64)
    q = Gram((1, 5), FullFactor(5)).double()
    found = found_by_admm(w, q, torch.tensor([[False, True, True, False, False]]))
    assert found.tolist() == [[True, False, False, False, True]]


def surgeon(**options: object) -> Surgeon:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4))
    data = torch.randn(64, 12) @ torch.randn(12, 12)  # correlated inputs
    chosen = PruningOptions(samples=64, relative_damping=0.01, **options)  # type: ignore[arg-type]
    return Surgeon(model, [data], options=chosen, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("method", ["fishleg", "ekfac", "kfac", "obert", "mfac", "diagonal", "sparsegpt"])
def test_every_method_can_have_it(method: str) -> None:
    plain = surgeon(method=method, mask_search_rounds=0)
    q = plain.curvature.estimate()
    masks = plain.pruner.select(q, 0.8, {})
    before = sum(plain.pruner.predict(q, masks).values())
    searching = surgeon(method=method, mask_search="admm")
    found = searching.pruner.search(q, masks, {})
    after = sum(searching.pruner.predict(q, found).values())
    assert sum(int(m.sum()) for m in found.values()) == sum(int(m.sum()) for m in masks.values())
    assert after < 0.97 * before if method != "diagonal" else after <= before


def test_no_weight_comes_back() -> None:
    made = surgeon(mask_search="admm")
    made.prune(0.5)
    before = {name: mask.clone() for name, mask in made.masks.items()}
    made.prune(0.8)
    assert all(not bool((made.masks[name] & ~mask).any()) for name, mask in before.items())
    assert made.sparsity == pytest.approx(0.8, abs=0.01)


def test_worse_masks_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    made = surgeon(mask_search="admm")
    q: InverseFisher = made.curvature.estimate()
    masks = made.pruner.search(q, made.pruner.select(q, 0.8, {}), {})
    worst = {name: ~mask for name, mask in masks.items()}
    monkeypatch.setattr("fishleg.pruning.pruner.admm_masks", lambda *_: worst)
    assert made.pruner.search(q, masks, {}) is masks


def test_alps_is_sparsegpts_q_with_this_search() -> None:
    alps = surgeon(method="alps", pattern="layer")
    same = surgeon(method="sparsegpt", pattern="layer", mask_search="admm")
    alps.prune(0.6)
    same.prune(0.6)
    assert all(torch.equal(alps.masks[name], mask) for name, mask in same.masks.items())
    plain = surgeon(method="sparsegpt", pattern="layer")
    plain.prune(0.6)
    assert any(not torch.equal(plain.masks[name], mask) for name, mask in same.masks.items())
