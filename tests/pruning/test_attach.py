"""Pruning in one's own training loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers import (
    QUICK,
    QUICK_DIGITS,
    inputs_6,
    inputs_8,
    labelled_8,
    net_6_10_4,
    net_6_12_8,
    net_8_16_4,
    one_sgd_per_layer,
    prune_by_magnitude,
    quiet,
    state_copy,
    train_8,
    training_batches,
    zeros_of,
)
from oracles import identical
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import fishleg
from fishleg import FishLeg, PruningOptions, Surgeon, attach
from fishleg.pruning import AttachedPruning, Event, Pruned

DIGITS, MAGNITUDE = PruningOptions(**QUICK_DIGITS), PruningOptions(method="magnitude")

OPTIMIZERS_OF_ONES_OWN: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "fishleg": lambda m: FishLeg(m, lr=0.1, weight_decay=0.1, update_every=2),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, check: Callable[[], None]) -> None:
    batches = training_batches(4)
    for i in range(steps):
        x, y = batches[i % len(batches)]
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        check()


@pytest.mark.parametrize("name", OPTIMIZERS_OF_ONES_OWN)
@pytest.mark.parametrize(("method", "start", "due"), [("fishleg", 0, [1, 4, 7]), ("obert", 2, [3, 6, 9])])
def test_attach_prunes_when_it_is_due(name: str, method: str, start: int, due: list[int]) -> None:
    """Steps are counted from 0: start=0 prunes after the first."""
    model = net_6_12_8(4)
    optimizer = OPTIMIZERS_OF_ONES_OWN[name](model)
    pruned_at: list[int] = []
    done = 0

    def note(event: Event) -> None:
        if isinstance(event, Pruned):
            pruned_at.append(done + 1)

    def check() -> None:
        nonlocal done
        done += 1
        kept = surgeon.masks
        assert all(torch.equal(model.get_parameter(key) == 0, ~mask) for key, mask in kept.items())
        assert len(surgeon.history) == sum(step <= done for step in due)

    surgeon = attach(
        model, training_batches(4), optimizer, [0.25, 0.5, 0.75], every=3, start=start, on_event=note,
        options=PruningOptions(**QUICK_DIGITS, method=method),
    ).session.surgeon  # fmt: skip
    train(model, optimizer, 12, check)
    assert pruned_at == due
    zeros = sum(int((p == 0).sum()) for p in model.parameters() if p.dim() > 1)
    assert zeros == round(0.75 * (72 + 96 + 32))
    assert [step.target for step in surgeon.history] == [0.25, 0.5, 0.75]


def test_attach_prunes_by_a_q_of_the_surgeons_own() -> None:
    """FishLeg's is damped for steps, and at the first of them has learned nothing yet."""
    model = net_6_12_8(4)
    optimizer = FishLeg(model, lr=0.1)
    attached = attach(model, training_batches(4), optimizer, [0.3, 0.5], every=2, options=DIGITS)
    surgeon = attached.session.surgeon
    train(model, optimizer, 4, lambda: None)
    assert surgeon.curvature.inverse is not None
    assert surgeon.curvature.inverse is not optimizer.inverse
    assert all(step.gamma == surgeon.curvature.gamma > 0 for step in surgeon.history)


@pytest.mark.parametrize("name", OPTIMIZERS_OF_ONES_OWN)
def test_attach_keeps_the_zeros_that_there_are(name: str) -> None:
    """From before it was attached, at every step, long before the next pruning is due."""
    model = net_6_12_8(4)
    surgeon = Surgeon(model, training_batches(4), options=DIGITS)
    surgeon.prune(0.5)
    optimizer = OPTIMIZERS_OF_ONES_OWN[name](model)

    def check() -> None:
        assert all(torch.equal(model.get_parameter(n) == 0, ~mask) for n, mask in surgeon.masks.items())

    attached = attach(model, training_batches(4), optimizer, [0.7], every=10, start=5, options=DIGITS)
    train(model, optimizer, 3, check)
    assert not attached.session.surgeon.history


@pytest.mark.parametrize("name", OPTIMIZERS_OF_ONES_OWN)
def test_attach_can_be_removed(name: str) -> None:
    model = net_6_12_8(4)
    optimizer = OPTIMIZERS_OF_ONES_OWN[name](model)
    attached = attach(model, training_batches(4), optimizer, [0.3, 0.6], every=2, options=DIGITS)
    train(model, optimizer, 2, lambda: None)
    attached.remove()
    train(model, optimizer, 4, lambda: None)
    surgeon = attached.session.surgeon
    assert len(surgeon.history) == 1
    assert surgeon.sparsity == 0.3


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS_OF_ONES_OWN)
@pytest.mark.parametrize(("method", "start", "stop"), [("fishleg", 0, 4), ("fishleg", 2, 5), ("obert", 1, 1)])
def test_attach_goes_on_after_a_restart(name: str, method: str, start: int, stop: int) -> None:
    """Stopped at any step and loaded into new objects, it ends with the bits of an undisturbed run."""
    data, given, schedule = training_batches(4), net_6_12_8(4), [0.25, 0.5, 0.75]

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, AttachedPruning]:
        model = copy.deepcopy(given)
        optimizer = OPTIMIZERS_OF_ONES_OWN[name](model)
        options = PruningOptions(**QUICK_DIGITS, method=method)
        return (
            model,
            optimizer,
            attach(model, data, optimizer, schedule, every=3, start=start, options=options),
        )

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for i in range(first, last):
            x, y = data[i % len(data)]
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    model, optimizer, _ = begin()
    steps(model, optimizer, 0, 12)
    undisturbed = state_copy(model)

    parts = begin()
    steps(parts[0], parts[1], 0, stop)
    saved = copy.deepcopy([part.state_dict() for part in parts])
    model, optimizer, attached = begin()
    for part, values in zip((model, optimizer, attached), saved, strict=True):
        part.load_state_dict(values)
    assert attached.steps == stop
    assert identical(attached.state_dict(), saved[2])
    steps(model, optimizer, stop, 12)
    surgeon = attached.session.surgeon
    assert [step.target for step in surgeon.history] == schedule
    assert identical(state_copy(model), undisturbed)


@pytest.mark.parametrize(("every", "start"), [(0, 0), (-1, 0), (1, -1)])
def test_attach_with_wrong_numbers(every: int, start: int) -> None:
    model = net_6_12_8(4)
    optimizer = OPTIMIZERS_OF_ONES_OWN["sgd"](model)
    with pytest.raises(ValueError, match=f"every must be >= 1 and start >= 0, got {every} and {start}"):
        attach(model, training_batches(4), optimizer, [0.5], every=every, start=start)


def test_attach_goes_on_after_a_restart_with_a_shuffled_loader() -> None:
    """The measuring of a step has random numbers of its own."""
    x = torch.cat(inputs_8())
    given, schedule = net_8_16_4(), [0.4, 0.6]

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[tuple[Tensor, ...]], AttachedPruning]:
        model = copy.deepcopy(given)
        loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=32, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        options = PruningOptions(samples=16)
        return model, optimizer, loader, attach(model, loader, optimizer, schedule, every=4, options=options)

    def run(stop: int | None) -> tuple[Tensor, list[float | None]]:
        model, optimizer, loader, attached = begin()
        torch.manual_seed(5)
        for epoch in range(3):
            if epoch == stop:
                parts = (model, optimizer, attached)
                saved, state = copy.deepcopy([p.state_dict() for p in parts]), torch.get_rng_state()
                model, optimizer, loader, attached = begin()
                for part, values in zip((model, optimizer, attached), saved, strict=True):
                    part.load_state_dict(values)
                torch.set_rng_state(state)
            for a, b in loader:
                optimizer.zero_grad()
                functional.cross_entropy(model(a), b).backward()
                optimizer.step()
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        return weights, [step.measured for step in attached.session.surgeon.history]

    (weights, measured), (again, measured_again) = run(None), run(1)
    assert torch.equal(weights, again)
    assert measured == measured_again


@pytest.mark.parametrize("kind", ["sgd", "fishleg"])
def test_zeros_of_excluded_layers_last_under_attach(kind: str) -> None:
    model = fishleg.prune(
        net_8_16_4(), labelled_8(), 0.6, method="magnitude", mode="one-shot", progress=quiet
    )
    zero = model.get_parameter("2.weight") == 0
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.1)
        if kind == "sgd"
        else FishLeg(model, "categorical", lr=0.1)
    )
    options = PruningOptions(exclude=["^2"], samples=16)
    attached = attach(model, labelled_8(), optimizer, [0.7, 0.8], every=3, start=2, options=options)
    for x, y in labelled_8() * 2:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert torch.equal(model.get_parameter("2.weight") == 0, zero)
    assert attached.session.surgeon.masks.keys() == {"0.weight"}


@pytest.mark.parametrize("kind", ["sgd", "fishleg"])
def test_attach_needs_every_optimizer_and_counts_the_steps_of_the_first(kind: str) -> None:
    model = net_8_16_4()
    first, second = one_sgd_per_layer(model)
    with pytest.raises(ValueError, match=r"does not have 2\.weight"):
        attach(model, inputs_8(3), first, [0.5], every=1, options=MAGNITUDE)
    assert not first._optimizer_step_post_hooks
    if kind == "fishleg":
        second = FishLeg(model, params=list(model[2].parameters()), lr=0.1)
    attached = attach(model, inputs_8(3), [first, second], [0.3, 0.5], every=2, options=MAGNITUDE)
    surgeon = attached.session.surgeon
    train_8(model, first, second)
    assert [step.target for step in surgeon.history] == [0.3, 0.5]
    train_8(model, first, second)
    assert all(torch.equal(zero, ~surgeon.masks[name]) for name, zero in zeros_of(model).items())
    attached.remove()
    assert not first._optimizer_step_post_hooks
    assert not second._optimizer_step_post_hooks


def test_attach_needs_the_optimizer_of_excluded_layers_with_zeros() -> None:
    model = prune_by_magnitude(net_8_16_4(), 0.5)
    options = PruningOptions(method="magnitude", exclude=["2"])
    first, second = one_sgd_per_layer(model)
    with pytest.raises(ValueError, match=r"does not have 2\.weight"):
        attach(model, inputs_8(3), first, [0.8], every=1, options=options)
    attach(model, inputs_8(3), (first, second), [0.8], every=1, options=options)


def test_a_pruning_that_fails_is_due_again_at_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prune_by_magnitude(net_8_16_4(), 0.2)
    before = zeros_of(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    attached = attach(model, inputs_8(3), optimizer, [0.3, 0.5], every=4, options=MAGNITUDE)
    surgeon = attached.session.surgeon
    with monkeypatch.context() as broken:
        broken.setattr(surgeon, "update_inverse", lambda: [].pop())
        with pytest.raises(IndexError):
            train_8(model, optimizer, steps=1)
    assert all(torch.equal(now, before[name]) for name, now in zeros_of(model).items())
    reached = []
    for _ in range(5):
        train_8(model, optimizer, steps=1)
        reached.append(len(surgeon.history))
    assert reached == [1, 1, 1, 2, 2]
    assert [step.target for step in surgeon.history] == [0.3, 0.5]


@pytest.mark.parametrize("kind", ["sgd", "fishleg"])
def test_zeros_of_a_pruned_model_last_before_the_first_pruning(kind: str) -> None:
    model = prune_by_magnitude(net_8_16_4(), 0.5)
    before = zeros_of(model)
    optimizer = (
        FishLeg(model, lr=0.1)
        if kind == "fishleg"
        else torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    )
    options = PruningOptions(**QUICK)
    attached = attach(model, inputs_8(3), optimizer, [0.8], every=9, start=2, options=options)
    train_8(model, optimizer, steps=2)
    assert all(torch.equal(now, before[name]) for name, now in zeros_of(model).items())
    train_8(model, optimizer, steps=1)
    assert attached.session.surgeon.sparsity == pytest.approx(0.8, abs=0.003)
    assert all(bool(zeros_of(model)[name][zero].all()) for name, zero in before.items())


def test_single_zeros_are_not_taken_for_pruned() -> None:
    model = net_8_16_4()
    with torch.no_grad():
        model[0].weight[0, 0] = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, inputs_8(3), optimizer, [0.5], every=9, start=5, options=MAGNITUDE)
    train_8(model, optimizer)
    assert not bool(zeros_of(model)["0.weight"].any())


def test_zeros_of_an_initialisation_are_free_and_pruned_zeros_are_kept_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = net_8_16_4()
    nn.init.eye_(model[0].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, inputs_8(3), optimizer, [0.5], every=1, options=replace(MAGNITUDE, exclude=["0"]))
    assert not caplog.text
    train_8(model, optimizer)
    assert float(zeros_of(model)["0.weight"].double().mean()) < 0.5

    model = prune_by_magnitude(net_8_16_4(), 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = zeros_of(model)["0.weight"]
    attach(model, inputs_8(3), optimizer, [0.8], every=1, options=replace(MAGNITUDE, exclude=["0"]))
    assert "the zeros of 0.weight are taken for pruned and will be kept" in caplog.text
    train_8(model, optimizer)
    assert torch.equal(zeros_of(model)["0.weight"], before)


def test_the_optimizer_of_another_model_is_refused() -> None:
    model = net_6_10_4()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparse = fishleg.prune(
        model, inputs_6(), 0.5, options=PruningOptions(**QUICK), progress=lambda line: None
    )
    with pytest.raises(ValueError, match="it belongs to another model"):
        fishleg.keep_zeros(sparse, optimizer)
    with pytest.raises(ValueError, match="it belongs to another model"):
        attach(sparse, inputs_6(), optimizer, [0.9], every=2)
