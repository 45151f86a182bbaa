"""Which running statistics a pruning step renews."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import QUICK, inputs_8, quiet
from torch import Tensor, nn

import fishleg
from fishleg import PruningOptions, Surgeon


def normed_net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(),
        nn.Dropout(0.5), nn.Linear(8, 4),
    )  # fmt: skip
    model(torch.cat(inputs_8(3)) + 0.1)
    return model.eval()


def statistics(model: nn.Sequential, *places: int) -> list[Tensor]:
    return [value.clone() for i in places for value in model[i].buffers()]


@pytest.mark.parametrize(("include", "same"), [("7", (1, 4)), ("3", (1,)), ("0", ())])
@pytest.mark.parametrize("method", ["fishleg", "magnitude"])
def test_statistics_are_renewed_only_behind_what_was_pruned(
    include: str, same: tuple[int, ...], method: str
) -> None:
    model = normed_net()
    options = PruningOptions(**QUICK, include=[include], method=method, cuts=2, refine_steps=1)
    surgeon = Surgeon(model, inputs_8(3), options=options)
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    kept, state = statistics(model, *same), torch.get_rng_state()
    others = {i: statistics(model, i) for i in {1, 4} - set(same)}
    surgeon.prune(0.5)
    assert all(map(torch.equal, statistics(model, *same), kept))
    assert not any(torch.equal(statistics(model, i)[0], old[0]) for i, old in others.items())
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert not any(m.training for m in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_norms_before_the_pruned_layer_normalise_by_what_they_keep() -> None:
    model, data = normed_net(), inputs_8(3)
    Surgeon(model, data, options=PruningOptions(include=["3"], method="magnitude")).prune(0.5)
    with torch.no_grad():
        expected = model[:4](torch.cat(data)).mean(0)
    norm = model[4]
    assert isinstance(norm, nn.BatchNorm1d)
    twenty = torch.stack([model[:4](data[i % 3]).mean(0) for i in range(20)]).mean(0).detach()
    assert norm.running_mean is not None
    torch.testing.assert_close(norm.running_mean, twenty)
    torch.testing.assert_close(norm.running_mean, expected, atol=0.05, rtol=0.1)


def test_if_all_inputs_changed_all_statistics_are_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    def pruned(**options: Any) -> dict[str, Tensor]:
        loader = torch.utils.data.DataLoader(torch.cat(inputs_8(3)), batch_size=16, shuffle=True)
        model: nn.Module = fishleg.prune(
            normed_net(), loader, 0.6, options=PruningOptions(**QUICK, **options), progress=quiet
        )
        return model.state_dict()

    found = pruned()
    monkeypatch.setattr("fishleg.pruning.affected_norms.batchnorm_input_moments", lambda *_: {})
    assert all(torch.equal(value, found[name]) for name, value in pruned().items())
