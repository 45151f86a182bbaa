"""What FishLeg refuses. Weights, momentum, λ, masks and counters stay as they were."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import X20, Y20
from oracles import identical
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fishleg import FishLeg, InverseFisher


def trained(steps: int = 2, **options: Any) -> tuple[nn.Sequential, FishLeg]:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = FishLeg(model, **{"update_every": 1, "warmup": 3, **options})
    for _ in range(steps):
        backward(model, optimizer)
        optimizer.step()
    return model, optimizer


def backward(model: nn.Module, optimizer: FishLeg, factor: float = 1.0) -> Tensor:
    optimizer.zero_grad()
    loss = factor * cross_entropy(model(X20), Y20)
    loss.backward()
    return loss


def snapshot(model: nn.Module, optimizer: FishLeg) -> Any:
    """Weights and everything in the optimizer, the place of its generator too."""
    state = copy.deepcopy(optimizer.state_dict())
    return copy.deepcopy(model.state_dict()), state, optimizer.steps, optimizer.auxiliary.steps


def refused(
    model: nn.Module, optimizer: FishLeg, message: str, closure: Callable[[], Any] | None = None, **step: Any
) -> None:
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.step(closure, **step)
    assert identical(snapshot(model, optimizer), before)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_closure_with_a_loss_that_is_not_finite(value: str, as_float: bool, steps: int) -> None:
    model, optimizer = trained(steps)

    def closure() -> Any:
        loss = backward(model, optimizer) + float(value)  # the gradients themselves are finite
        return loss.item() if as_float else loss

    refused(model, optimizer, rf"the loss is not finite \(.*{value}.*\); nothing was changed", closure)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite(value: float, steps: int) -> None:
    model, optimizer = trained(steps)
    backward(model, optimizer)
    model[2].bias.grad[1] = value
    refused(model, optimizer, r"non-finite gradient for parameter '2\.bias'; nothing was changed")


def test_step_q_g_that_is_not_finite() -> None:
    """Gradients are finite and Q is, but their product is not: the weights stay."""
    model = nn.Linear(4, 3)
    inverse = InverseFisher.from_model(model, "identity", scale=1e300)
    optimizer = FishLeg(model, inverse=inverse, gamma=0.1, warmup=0)
    backward(model, optimizer, 1e150)
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"the step Q g is not finite \(gᵀQg = inf\)"):
        optimizer.step()
    assert identical(model.state_dict(), weights)
    assert optimizer.steps == 0
    assert not optimizer.state


def test_step_without_a_forward_pass() -> None:
    model, optimizer = trained(0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    refused(model, optimizer, r"no inputs to learn Q from: call the model in training mode before step\(\)")
    model.eval()
    model(X20)
    refused(model, optimizer, "no inputs to learn Q from")
    model.train()
    with torch.no_grad():
        model(X20)
    refused(model, optimizer, "no inputs to learn Q from")
    backward(model, optimizer)
    optimizer.step()
    refused(model, optimizer, "no inputs to learn Q from")  # a call is used once


@pytest.mark.parametrize("warmup", [0, 3])
def test_step_without_a_backward_pass(warmup: int) -> None:
    model, optimizer = trained(2, warmup=warmup, update_every=10)
    optimizer.zero_grad()
    model(X20)
    refused(model, optimizer, r"no parameter has a gradient: call loss\.backward\(\) before step\(\)")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((X20 * torch.nan, Y20), "the model's outputs are not finite: NaN or Inf in the forward pass"),
        (X20[:0], r"a batch must not be empty, got a tensor of shape \(0, 4\)"),
    ],
)
@pytest.mark.parametrize("update_every", [1, -2])
def test_bad_batch_for_the_auxiliary_step(batch: Any, message: str, update_every: int) -> None:
    model, optimizer = trained(update_every=update_every)
    backward(model, optimizer)
    refused(model, optimizer, message, batch=batch)


def test_several_auxiliary_steps_are_made_together_or_not_at_all() -> None:
    """The second of two sees the part of the batch that is broken; the first is undone."""
    model, optimizer = trained(update_every=-2)
    x = torch.cat([X20[:16], torch.full((16, 4), torch.nan)])
    backward(model, optimizer)
    refused(model, optimizer, "the model's outputs are not finite", batch=x)


def test_likelihood_that_does_not_fit_the_output() -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    optimizer = FishLeg(model, "categorical")
    model(X20).sum().backward()
    refused(model, optimizer, r"Categorical needs .* at least 2 dimensions, got .* of shape \(12,\)")


def test_model_without_trainable_parameters() -> None:
    with pytest.raises(ValueError, match="the model has no trainable parameters"):
        FishLeg(nn.Linear(4, 3).requires_grad_(False))
    with pytest.raises(ValueError, match="the model has no trainable parameters"):
        FishLeg(nn.Tanh())


def test_parameters_of_another_model() -> None:
    message = r"a parameter of shape \(2, 5\) does not belong to the model"
    with pytest.raises(ValueError, match=message):
        FishLeg(nn.Linear(4, 3), params=nn.Linear(5, 2).parameters())
    optimizer = FishLeg(nn.Linear(4, 3))
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": nn.Linear(5, 2).parameters()})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "lr must be >= 0 and finite, got -0.1"),
        ({"lr": float("nan")}, "lr must be >= 0 and finite, got nan"),
        ({"lr": float("inf")}, "lr must be >= 0 and finite, got inf"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"momentum": -0.5}, r"momentum must be in \[0, 1\), got -0.5"),
        ({"weight_decay": -1.0}, "weight_decay must be >= 0, got -1.0"),
        ({"update_every": 0}, "update_every must be > 0 .* got 0"),
        ({"warmup": -1}, "warmup must be >= 0, got -1"),
        ({"max_kl": 0.0}, "max_kl must be > 0 and finite, or None, got 0.0"),
        ({"gamma": 0.0}, "gamma must be > 0 and finite, got 0.0"),
        ({"gamma": -1.0}, "gamma must be > 0 and finite, got -1.0"),
        ({"relative_damping": 0.0}, "relative_damping must be > 0 and finite, got 0.0"),
        ({"likelihood": "poisson"}, "likelihood must be a Likelihood or one of .* got 'poisson'"),
    ],
)
def test_fishleg_options_are_checked(options: dict[str, Any], message: str) -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=message):
        FishLeg(model, **options)
    assert not model._forward_pre_hooks, "a refused optimizer leaves nothing on the model"


def test_sparse_gradient() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3))
    optimizer = FishLeg(model)
    model(torch.arange(5)).sum().backward()
    refused(model, optimizer, "parameter '0.weight' has a sparse gradient")


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    optimizer = trained()[1]
    other = FishLeg(nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3)))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises((RuntimeError, ValueError)):
        optimizer.load_state_dict(other.state_dict())
    assert identical(optimizer.state_dict(), before)


def test_copies_go_through_the_state() -> None:
    with pytest.raises(TypeError, match="load this one's state_dict"):
        copy.deepcopy(FishLeg(nn.Linear(4, 3)))


def test_a_step_that_overflows_takes_the_auxiliary_step_back() -> None:
    model, optimizer = trained()
    backward(model, optimizer, 1e200)
    refused(model, optimizer, r"the step Q g is not finite \(gᵀQg = inf\); nothing was changed")


def test_an_auxiliary_step_without_a_single_label_is_left_out() -> None:
    """The examples that the auxiliary step would use are all ignored: the weights step, Q stays."""
    model, optimizer = trained()
    auxiliary = copy.deepcopy(optimizer.auxiliary.state_dict())
    weights = copy.deepcopy(model.state_dict())
    backward(model, optimizer)
    optimizer.step(batch=(X20, torch.full_like(Y20, -100)))
    assert identical(optimizer.auxiliary.state_dict(), auxiliary)
    assert not identical(model.state_dict(), weights)
    assert optimizer.steps == 3
