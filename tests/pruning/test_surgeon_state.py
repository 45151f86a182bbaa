"""The state of a surgeon: going on bit for bit, and states that do not fit."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import QUICK, inputs_6, inputs_8, net_6_10_4, net_8_16_4
from torch import Tensor, nn

from fishleg import PruningOptions, Surgeon


@pytest.mark.parametrize("size", [8, 2, 1])
def test_a_surgeon_goes_on_bit_for_bit_in_stages(size: int) -> None:
    def end(stopped: bool) -> list[Tensor]:
        model, data = net_6_10_4(nn.Tanh), inputs_6(16 // size, size)
        surgeon = Surgeon(model, data, options=PruningOptions(measure_batches=0, samples=32, sub_batch=4))
        surgeon.prune(0.3)
        if stopped:
            state, weights = surgeon.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
            surgeon.prune(0.4)  # what goes on in the old one does not touch the state
            model = net_6_10_4(nn.Tanh)
            model.load_state_dict(weights)
            surgeon = Surgeon(model, data, options=PruningOptions(measure_batches=0, samples=32, sub_batch=4))
            surgeon.load_state_dict(state)
        for sparsity in (0.5, 0.6):
            surgeon.prune(sparsity)
        return list(model.parameters())

    for a, b in zip(end(False), end(True), strict=True):
        assert torch.equal(a, b)


def test_the_state_of_another_model_s_surgeon_is_refused() -> None:
    surgeon = Surgeon(net_8_16_4(), inputs_8(), options=PruningOptions(method="magnitude"))
    surgeon.prune(0.5)
    state = surgeon.state_dict()
    other = Surgeon(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)), inputs_8())
    with pytest.raises(ValueError, match=r"masks '0.weight' of shape \(16, 8\), which is of shape \(12, 8\)"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match=r"'0.weight' of shape \(16, 8\), which is missing here"):
        Surgeon(nn.Linear(8, 4), inputs_8()).load_state_dict(state)
    assert not other.masks
    excluding = Surgeon(
        copy.deepcopy(surgeon.model), inputs_8(), options=PruningOptions(method="magnitude", exclude=["^2"])
    )
    excluding.load_state_dict(state)
    excluding.prune(0.7)
    assert excluding.masks.keys() == {"0.weight", "2.weight"}


@pytest.mark.parametrize(("saved", "loaded"), [("1:2", "global"), ("2:5", "1:5"), ("layer", "global")])
def test_the_state_of_another_pattern_is_refused(saved: str, loaded: str) -> None:
    surgeon = Surgeon(net_6_10_4(), inputs_6(), options=PruningOptions(**QUICK, pattern=saved))
    surgeon.prune(0.4)
    state = surgeon.state_dict()
    Surgeon(net_6_10_4(), inputs_6(), options=PruningOptions(**QUICK, pattern=saved)).load_state_dict(state)
    with pytest.raises(ValueError, match=r"the state is that of pattern .*, this is "):
        Surgeon(net_6_10_4(), inputs_6(), options=PruningOptions(**QUICK, pattern=loaded)).load_state_dict(
            state
        )
