"""Pruned weights stay exactly zero under any optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    net_6_8_3,
    net_8_16_4,
    one_sgd_per_layer,
    prune_by_magnitude,
    random_masks,
    train_8,
    zeros_of,
)
from torch import Tensor, nn
from torch.nn import functional

import fishleg
from fishleg import FishLeg, keep_zeros
from fishleg.pruning.masks import apply_masks

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.1, weight_decay=0.1, amsgrad=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.1),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, check: Callable[[], None]) -> None:
    for _ in range(steps):
        x = torch.randn(32, 6)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        optimizer.step()
        check()


def zeros_hold(model: nn.Module, masks: dict[str, Tensor]) -> bool:
    parameters = dict(model.named_parameters())
    return all(not bool(parameters[name][~mask].any()) for name, mask in masks.items())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zeros_and_state_stay_zero(name: str) -> None:
    model = net_6_8_3()
    optimizer, masks = OPTIMIZERS[name](model), random_masks(model)
    train(model, optimizer, 3, lambda: None)  # state from before the masks
    handle = keep_zeros(model, optimizer, masks)
    assert zeros_hold(model, masks)
    parameters = dict(model.named_parameters())

    def check() -> None:
        assert zeros_hold(model, masks)
        for key, mask in masks.items():
            states = [v for v in optimizer.state[parameters[key]].values() if v.shape == mask.shape]
            assert states
            assert all(not bool(state[~mask].any()) and bool(state[mask].any()) for state in states)

    check()
    before = {key: p.detach().clone() for key, p in parameters.items()}
    train(model, optimizer, 20, check)
    assert all(not torch.equal(p, before[key]) for key, p in parameters.items())
    handle.remove()
    train(model, optimizer, 1, lambda: None)
    assert not zeros_hold(model, masks)


def test_fishleg_with_masks_keeps_zeros() -> None:
    model = net_6_8_3()
    masks = random_masks(model)
    optimizer = FishLeg(model, lr=0.1, weight_decay=0.1, update_every=2)
    optimizer.set_masks(masks)

    def check() -> None:
        assert zeros_hold(model, masks)

    before = model[0].weight.detach().clone()
    train(model, optimizer, 20, check)
    kept = masks["0.weight"]
    assert bool((model[0].weight[kept] != before[kept]).all())


@pytest.mark.parametrize("call", [apply_masks, lambda m, masks: keep_zeros(m, OPTIMIZERS["sgd"](m), masks)])
def test_unknown_parameter(call: Callable[[nn.Module, dict[str, Tensor]], object]) -> None:
    with pytest.raises(ValueError, match=r"mask for unknown parameter '0.wieght'"):
        call(net_6_8_3(), {"0.wieght": torch.ones(8, 6).bool()})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_keep_zeros_without_masks_keeps_those_that_are_there(name: str) -> None:
    model = net_6_8_3()
    masks = {"2.weight": torch.rand(3, 8) < 0.5}
    apply_masks(model, masks)
    optimizer = OPTIMIZERS[name](model)
    handle = keep_zeros(model, optimizer)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}

    def check() -> None:
        assert torch.equal(model[2].weight == 0, ~masks["2.weight"])

    train(model, optimizer, 10, check)
    assert all(not torch.equal(p, before[key]) for key, p in model.named_parameters())
    handle.remove()
    train(model, optimizer, 1, lambda: None)
    assert not zeros_hold(model, masks)


@pytest.mark.parametrize("masks", [None, {}])
def test_no_zeros_to_keep(masks: dict[str, Tensor] | None) -> None:
    model = net_6_8_3()
    nn.init.zeros_(model[0].bias)
    optimizer = OPTIMIZERS["sgd"](model)
    with pytest.raises(ValueError, match="no zeros to keep: prune it first, or pass masks"):
        keep_zeros(model, optimizer, masks)
    assert not optimizer._optimizer_step_post_hooks


def test_keep_zeros_needs_every_optimizer() -> None:
    model = prune_by_magnitude(net_8_16_4(), 0.5)
    before, (first, second) = zeros_of(model), one_sgd_per_layer(model)
    train_8(model, first, second)
    model.load_state_dict(prune_by_magnitude(net_8_16_4(), 0.5).state_dict())
    told = r"the optimizer does not have 2\.weight: another optimizer would change the zeros there\. Pass all"
    with pytest.raises(ValueError, match=told):
        fishleg.keep_zeros(model, first)
    assert not first._optimizer_step_post_hooks
    handle = fishleg.keep_zeros(model, [first, second])
    train_8(model, first, second)
    assert all(torch.equal(now, before[name]) for name, now in zeros_of(model).items())
    held = second.state[model[2].weight]["momentum_buffer"]
    assert not bool(held[before["2.weight"]].any())
    handle.remove()
    train_8(model, first, second)
    assert not any(bool((zeros_of(model)[name] & zero).any()) for name, zero in before.items())
    with pytest.raises(ValueError, match="got an empty sequence"):
        fishleg.keep_zeros(model, [])


def test_frozen_parameters_need_no_optimizer() -> None:
    model = prune_by_magnitude(net_8_16_4(), 0.5)
    model[2].requires_grad_(False)
    before = zeros_of(model)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    fishleg.keep_zeros(model, optimizer)
    train_8(model, optimizer)
    assert all(torch.equal(now, before[name]) for name, now in zeros_of(model).items())


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        (torch.ones(8, dtype=torch.bool), r"mask of '0\.weight' must have its shape \(16, 8\), got \(8,\)"),
        (
            torch.ones(16, 8).double(),
            r"mask of '0\.weight' must be a boolean tensor \(True = kept\), got torch\.float64",
        ),
        ([True], r"must be a boolean tensor \(True = kept\), got list"),
    ],
)
def test_masks_are_checked(mask: Any, told: str) -> None:
    model = net_8_16_4()
    before, optimizer = copy.deepcopy(model.state_dict()), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=told):
        fishleg.keep_zeros(model, optimizer, {"0.weight": mask})
    assert not optimizer._optimizer_step_post_hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
