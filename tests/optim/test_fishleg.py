"""FishLeg's update rule: Q, groups, momentum, decay, schedules, trust region and masks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import X20, Y20, inputs_8, net_4_6_3, net_8_16_4, train_20
from oracles import categorical_fisher, damped_inverse, dense_fisher, packed_fisher, randomise_
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

from fishleg import AuxiliaryOptions, Categorical, FishLeg, InverseFisher

STILL = AuxiliaryOptions(estimator="trace", lr=1e-300)  # Q stays where it is


def plain(model: nn.Module, scale: float = 1.0, **options: Any) -> FishLeg:
    """A FishLeg with Q = scale · I and neither warm-up nor trust region."""
    inverse = InverseFisher.from_model(model, "identity", scale=scale)
    return FishLeg(model, inverse=inverse, **{"warmup": 0, "max_kl": None, **options})


def same_weights(a: nn.Module, b: nn.Module) -> None:
    torch.testing.assert_close(dict(a.named_parameters()), dict(b.named_parameters()), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_a_multiple_of_the_identity_it_is_sgd(momentum: float) -> None:
    """α = η_SGD/η: FishLeg then begins as SGD with η_SGD."""
    eta, eta_sgd = 0.02, 0.3
    ours, theirs = net_4_6_3(), net_4_6_3()
    train_20(ours, plain(ours, eta_sgd / eta, lr=eta, momentum=momentum), 5)
    train_20(theirs, torch.optim.SGD(theirs.parameters(), lr=eta_sgd, momentum=momentum), 5)
    same_weights(ours, theirs)


@pytest.mark.parametrize(
    ("structure", "auxiliary"),
    [("diagonal", STILL), ("triangular", STILL), ("scaled-kronecker", STILL), ("eigen-kronecker", None)],
)
def test_first_step_from_a_learned_form(structure: str, auxiliary: AuxiliaryOptions | None) -> None:
    """The default (None) gathers statistics first, and so begins as SGD without being held still."""
    ours, theirs = net_4_6_3(), net_4_6_3()
    inverse = InverseFisher.from_model(ours, structure, scale=15.0)
    train_20(ours, FishLeg(ours, inverse=inverse, lr=0.02, warmup=0, max_kl=None, auxiliary=auxiliary))
    train_20(theirs, torch.optim.SGD(theirs.parameters(), lr=0.3, momentum=0.9))
    same_weights(ours, theirs)


def test_the_direction_is_q_times_the_gradient() -> None:
    model = net_4_6_3()
    inverse = randomise_(InverseFisher.from_model(model), torch.Generator().manual_seed(0))
    optimizer = FishLeg(model, inverse=inverse, lr=0.01, warmup=0, max_kl=None, auxiliary=STILL)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train_20(model, optimizer)
    g = {name: p.grad for name, p in model.named_parameters()}
    step = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    expected = {name: 0.01 * value.detach() for name, value in inverse.matvec(g).items()}
    torch.testing.assert_close(step, {name: expected[name] for name in step}, rtol=1e-9, atol=1e-14)


def test_parameter_groups_with_their_own_options() -> None:
    ours, theirs = net_4_6_3(), net_4_6_3()

    def groups(model: nn.Sequential) -> list[dict[str, Any]]:
        return [
            {"params": model[0].parameters(), "lr": 0.5},
            {"params": [model[2].weight], "momentum": 0.0},
            {"params": [model[2].bias], "lr": 0.0},
        ]

    train_20(ours, plain(ours, params=groups(ours), lr=0.1, momentum=0.8), 4)
    train_20(theirs, torch.optim.SGD(groups(theirs), lr=0.1, momentum=0.8), 4)
    same_weights(ours, theirs)
    assert torch.equal(ours[2].bias, net_4_6_3()[2].bias)


def test_weight_decay_is_decoupled() -> None:
    """w ← (1 − ηα)w − ηm: decay enters neither the momentum nor Q."""
    model, reference = net_4_6_3(), net_4_6_3()
    optimizer = plain(model, 3.0, lr=0.1, momentum=0.9, weight_decay=0.2)
    buffers = [torch.zeros_like(p) for p in reference.parameters()]
    for _ in range(4):
        train_20(model, optimizer)
        gradients = torch.autograd.grad(cross_entropy(reference(X20), Y20), list(reference.parameters()))
        with torch.no_grad():
            for p, g, buffer in zip(reference.parameters(), gradients, buffers, strict=True):
                buffer.mul_(0.9).add_(3.0 * g)
                p.mul_(1 - 0.1 * 0.2).sub_(0.1 * buffer)
    same_weights(model, reference)
    torch.testing.assert_close([optimizer.state[p]["momentum"] for p in model.parameters()], buffers)


def test_closure_is_called_once_and_its_loss_returned() -> None:
    model, calls = net_4_6_3(), []
    optimizer = plain(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        calls.append(cross_entropy(model(X20), Y20))
        calls[-1].backward()
        return calls[-1]

    with torch.no_grad():
        assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1
    reference = net_4_6_3()
    train_20(reference, plain(reference))
    same_weights(model, reference)


def test_clip_gradients_hook() -> None:
    model, reference, seen = net_4_6_3(), net_4_6_3(), []

    def clip(parameters: list[nn.Parameter]) -> None:
        seen.append(len(parameters))
        torch.nn.utils.clip_grad_norm_(parameters, 0.01)

    train_20(model, plain(model, clip_gradients=clip, lr=0.1), 3)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(reference(X20), Y20).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        optimizer.step()
    same_weights(model, reference)
    assert seen == [4, 4, 4]


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: StepLR(o, 2, gamma=0.3),
    "lambda": lambda o: LambdaLR(o, lambda t: min(1.0, (t + 1) / 3) * (1 - t / 8)),
    "one cycle": lambda o: OneCycleLR(o, max_lr=0.3, total_steps=8),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_lr_schedulers(name: str) -> None:
    """Warnings are errors here: a scheduler that misses the wrapped step would complain."""
    ours, theirs = net_4_6_3(), net_4_6_3()
    pairs = [
        (ours, plain(ours, lr=0.1)),
        (theirs, torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)),
    ]
    for model, optimizer in pairs:
        scheduler = SCHEDULES[name](optimizer)
        for _ in range(7):
            train_20(model, optimizer)
            scheduler.step()
    same_weights(ours, theirs)


@pytest.mark.parametrize(("update_every", "expected"), [(1, 7), (3, 3), (100, 1), (-1, 7), (-3, 21)])
def test_auxiliary_steps_every_k(update_every: int, expected: int) -> None:
    model = net_4_6_3()
    optimizer = FishLeg(model, warmup=0, update_every=update_every)
    train_20(model, optimizer, 7)
    assert optimizer.auxiliary.steps == expected
    assert optimizer.last_auxiliary is not None
    assert optimizer.last_auxiliary.step == expected
    assert optimizer.steps == 7


def test_warmup() -> None:
    """A constant gradient: steps grow linearly from the first, then stay; Q learns more often meanwhile."""
    model = nn.Linear(4, 3)
    optimizer = plain(model, lr=0.1, momentum=0.0, warmup=12, update_every=1000)
    sizes = []
    for _ in range(16):
        before = model.bias.detach().clone()
        optimizer.zero_grad()
        model(X20).sum().backward()
        optimizer.step()
        sizes.append(float((before - model.bias.detach())[0]))
    assert sizes[1] == pytest.approx(2 * sizes[0])
    assert all(b >= a - 1e-9 for a, b in pairwise(sizes))
    assert sizes[12:] == pytest.approx([0.1 * 20] * 4)
    assert optimizer.auxiliary.steps >= 12


def exact_inverse(model: nn.Module, gamma: float) -> InverseFisher:
    inverse = InverseFisher.from_model(model, "full")
    F = dense_fisher(model, X20, categorical_fisher)
    for name, layer in inverse.layers.items():
        Q = damped_inverse(packed_fisher(model, F, layer.names), gamma)
        with torch.no_grad():
            inverse.unmasked(name).factor.matrix.copy_(torch.linalg.cholesky(Q))
    return inverse


@pytest.mark.parametrize("max_kl", [1e-4, 1e-2])
def test_trust_region_bounds_the_kl(max_kl: float) -> None:
    """With an exact Q the mean KL(p_before ‖ p_after) of a long step is max_kl, less what damping takes."""
    model, gamma = nn.Linear(4, 3), 1e-4
    optimizer = FishLeg(
        model, inverse=exact_inverse(model, gamma), gamma=gamma, lr=5.0, momentum=0.0, warmup=0,
        max_kl=max_kl, auxiliary=STILL,
    )  # fmt: skip
    before = model(X20).detach().log_softmax(1)
    train_20(model, optimizer)
    after = model(X20).detach().log_softmax(1)
    kl = float((before.exp() * (before - after)).sum(1).mean())
    assert optimizer.last_trust < 0.1
    assert kl == pytest.approx(max_kl, rel=0.1)


def test_trust_region_leaves_short_steps_alone() -> None:
    ours, theirs = nn.Linear(4, 3), nn.Linear(4, 3)
    theirs.load_state_dict(ours.state_dict())
    train_20(ours, plain(ours, lr=1e-3, momentum=0.0, max_kl=0.03))
    train_20(theirs, torch.optim.SGD(theirs.parameters(), lr=1e-3))
    same_weights(ours, theirs)


def test_trust_region_counts_momentum() -> None:
    """Steps of size η add up to η/(1−β): with β = 0.9 the same bound allows a tenth."""
    trusts = []
    for momentum in (0.0, 0.9):
        model = net_4_6_3()
        optimizer = plain(model, 100.0, lr=1.0, momentum=momentum, max_kl=1e-3)
        train_20(model, optimizer)
        trusts.append(optimizer.last_trust)
    assert trusts[0] / trusts[1] == pytest.approx(10)


@pytest.mark.parametrize("structure", ["full", "block", "eigen-kronecker"])
def test_masks_keep_zeros_exactly_zero(structure: str) -> None:
    model = net_4_6_3()
    inverse = InverseFisher.from_model(model, structure)
    optimizer = FishLeg(model, inverse=inverse, lr=0.1, weight_decay=0.1, update_every=1, warmup=5)
    train_20(model, optimizer, 10)
    masks = {"0.weight": torch.rand(6, 4) < 0.5, "2.weight": torch.rand(3, 6) < 0.5, "2.bias": Y20[:3] > 0}
    optimizer.set_masks(masks)
    kept = {name: model.get_parameter(name).detach()[mask].clone() for name, mask in masks.items()}
    for step in range(51):
        for name, mask in masks.items():
            p = model.get_parameter(name)
            assert not p[~mask].any(), f"step {step}"
            assert not optimizer.state[p]["momentum"][~mask].any(), f"step {step}"
        train_20(model, optimizer)
    for name, mask in masks.items():
        assert not torch.isclose(model.get_parameter(name)[mask], kept[name]).all(), "nothing was trained"
    with torch.no_grad():  # something else, say a restored checkpoint, wrote there
        model[0].weight.fill_(1.0)
    train_20(model, optimizer)
    assert not model[0].weight[~masks["0.weight"]].any()


def test_bad_masks_change_nothing() -> None:
    model = net_4_6_3()
    optimizer = plain(model)
    with pytest.raises(ValueError, match=r"mask for unknown parameter '5.weight'"):
        optimizer.set_masks({"0.weight": torch.zeros(6, 4).bool(), "5.weight": torch.ones(2).bool()})
    assert optimizer.masks == {}
    same_weights(model, net_4_6_3())


def test_steps_may_be_damped_more_than_q() -> None:
    """w ← w − η (Q⁻¹ + (s−1)γI)⁻¹ g with Q untouched."""
    model = nn.Linear(3, 2)
    inverse = InverseFisher.from_model(model, "diagonal", scale=4.0)
    options = {"gamma": 0.1, "lr": 1.0, "momentum": 0.0, "max_kl": None, "warmup": 0, "update_every": 1000}
    optimizer = FishLeg(model, inverse=inverse, step_damping=11.0, **options)
    optimizer.steps = 1  # no auxiliary step is due
    before = model.weight.detach().clone()
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    expected = before - model.weight.grad / (1 / 4.0 + 10 * 0.1)
    assert torch.allclose(model.weight.detach(), expected)
    with pytest.raises(ValueError, match=r"step_damping must be >= 1 and finite, got 0\.5"):
        FishLeg(model, step_damping=0.5)


def test_a_decayed_learning_rate_may_rise_again() -> None:
    """The trust region is that of the largest rate so far: nothing too long gathers in the momentum."""
    model = net_4_6_3()
    optimizer = FishLeg(model, lr=0.1, max_kl=1e-6, warmup=0, gamma=1e-3)
    train_20(model, optimizer, 5)
    for group in optimizer.param_groups:
        group["lr"] = 1e-6
    lengths = [float(optimizer.state[p]["momentum"].norm()) for p in model.parameters()]
    train_20(model, optimizer, 20)
    assert optimizer.last_trust < 0.5
    assert all(
        float(optimizer.state[p]["momentum"].norm()) < 5 * length
        for p, length in zip(model.parameters(), lengths, strict=True)
    )
    assert optimizer.param_groups[0]["largest_lr"] == 0.1


def test_the_trust_region_holds_when_the_learning_rate_jumps_up() -> None:
    x = torch.cat(inputs_8(8))
    y = x[:, :4].argmax(1)
    for low in (0.0, 1e-5):
        model = net_8_16_4()
        optimizer = FishLeg(model, "categorical", lr=0.1, max_kl=0.01)
        for t in range(32):
            for group in optimizer.param_groups:
                group["lr"] = low if t < 25 else 0.1
            before = model(x).detach()
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                moved = Categorical().divergence(model(x), before)
            assert float(moved) < 0.02, (low, t)
