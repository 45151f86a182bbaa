"""Where F is zero, gamma cannot be chosen: the message says why and what to try."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fishleg import Categorical, PruningOptions, Surgeon
from fishleg.curvature.zero_fisher import check_fisher_not_zero
from fishleg.runtime import default_forward

DATA = [torch.randn(16, 6, generator=torch.Generator().manual_seed(0)).float() + 3 for _ in range(3)]


def network(scale: float, bias: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3, bias=False)).float()
    with torch.no_grad():
        model[2].weight.mul_(scale)
        model[0].bias.add_(bias)
    return model


def prune(model: nn.Module, likelihood: str, method: str) -> None:
    options = PruningOptions(method=method, samples=16, sub_batch=4)
    Surgeon(model, DATA, likelihood=likelihood, options=options).prune(0.5)


@pytest.mark.parametrize("method", ["fishleg", "diagonal"])
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_saturated_outputs_are_told(method: str, likelihood: str) -> None:
    told = (
        r"cannot choose gamma: the Fisher matrix is zero .* \(the mean of its diagonal is 0\)\. The outputs "
        r"lie between -?\d.* and \d.*\. They are saturated: the largest probability is 1 on average, the "
        r"entropy \S+ nats\. Try a temperature .*logits.*likelihood.*more samples, or pass gamma="
    )
    with pytest.raises(ValueError, match=told):
        prune(network(1e6), likelihood, method)


@pytest.mark.parametrize("method", ["fishleg", "diagonal"])
@pytest.mark.parametrize(
    ("likelihood", "told"),
    [
        ("categorical", r"not saturated \(the largest probability is 0\.33333\d+ .* do not depend on the we"),
        ("bernoulli", r"not saturated \(the largest probability is 0\.5 on .* do not depend on the weights"),
        ("gaussian", r"The outputs lie between -?0 and -?0\. They do not depend on the weights there"),
    ],
)
def test_a_dead_network_is_told(method: str, likelihood: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        prune(network(1.0, bias=-1e6), likelihood, method)


def test_a_fisher_whose_inverse_overflows_counts_as_zero() -> None:
    model, likelihood = network(100.0), Categorical()
    with pytest.raises(ValueError, match=r"gamma: the Fisher matrix is almost zero .* is 1e-40\)"):
        check_fisher_not_zero(1e-40, model, DATA[0], likelihood, default_forward)
    check_fisher_not_zero(1e-30, model, DATA[0], likelihood, default_forward)
