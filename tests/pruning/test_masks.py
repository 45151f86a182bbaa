"""Masks: applied to a model, and read from the zeros of a model."""

import logging
import math

import pytest
import torch
from helpers import QUICK, inputs_6, labelled_6, net_6_8_3, net_6_10_4, random_masks
from torch import nn

from fishleg import PruningOptions, Surgeon, keep_zeros, masks_of
from fishleg.pruning.keep_zeros import zero_removed
from fishleg.pruning.masks import apply_masks


def test_apply_masks_changes_nothing_else() -> None:
    model = net_6_8_3()
    before, masks = {k: v.clone() for k, v in model.state_dict().items()}, random_masks(model)
    apply_masks(model, masks)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name] * masks.get(name, torch.ones(()).bool()))


def test_masks_of_reads_the_zeros_of_matrices() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 2))
    masks = {name: torch.rand(model.get_parameter(name).shape) < 0.5 for name in ("0.weight", "2.weight")}
    assert masks_of(model) == {}
    apply_masks(model, masks)
    nn.init.zeros_(model[2].bias)
    found = masks_of(model)
    assert found.keys() == masks.keys()
    for name, mask in found.items():
        assert mask.dtype == torch.bool
        assert torch.equal(mask, masks[name])
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    assert torch.equal(found["0.weight"], masks["0.weight"])


def test_masked_weights_are_zero_even_where_they_were_nan() -> None:
    layer = nn.Linear(3, 2)
    masks = {"weight": torch.tensor([[True, False, True], [False, True, True]])}
    for enforce in (
        lambda: apply_masks(layer, masks),
        lambda: zero_removed(torch.optim.SGD([layer.weight], lr=1), layer, masks),
    ):
        with torch.no_grad():
            layer.weight.fill_(math.nan)
        enforce()
        assert torch.equal(layer.weight == 0, ~masks["weight"])


def test_masks_of_rows_have_their_biases() -> None:
    model = net_6_10_4(nn.GELU)
    Surgeon(model, inputs_6(), options=PruningOptions(**QUICK, pattern="rows")).prune(0.5)
    masks = masks_of(model)
    gone = ~masks["0.weight"].any(1)
    assert torch.equal(masks["0.bias"], ~gone)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keep_zeros(model, optimizer)
    for x, y in labelled_6():
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert torch.equal(model[0].bias == 0, gone)


def test_a_tensor_of_zeros_only_is_not_taken_for_pruned(caplog: pytest.LogCaptureFixture) -> None:
    model = net_6_10_4(nn.Tanh)
    nn.init.zeros_(model[2].weight)  # as adapters start
    with torch.no_grad():
        model[0].weight[0, 0] = 0
    with caplog.at_level(logging.INFO, "fishleg"):
        assert list(masks_of(model)) == ["0.weight"]
    assert "2.weight is zero everywhere: it gets no mask" in caplog.text
