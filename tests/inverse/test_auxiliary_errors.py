"""What the auxiliary loss refuses. Model, Q and Adam stay as they were."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import X12
from oracles import identical
from torch import Tensor, nn

from fishleg import Auxiliary, AuxiliaryOptions, InverseFisher
from fishleg.curvature.layers import find_layers
from fishleg.inverse.operators import LowRank
from fishleg.options.names import ESTIMATORS

LABELS = torch.arange(12) % 3


def make(
    model: nn.Module | None = None,
    likelihood: str = "categorical",
    gamma: float | None = None,
    scale: float = 1.0,
    **options: Any,
) -> Auxiliary:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)) if model is None else model
    inverse = InverseFisher.from_model(model, scale=scale)
    return Auxiliary(model, inverse, likelihood, gamma=gamma, options=AuxiliaryOptions(**options))


def snapshot(auxiliary: Auxiliary) -> dict[str, Any]:
    """Everything that a refused step must leave alone; the generator may have moved on."""
    state = {key: value for key, value in auxiliary.state_dict().items() if key != "generator"}
    modes = [module.training for module in auxiliary.model.modules()]
    states = [auxiliary.model.state_dict(), auxiliary.inverse.state_dict(), state, modes]
    gradients = [p.grad for p in [*auxiliary.model.parameters(), *auxiliary.inverse.parameters()]]
    return copy.deepcopy({"states": states, "gradients": gradients})


NAN = torch.full((12, 3), torch.nan, dtype=torch.float64)


BAD_BATCHES: dict[str, tuple[Any, str]] = {
    "nan": (NAN, "the model's outputs are not finite: NaN or Inf in the forward pass"),
    "infinite": (torch.full_like(X12, torch.inf), "outputs are not finite"),
    "ignored": ((X12, torch.full((12,), -100)), "every position of the batch is ignored"),
    "empty": (X12[:0], r"a batch must not be empty, got a tensor of shape \(0, 3\)"),
    "three parts": ((X12, LABELS, X12), "a batch of 3 parts is ambiguous"),
}


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", BAD_BATCHES)
def test_bad_batches_change_nothing(name: str, estimator: str, steps_before: int) -> None:
    batch, message = BAD_BATCHES[name]
    auxiliary = make(estimator=estimator)
    auxiliary.model[1].eval()
    for _ in range(steps_before):
        auxiliary.step(X12)
    before = snapshot(auxiliary)
    with pytest.raises(ValueError, match=message):
        auxiliary.step(batch)
    assert identical(snapshot(auxiliary), before)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(
    ("likelihood", "targets"),
    [
        ("categorical", LABELS + 1),
        ("categorical", LABELS - 1),
        ("categorical", LABELS[:5]),
        ("categorical", X12[:, 0]),
        ("gaussian", X12[:, :2]),
        ("bernoulli", LABELS),
        ("bernoulli", X12 - 9),
    ],
)
def test_targets_that_do_not_fit_the_likelihood_are_ignored(
    likelihood: str, targets: Tensor, estimator: str
) -> None:
    learned = []
    for batch in (X12, (X12, targets)):
        torch.manual_seed(0)
        auxiliary = make(likelihood=likelihood, estimator=estimator)
        auxiliary.step(batch)
        learned.append(auxiliary.inverse.state_dict())
    assert identical(*learned)


class Root(nn.Module):
    """Finite at 0, with an infinite derivative there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).abs().sqrt()


def constant_model() -> nn.Module:
    """Outputs that do not depend on the parameters at this point: F = 0."""
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2, bias=False), nn.ReLU())
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(-1.0)
    return model


FAILURES: dict[str, tuple[Callable[[], Auxiliary], Tensor, str]] = {
    "backward": (
        lambda: make(Root(), gamma=0.1),
        0 * X12,
        "non-finite curvature for parameter 'linear.weight'",
    ),
    "one dimension": (
        lambda: make(nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))),
        X12,
        r"Categorical needs .* at least 2 dimensions, got .* \(12,\)",
    ),
    "zero Fisher": (
        lambda: make(constant_model()),
        X12.abs(),
        "cannot choose gamma: the Fisher matrix is zero",
    ),
    "overflow, trace": (
        lambda: make(estimator="trace", scale=1e200),
        X12,
        "non-finite gradient of the auxiliary loss; Q is unchanged",
    ),
    "overflow, probe": (
        lambda: make(estimator="probe", scale=1e200, precondition=True, exact_products=False),
        X12,
        "non-finite gradient of the auxiliary loss; Q is unchanged",
    ),
    "zero probe": (
        lambda: make(estimator="probe", probe=lambda generator: {}),
        X12,
        r"the probe u must be finite and not zero, got ‖u‖² = 0",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_change_nothing(name: str) -> None:
    build, x, message = FAILURES[name]
    auxiliary = build()
    before = snapshot(auxiliary)
    with pytest.raises(ValueError, match=message):
        auxiliary.step(x)
    assert identical(snapshot(auxiliary), before)


def test_a_probe_that_is_not_finite() -> None:
    auxiliary = make(estimator="probe")
    shapes = {name: p.shape for name, p in auxiliary.model.named_parameters()}
    draw = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    auxiliary = make(auxiliary.model, estimator="probe", probe=lambda generator: draw)
    before = snapshot(auxiliary)
    with pytest.raises(ValueError, match="must be finite and not zero, got ‖u‖² = nan"):
        auxiliary.step(X12)
    assert identical(snapshot(auxiliary), before)


def test_empty_loader() -> None:
    auxiliary = make()
    before = snapshot(auxiliary)
    with pytest.raises(ValueError, match="the loader is empty: it yielded no batch"):
        auxiliary.learn([], 8)
    assert identical(snapshot(auxiliary), before)


@pytest.mark.parametrize("gamma", [0.0, -0.1, float("nan"), float("inf")])
def test_damping_must_be_positive_and_finite(gamma: float) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=f"gamma must be > 0 and finite, got {gamma}"):
        Auxiliary(model, InverseFisher.from_model(model), gamma=gamma)
    with pytest.raises(ValueError, match=f"relative_damping must be > 0 and finite, got {gamma}"):
        Auxiliary(model, InverseFisher.from_model(model), relative_damping=gamma)


def test_unknown_likelihood_and_missing_natural_step() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"likelihood must be a Likelihood or one of .* got 'poisson'"):
        Auxiliary(model, InverseFisher.from_model(model), "poisson")
    inverse = InverseFisher(find_layers(model), {"weight": LowRank((2, 4), torch.randn(5, 2, 4), 0.1)})
    with pytest.raises(ValueError, match="LowRank has no natural step; use estimator='trace'"):
        Auxiliary(model, inverse, options=AuxiliaryOptions(estimator="natural"))
