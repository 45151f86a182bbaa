"""Where the Q of a model comes from: estimated, refined or reused, and its saved state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import inputs_8, net_8_16_4
from oracles import identical
from torch import Tensor, nn

from fishleg import Categorical, PruningOptions
from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.inverse.inverse_updater import InverseUpdater

QUICK: dict[str, Any] = {"samples": 16, "sub_batch": 4, "relative_damping": 0.1}


def make_source(model: nn.Module, method: str = "fishleg", **given: Any) -> InverseUpdater:
    options = PruningOptions(**{**QUICK, "method": method, **given})
    return InverseUpdater(model, inputs_8(), Categorical(), options)


def entries(inverse: InverseFisher) -> Tensor:
    return torch.cat([diagonal.detach().flatten() for diagonal in inverse.diag().values()])


def change_in_place(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[0].weight[0, 0] += 0.01


def change_data(model: nn.Sequential) -> None:
    """The counter of changes in place misses this one."""
    model[0].weight.data[0, 0] += 0.01


def replace_data(model: nn.Sequential) -> None:
    model[0].weight.data = 1.01 * model[0].weight.data


def load_weights(model: nn.Sequential) -> None:
    model.load_state_dict({name: 0.99 * value for name, value in model.state_dict().items()})


CHANGES: list[Callable[[nn.Sequential], None]] = [change_in_place, change_data, replace_data, load_weights]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("method", "after"), [("fishleg", "refine"), ("diagonal", "estimate")])
def test_the_decision_between_estimate_refine_and_reuse(
    change: Callable[[nn.Sequential], None], method: str, after: str
) -> None:
    model = net_8_16_4()
    source = make_source(model, method)
    assert (source.next_update, source.is_current) == ("estimate", False)
    source.update({})
    assert (source.next_update, source.is_current) == ("reuse", True)
    change(model)
    assert (source.next_update, source.is_current) == (after, False)
    source.update({})
    assert (source.next_update, source.is_current) == ("reuse", True)


def test_a_forward_and_a_backward_pass_change_nothing() -> None:
    model = net_8_16_4()
    source = make_source(model)
    source.update({})
    model(inputs_8()[0]).sum().backward()
    model.eval()
    assert source.next_update == "reuse"


def test_update_does_what_next_update_says() -> None:
    model, steps = net_8_16_4(), []
    options = PruningOptions(**QUICK)
    source = InverseUpdater(model, inputs_8(), Categorical(), options, on_step=steps.append)
    first = source.update({})
    assert source.learning is not None
    assert source.inverse is source.learning.inverse is first
    estimated = source.learning.steps
    assert len(steps) == estimated > 0
    assert source.update({}) is first
    assert source.learning.steps == estimated  # reused: no further step
    change_in_place(model)
    assert source.update({}, steps=3) is first
    assert source.learning.steps == estimated + 3 == len(steps)
    change_in_place(model)
    source.update({})
    assert source.learning.steps == estimated + 3 + 16 // 8  # half of the samples, in four groups
    change_in_place(model)
    before = entries(first).clone()
    source.update({}, steps=0)
    assert source.is_current
    assert torch.equal(entries(first), before)


def test_a_method_that_does_not_learn_estimates_afresh_with_the_same_damping() -> None:
    model = net_8_16_4()
    source = make_source(model, "diagonal")
    first, gamma = source.update({}), source.gamma
    assert gamma is not None
    assert gamma > 0
    assert source.update({}) is first
    change_in_place(model)
    second = source.update({})
    assert second is not first
    assert source.inverse is second
    assert source.learning is None
    assert source.gamma == gamma
    with pytest.raises(ValueError, match="there is no learned Q to refine: estimate it first"):
        source.refine()


def test_latest_is_the_last_q_whatever_has_changed_since() -> None:
    model = net_8_16_4()
    source = make_source(model, "diagonal")
    first = source.latest({})
    change_in_place(model)
    assert source.latest({}) is first
    assert source.next_update == "estimate"


@pytest.mark.parametrize("method", ["fishleg", "diagonal"])
def test_a_given_damping_is_kept(method: str) -> None:
    source = make_source(net_8_16_4(), method, gamma=0.3)
    source.update({})
    assert source.gamma == 0.3


def test_magnitude_has_no_damping() -> None:
    source = make_source(net_8_16_4(), "magnitude")
    source.update({})
    assert source.gamma is None


@pytest.mark.parametrize("method", ["fishleg", "diagonal", "obert", "kfac"])
@pytest.mark.parametrize("current", [True, False])
def test_a_loaded_state_goes_on_with_the_same_bits(method: str, current: bool) -> None:
    """Saved before or after the weights have changed; the next Q and the one after are the same."""
    model = net_8_16_4()
    source = make_source(model, method)
    source.update({})
    if not current:
        change_in_place(model)
    state, weights = copy.deepcopy(source.state_dict()), copy.deepcopy(model.state_dict())

    def go_on(model: nn.Sequential, source: InverseUpdater) -> tuple[str, list[Tensor], float | None]:
        following, found = source.next_update, [entries(source.update({})).clone()]
        change_in_place(model)
        found.append(entries(source.update({})).clone())
        return following, found, source.gamma

    following, *expected = go_on(model, source)
    other = net_8_16_4()
    other.load_state_dict(weights)
    resumed = make_source(other, method)
    resumed.load_state_dict(state, {})
    following_again, *found = go_on(other, resumed)
    assert identical(found, expected)
    learned = method == "fishleg"
    assert following_again == (following if learned else "estimate")  # only a learned Q is saved


def test_a_state_from_before_the_first_estimate() -> None:
    source, other = make_source(net_8_16_4()), make_source(net_8_16_4())
    state = source.state_dict()
    other.update({})
    other.load_state_dict(state, {})
    assert (other.next_update, other.gamma, other.inverse) == ("estimate", None, None)
    assert torch.equal(entries(source.update({})), entries(other.update({})))
