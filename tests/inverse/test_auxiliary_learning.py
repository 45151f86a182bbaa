"""Learning with the auxiliary loss: gauge, stopping, damping, initial scale, resuming."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import X12, inputs_6, net_6_10_4, net_with_dropout, training_batches
from oracles import (
    damped_inverse,
    dense_auxiliary_loss,
    dense_fisher,
    gaussian_fisher,
    identical,
    packed_fisher,
)
from torch import Tensor, nn

from fishleg import Auxiliary, AuxiliaryOptions, Gaussian, InverseFisher
from fishleg.curvature.outputs import AllIgnoredError
from fishleg.options.names import ESTIMATORS


def net(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))


def make(
    structure: str = "eigen-kronecker",
    likelihood: str = "categorical",
    gamma: float | None = 0.1,
    seed: int = 0,
    model: nn.Module | None = None,
    scale: float = 1.0,
    **options: Any,
) -> Auxiliary:
    model = net() if model is None else model
    return Auxiliary(
        model,
        InverseFisher.from_model(model, structure, scale=scale),
        likelihood,
        gamma=gamma,
        options=AuxiliaryOptions(**options),
        generator=torch.Generator().manual_seed(seed),
    )


@pytest.mark.slow
def test_gauge_and_loss_in_expectation() -> None:
    """At Q = αI: gauge α(Tr F/n + γ) − 1 and loss ½α²(Tr F + nγ) − nα, within 5 standard errors."""
    alpha, gamma, n = 0.7, 0.1, 21
    F = dense_fisher(net(1), X12, gaussian_fisher)
    for estimator in ("trace", "probe"):
        auxiliary = make(
            "full", "gaussian", gamma, model=net(1), scale=alpha, estimator=estimator, lr=1e-300, groups=12
        )
        draws = [auxiliary.step(X12) for _ in range(150)]
        units = n if estimator == "probe" else 1  # the probe's loss is divided by ‖u‖²
        expected_gauge = alpha * (float(F.trace()) / n + gamma) - 1
        expected_loss = (0.5 * alpha**2 * (float(F.trace()) + n * gamma) - n * alpha) / units
        for values, expected in (
            ([s.gauge for s in draws], expected_gauge),
            ([s.loss for s in draws], expected_loss),
        ):
            tensor = torch.tensor(values)
            error = float(tensor.std()) / len(draws) ** 0.5
            assert abs(float(tensor.mean()) - expected) < 5 * error
            assert error < 0.05 * abs(expected)


def test_smoothed_gauge_is_a_bias_corrected_average() -> None:
    auxiliary = make(smoothing=0.8)
    gauges: list[float] = []
    for t in range(1, 6):
        stats = auxiliary.step(X12)
        gauges.append(stats.gauge)
        weights = [0.2 * 0.8 ** (t - 1 - i) / (1 - 0.8**t) for i in range(t)]
        assert stats.step == t
        assert stats.gauge_smoothed == pytest.approx(sum(w * g for w, g in zip(weights, gauges, strict=True)))


@pytest.mark.parametrize("structure", ["full", "eigen-kronecker"])
def test_gauge_goes_to_zero_and_stops(structure: str) -> None:
    model, history = net(1), []
    auxiliary = make(structure, "gaussian", model=model, groups=12, vectorize=True, warm_start=30)
    last = auxiliary.learn([X12], 2000, tolerance=0.03, callback=history.append)
    assert last is history[-1]
    assert [s.step for s in history] == list(range(1, last.step + 1))
    assert abs(history[0].gauge) > 0.3
    assert abs(last.gauge_smoothed) < 0.03
    assert last.converged
    assert not any(s.converged for s in history[:-1])
    assert 30 <= last.step < 1000, "stopped by the limit, or before the warm start was over"
    F, loss, best = dense_fisher(model, X12, gaussian_fisher), 0.0, 0.0
    for name, layer in auxiliary.inverse.layers.items():
        F_l = packed_fisher(model, F, layer.names)
        loss += float(dense_auxiliary_loss(auxiliary.inverse.operator(name).dense().detach(), F_l, 0.1))
        best += float(dense_auxiliary_loss(damped_inverse(F_l, 0.1), F_l, 0.1))
    assert best <= loss < 0.97 * best, "the true loss is within the tolerance of the least one"


@pytest.mark.slow
def test_limits_of_learn() -> None:
    auxiliary = make("full", groups=12)
    assert auxiliary.learn([X12], 7, tolerance=1.0).step == 7
    assert auxiliary.learn([X12], 200, tolerance=0.0).step == 207, "a gauge of exactly 0 is out of reach"
    assert auxiliary.learn([X12], 50, tolerance=10.0, min_steps=9).step == 216
    assert auxiliary.learn([X12], 50, tolerance=10.0).step == 217
    first = make(estimator="trace", smoothing=0.75)  # no verdict before the averages mean something
    assert first.learn([X12], 50, tolerance=1e9).step == 8
    with pytest.raises(ValueError, match="steps must be >= 1, got 0"):
        auxiliary.learn([X12], 0)


class Loader:
    """Three batches an epoch, and a count of what was asked for."""

    def __init__(self, batches: int) -> None:
        self.batches, self.epochs, self.drawn = batches, 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.epochs += 1
        for i in range(self.batches):
            self.drawn += 1
            yield X12[4 * i : 4 * i + 4]


def test_short_loader_is_cycled() -> None:
    loader = Loader(3)
    assert make().learn(loader, 8, tolerance=0.0).step == 8
    assert (loader.epochs, loader.drawn) == (3, 8)


def test_sub_batches_take_turns() -> None:
    """Each step uses part of its batch, and steps on one batch see all of it."""
    cut, parts = make(sub_batch=4, groups=2), make(groups=2)
    for start in (0, 4, 8, 0):
        assert cut.step(X12) == parts.step(X12[start : start + 4])
    assert cut.step(X12[:3]) == parts.step(X12[:3]), "a smaller batch is used whole"


def test_adam_takes_gradients_of_any_memory_layout() -> None:
    """Adam's first step is −lr·sign(∇); the fused kernel would take a transposed gradient as it lies."""
    auxiliary = make("block", estimator="trace", lr=0.01)
    parameters, gradients = list(auxiliary.inverse.parameters()), []
    with torch.no_grad():
        for p in parameters:
            p.add_(0.3 * torch.randn_like(p))
    old = [p.detach().clone() for p in parameters]
    auxiliary._adam.register_step_pre_hook(lambda *_: gradients.extend(p.grad.clone() for p in parameters))
    auxiliary.step(X12)
    for before, after, gradient in zip(old, parameters, gradients, strict=True):
        torch.testing.assert_close(after.detach() - before, -0.01 * gradient.sign(), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_automatic_gamma_is_relative_to_the_mean_diagonal(estimator: str) -> None:
    """With one output and one h per example the mean diagonal is exact; later batches do not change it."""
    model = net(1)
    inverse = InverseFisher.from_model(model)
    options = AuxiliaryOptions(estimator=estimator, groups=12)
    auxiliary = Auxiliary(model, inverse, Gaussian(0.5), relative_damping=3.0, options=options)
    F = dense_fisher(model, X12, lambda f: gaussian_fisher(f, 0.5))
    auxiliary.step(X12)
    assert auxiliary.gamma == pytest.approx(3.0 * float(F.diagonal().mean()), rel=1e-12)
    chosen = auxiliary.gamma
    auxiliary.step(10 * X12)
    assert auxiliary.gamma == chosen


@pytest.mark.parametrize("structure", ["diagonal", "block", "full", "scaled-kronecker", "eigen-kronecker"])
def test_initial_scale_does_not_matter(structure: str) -> None:
    ends = []
    for scale in (1.0, 100.0, 1e4):
        auxiliary = make(structure, scale=scale, warm_start=20)
        auxiliary.learn([X12], 40, tolerance=0.0)
        ends.append({name: value.detach() for name, value in auxiliary.inverse.named_parameters()})
    for other in ends[1:]:
        torch.testing.assert_close(other, ends[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("structure", ["diagonal", "triangular", "kronecker", "scaled-kronecker"])
def test_initial_scale_of_the_paper(structure: str) -> None:
    """Q = I/γ, where the probe starts; each estimator but `auto` and `natural` starts from it as it is."""
    gamma = 0.02
    auxiliary = make(structure, gamma=gamma, scale=1 / gamma, estimator="probe", lr=1e-300)
    auxiliary.step(X12)
    for name, layer in auxiliary.inverse.layers.items():
        Q = auxiliary.inverse.operator(name).dense()
        torch.testing.assert_close(Q.detach(), torch.eye(math.prod(layer.shape)) / gamma)


def test_fixed_operators_are_left_as_they_are() -> None:
    for estimator in ESTIMATORS:
        auxiliary = make("identity", estimator=estimator, scale=0.3)
        stats = auxiliary.step(X12)
        assert math.isfinite(stats.gauge)
        assert all(bool((q == 0.3).all()) for q in auxiliary.inverse.diag().values())


@pytest.mark.parametrize(
    ("estimator", "cut"), [*(("auto", c) for c in (3, 14, 30)), ("trace", 5), ("probe", 5)]
)
def test_resume_is_bit_exact(estimator: str, cut: int, tmp_path: Path) -> None:
    """Saved in the eigenbasis part (< 10), in the middle of the warm start (< 20) and after it."""
    batches = [X12[i : i + 6] for i in (0, 3, 6)]
    whole = make(gamma=None, estimator=estimator, warm_start=20)
    statistics = [whole.step(batches[i % 3]) for i in range(cut + 20)]
    first = make(gamma=None, estimator=estimator, warm_start=20)
    for i in range(cut):
        first.step(batches[i % 3])
    torch.save({"q": first.inverse.state_dict(), "auxiliary": first.state_dict()}, tmp_path / "state.pt")
    second = make(gamma=None, estimator=estimator, warm_start=20, seed=9, scale=5.0)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    second.inverse.load_state_dict(state["q"])
    second.load_state_dict(state["auxiliary"])
    assert [second.step(batches[i % 3]) for i in range(cut, cut + 20)] == statistics[cut:]
    assert identical(second.inverse.state_dict(), whole.inverse.state_dict())
    assert identical(second.state_dict(), whole.state_dict())


def test_layers_take_turns_with_adam() -> None:
    """With refine_every=2 each step moves the bases of every other layer, and E² of all."""
    auxiliary = make("ekfac", warm_start=3, refine_every=2)
    for _ in range(4):  # warm start; in the first step after it every layer has its turn
        auxiliary.step(X12)
    moved = []
    for _ in range(4):
        before = {name: p.detach().clone() for name, p in auxiliary.inverse.named_parameters()}
        stats = auxiliary.step(X12)
        assert math.isfinite(stats.gauge)
        changed = {n for n, p in auxiliary.inverse.named_parameters() if not torch.equal(p, before[n])}
        assert sum("log_e" in name for name in changed) == 2
        moved.append({name.split(".")[1] for name in changed if name.endswith("matrix")})
    assert moved[0] == moved[2] != moved[1] == moved[3]
    assert all(len(layers) == 1 for layers in moved)


@pytest.mark.parametrize("structure", ["ekfac", "diagonal"])
def test_a_warm_start_does_not_depend_on_how_often_its_loss_is_looked_at(
    structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    often, seldom = (make(structure, warm_start=20, refine_every=every) for every in (1, 4))
    kind, looks = type(often.inverse.operator("0")), []
    terms = kind.loss_terms
    monkeypatch.setattr(kind, "loss_terms", lambda self, V: looks.append(1) or terms(self, V))
    counts = []
    for auxiliary in (often, seldom):
        looks.clear()
        for _ in range(12):
            auxiliary.step(X12)
        counts.append(len(looks))
    assert counts == [2 * 12, 2 * 12 // 4 + 1]  # two layers; the first step looks at both
    assert identical(often.inverse.state_dict(), seldom.inverse.state_dict())
    assert torch.equal(often.generator.get_state(), seldom.generator.get_state())


def test_reconfigured_learning_goes_on() -> None:
    auxiliary = make("ekfac", warm_start=3)
    for _ in range(4):
        auxiliary.step(X12)
    auxiliary.reconfigure(groups=2, eta_floor=0.5)
    assert auxiliary.step(X12).step == 5
    assert auxiliary.warm
    with pytest.raises(ValueError, match="refine_every must be a whole number >= 1, got 0"):
        auxiliary.reconfigure(refine_every=0)


def test_q_is_learned_from_the_batches_that_count() -> None:
    model, data = net_with_dropout(), training_batches()
    empty = (data[0][0], torch.full((32,), -100))
    learning = Auxiliary(model, InverseFisher.from_model(model), "categorical")
    seen: list[Any] = []
    learning.learn([empty, *data], steps=6, callback=seen.append, min_steps=6)
    assert len(seen) == 5
    with pytest.raises(AllIgnoredError, match="none of 3 batches has a label that counts"):
        Auxiliary(model, InverseFisher.from_model(model), "categorical").learn([empty], steps=3)


def test_vectorized_groups_of_a_short_batch() -> None:
    model = net_6_10_4()
    options = AuxiliaryOptions(groups=4, vectorize=True)
    auxiliary = Auxiliary(model, InverseFisher.from_model(model), gamma=0.1, options=options)
    assert auxiliary.step(inputs_6(1, 6)[0]).step == 1
