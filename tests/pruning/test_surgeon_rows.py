"""Pruning of whole rows: the norm that follows loses its entries, and nothing comes back."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import QUICK_ROWS, conv_net_with_norms, image_batches, run_gradually
from torch import Tensor, nn

from fishleg import (
    FineTuningOptions,
    FishLeg,
    PruningOptions,
    Surgeon,
    attach,
    keep_zeros,
    masks_of,
    prune,
    schedule,
    shrink,
)
from fishleg.pruning.patterns import as_pattern
from fishleg.pruning.schedules import plan_schedule


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
def test_a_removed_row_also_removes_its_entry_of_the_norm(method: str) -> None:
    model = conv_net_with_norms()
    surgeon = Surgeon(
        model, image_batches(), options=PruningOptions(**QUICK_ROWS, pattern="rows", method=method)
    )
    for sparsity in (0.25, 0.5):
        surgeon.prune(sparsity)
    check_norms(model, 8)
    x = image_batches()[0][0]
    small = shrink(model.eval(), x)
    assert torch.allclose(small(x), model(x), atol=1e-5)
    kept = [int((~rows).sum()) for rows in gone(model)]
    assert [small[0].out_channels, small[3].out_channels] == kept
    assert small[7].in_features == 4 * kept[1]


def test_norms_stay_zero_under_every_optimizer() -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x, y in image_batches(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    model = conv_net_with_norms()
    Surgeon(
        model, image_batches(), options=PruningOptions(**QUICK_ROWS, pattern="rows", method="magnitude")
    ).prune(0.5)
    assert {"1.weight", "1.bias"} <= masks_of(model).keys()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    keep_zeros(model, optimizer)  # from the zeros alone
    train(model.train(), optimizer)
    check_norms(model, 8)

    for make in (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), FishLeg):
        model = conv_net_with_norms()
        optimizer = make(model)
        options = PruningOptions(**QUICK_ROWS, pattern="rows")
        attach(model, image_batches(), optimizer, schedule("linear", 0.5, 2), every=1, options=options)
        for _ in range(2):
            train(model.train(), optimizer)
        check_norms(model, 8)


@pytest.mark.parametrize("optimizer", ["fishleg", "sgd"])
def test_gradual_with_rows(optimizer: str) -> None:
    model = conv_net_with_norms()
    options = PruningOptions(**QUICK_ROWS, pattern="rows", cuts=1)
    run_gradually(
        model, image_batches(), [0.25, 0.5], FineTuningOptions(optimizer=optimizer, epochs=1), options
    )
    check_norms(model, 8)
    x = image_batches()[0][0]
    assert torch.allclose(shrink(model.eval(), x)(x), model(x), atol=1e-5)


def test_masks_of_norms_are_part_of_the_state() -> None:
    surgeon = Surgeon(
        conv_net_with_norms(), image_batches(), options=PruningOptions(**QUICK_ROWS, pattern="rows")
    )
    surgeon.prune(0.5)
    other = Surgeon(
        copy.deepcopy(surgeon.model), image_batches(), options=PruningOptions(**QUICK_ROWS, pattern="rows")
    )
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
        surgeon = Surgeon(
            conv_net_with_norms(),
            image_batches(),
            options=PruningOptions(**QUICK_ROWS, pattern="rows", relative_damping=damping),
        )
        surgeon.curvature.estimate(surgeon.masks)
        gammas[damping] = surgeon.curvature.gamma
    assert gammas[None] == gammas[0.3] == pytest.approx(3 * gammas[0.1])


def test_a_stage_may_have_no_row_to_remove() -> None:
    """Of sixteen rows each stage would leave 95 %, which is less than one row."""
    sparse = prune(
        conv_net_with_norms(),
        image_batches(),
        0.25,
        options=PruningOptions(**QUICK_ROWS, pattern="rows"),
        progress=lambda _: None,
    )
    check_norms(sparse, 4)
