"""Whole rows: the norm that follows loses its place, nothing comes back, and what is left can be cut out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fishleg import (
    FineTuningOptions,
    FishLeg,
    Surgeon,
    attach,
    gradual,
    keep_zeros,
    masks_of,
    prune,
    schedule,
    shrink,
)
from fishleg.pruning.patterns import as_pattern
from fishleg.pruning.schedules import plan_schedule

QUICK: dict[str, Any] = {"samples": 8, "sub_batch": 4, "measure_batches": 1, "batchnorm_batches": 2}


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return [(draw(16, 2, 6, 6), torch.randint(3, (16,), generator=generator)) for _ in range(count)]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3),
    )  # fmt: skip
    with torch.no_grad():
        for norm in (model[1], model[4]):
            norm.bias.normal_()
    return model


def gone(model: nn.Sequential) -> list[Tensor]:
    """The rows of both convolutions that are zero."""
    return [(model[i].weight.flatten(1) == 0).all(1) for i in (0, 3)]


def check_norms(model: nn.Sequential, count: int) -> None:
    """What the norms have lost is what the convolutions have."""
    rows = gone(model)
    assert sum(int(r.sum()) for r in rows) == count
    for i, r in zip((0, 3), rows, strict=True):
        for vector in (model[i].bias, model[i + 1].weight, model[i + 1].bias):
            assert torch.equal(vector == 0, r)


@pytest.mark.parametrize("method", ["fishleg", "magnitude", "kfac"])
def test_a_row_takes_its_place_in_the_norm_along_and_can_be_cut_out(method: str) -> None:
    model = network()
    surgeon = Surgeon(model, batches(), pattern="rows", method=method, **QUICK)
    surgeon.staged([0.25, 0.5])
    check_norms(model, 8)
    x = batches()[0][0]
    small = shrink(model.eval(), x)
    assert torch.allclose(small(x), model(x), atol=1e-5)
    kept = [int((~rows).sum()) for rows in gone(model)]
    assert [small[0].out_channels, small[3].out_channels] == kept
    assert small[7].in_features == 4 * kept[1]


def test_frozen_norms_and_norms_of_several_layers_are_left_alone() -> None:
    model = network()
    for p in model[1].parameters():
        p.requires_grad_(False)
    before = copy.deepcopy(model[1].state_dict())
    Surgeon(model, batches(), pattern="rows", method="magnitude", **QUICK).prune(0.5)
    assert torch.equal(model[1].weight, before["weight"])
    assert torch.equal(model[1].bias, before["bias"])

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Conv2d(2, 4, 3), nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
            self.last = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last((self.norm(self.a(x)) + self.norm(self.b(x))).mean((2, 3)))

    shared = Shared()
    assert Surgeon(shared, batches(), pattern="rows", method="magnitude", **QUICK).norms == {}


def test_norms_stay_zero_while_training_whoever_trains() -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x, y in batches(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    model = network()
    Surgeon(model, batches(), pattern="rows", method="magnitude", **QUICK).prune(0.5)
    assert {"1.weight", "1.bias"} <= masks_of(model).keys()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    keep_zeros(optimizer, model)  # from the zeros alone
    train(model.train(), optimizer)
    check_norms(model, 8)

    for make in (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), FishLeg):
        model = network()
        optimizer = make(model)
        surgeon = Surgeon(model, batches(), pattern="rows", **QUICK)
        attach(surgeon, optimizer, schedule("linear", 0.5, 2), every=1)
        for _ in range(2):
            train(model.train(), optimizer)
        check_norms(model, 8)


@pytest.mark.parametrize("optimizer", ["fishleg", "sgd"])
def test_gradual_with_rows(optimizer: str) -> None:
    model = network()
    surgeon = Surgeon(model, batches(), pattern="rows", **QUICK)
    tuning = FineTuningOptions(optimizer=optimizer, epochs=1, cuts=1)
    gradual(surgeon, [0.25, 0.5], batches(), tuning)
    check_norms(model, 8)
    x = batches()[0][0]
    assert torch.allclose(shrink(model.eval(), x)(x), model(x), atol=1e-5)


def test_masks_of_norms_are_part_of_the_state() -> None:
    surgeon = Surgeon(network(), batches(), pattern="rows", **QUICK)
    surgeon.prune(0.5)
    other = Surgeon(copy.deepcopy(surgeon.model), batches(), pattern="rows", **QUICK)
    other.load_state_dict(surgeon.state_dict())
    assert torch.equal(other.masks["1.bias"], surgeon.masks["1.bias"])
    other.prune(0.75)
    check_norms(other.model, 12)


def test_rows_are_damped_more_and_go_in_more_stages() -> None:
    rows, single = as_pattern("rows"), as_pattern("global")
    assert len(plan_schedule(0.5, rows, "staged", None, "exponential")) == 14
    assert len(plan_schedule(0.5, rows, "gradual", None, "exponential")) == 3
    assert len(plan_schedule(0.5, single, "staged", None, "exponential")) == 3
    assert len(plan_schedule(0.5, rows, "staged", 2, "exponential")) == 2
    gammas = {}
    for damping in (None, 0.1, 0.3):
        surgeon = Surgeon(network(), batches(), pattern="rows", relative_damping=damping, **QUICK)
        surgeon.estimate()
        gammas[damping] = surgeon.gamma
    assert gammas[None] == gammas[0.3] == pytest.approx(3 * gammas[0.1])


def test_a_stage_may_have_no_row_to_remove() -> None:
    """Of sixteen rows each stage would leave 95 %, which is less than one row."""
    sparse = prune(network(), batches(), 0.25, pattern="rows", progress=lambda _: None, **QUICK)
    check_norms(sparse, 4)


def test_norms_over_other_dimensions_and_norms_that_share_are_left_alone() -> None:
    class Sequence(nn.Module):
        """BatchNorm over the time steps, of which there are as many as features."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.inner(x)).mean(1))

    class TwoNorms(nn.Module):
        def __init__(self, *, tied: bool) -> None:
            super().__init__()
            self.conv, self.other = nn.Conv2d(2, 4, 3), nn.Conv2d(2, 4, 3)
            self.a, self.b = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
            self.tied = tied
            if tied:
                self.b.weight, self.b.bias = self.a.weight, self.a.bias
            self.last = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return self.last((self.a(y) + self.b(input=self.other(x) if self.tied else y)).mean((2, 3)))

    steps = [torch.randn(16, 8, 6) for _ in range(3)]
    chosen: dict[str, Any] = {"pattern": "rows", "method": "magnitude", **QUICK}
    assert Surgeon(Sequence(), steps, **chosen).norms == {}
    Surgeon(model := Sequence(), steps, **chosen).prune(0.5)
    assert bool((model.norm.weight != 0).all())
    both = Surgeon(TwoNorms(tied=False), batches(), **chosen).norms
    assert both == {"conv.weight": ["a.weight", "a.bias", "b.weight", "b.bias"]}
    assert Surgeon(TwoNorms(tied=True), batches(), **chosen).norms == {"conv.weight": [], "other.weight": []}
