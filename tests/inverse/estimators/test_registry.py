"""Methods and structures that a user registers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers import inputs_8, labelled_8, net_8_16_4

import fishleg
from fishleg import PruningOptions, Surgeon
from fishleg.inverse import EstimationProblem, register_method, unregister_method
from fishleg.inverse.operators import Diagonal, Operator
from fishleg.options.names import EMPIRICAL_METHODS, METHODS


def constant(problem: EstimationProblem) -> dict[str, Operator]:
    """Q = 1/γ for every weight."""
    operators = {}
    for layer in problem.layers:
        operator = Diagonal(layer.shape)
        with torch.no_grad():
            for parameter in operator.parameters():
                parameter.fill_(problem.gamma**-0.5)
        operators[layer.name] = operator
    return operators


def refuse(layers: list[object]) -> None:
    raise ValueError(f"constant cannot handle {len(layers)} layers")


@pytest.fixture
def method() -> Iterator[str]:
    register_method("constant", constant, empirical=True)
    yield "constant"
    unregister_method("constant")


def test_a_registered_method_prunes(method: str) -> None:
    assert method in METHODS
    assert method in EMPIRICAL_METHODS
    options = PruningOptions(method=method, gamma=0.5, empirical=True, samples=4)
    surgeon = Surgeon(net_8_16_4(), labelled_8(), options=options)
    surgeon.prune(0.5)
    assert surgeon.sparsity == pytest.approx(0.5)
    with pytest.raises(ValueError, match="must be new and not empty, got 'constant'"):
        register_method(method, constant)


def test_a_method_is_gone_after_it_was_removed() -> None:
    register_method("constant", constant)
    PruningOptions(method="constant")
    with pytest.raises(ValueError, match="empirical = true needs one of the methods"):
        PruningOptions(method="constant", empirical=True)
    unregister_method("constant")
    with pytest.raises(ValueError, match=r"method must be one of fishleg, .*, got 'constant'"):
        PruningOptions(method="constant")


def test_a_method_can_refuse_layers_before_any_work() -> None:
    register_method("constant", constant, check=refuse)
    try:
        with pytest.raises(ValueError, match="constant cannot handle 2 layers"):
            fishleg.prune(net_8_16_4(), inputs_8(), 0.5, method="constant", progress=lambda event: None)
    finally:
        unregister_method("constant")
