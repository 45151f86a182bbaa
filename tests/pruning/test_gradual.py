"""Pruning with training in between: zeros last, Q goes on learning, and nothing else is touched."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import (
    DIGITS_WEIGHTS,
    QUICK,
    QUICK_GRADUAL,
    QUICKER,
    SHORT_TRAINING,
    Batch,
    changed,
    labelled_6,
    labelled_8,
    net_6_10_4,
    net_6_12_8,
    net_8_16_4,
    prune_with,
    quiet,
    run_gradually,
    state_copy,
    training_batches,
)
from oracles import identical
from torch import Tensor, nn

import fishleg
from fishleg import AuxiliaryOptions, FineTuningOptions, PruningOptions, PruningSession, Surgeon, attach
from fishleg.options.names import OPTIMIZERS
from fishleg.pruning import Event, FineTuner, Pruned, StageDone, TrainingStep
from fishleg.workloads.digits_net import DigitsNet

MAGNITUDE = PruningOptions(method="magnitude")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", ["fishleg", "magnitude", "obert"])
def test_zeros_last_after_every_step(optimizer: str, method: str, model: DigitsNet, loader: Any) -> None:
    options = PruningOptions(**QUICK_GRADUAL, method=method)
    tuning = FineTuningOptions(optimizer=optimizer, weight_decay=0.01, **SHORT_TRAINING)
    session = PruningSession(model, loader, options=options, fine_tuning=tuning)
    surgeon = session.surgeon
    places: list[TrainingStep] = []
    pruned: list[dict[str, Tensor]] = []
    last: dict[str, Tensor] = {}
    for event in session.run([0.4, 0.7]):
        if isinstance(event, Pruned):
            assert not model.training
            for name, mask in surgeon.masks.items():
                assert not pruned or not bool((mask & ~pruned[-1][name]).any())
                assert torch.equal(model.get_parameter(name) == 0, ~mask)
            pruned.append(surgeon.masks)
        elif isinstance(event, TrainingStep):
            assert model.training
            assert math.isfinite(event.loss)
            places.append(event)
            for name, mask in surgeon.masks.items():
                weight = model.get_parameter(name).detach()
                assert torch.equal(weight == 0, ~mask), name
                assert not torch.equal(weight, last[name]), name
        elif isinstance(event, StageDone):
            assert not model.training
            assert surgeon.masks is pruned[-1]
            assert event.step is surgeon.history[-1]
        last.update(state_copy(model))
    steps = surgeon.history
    assert [step.removed for step in steps] == [
        round(0.4 * DIGITS_WEIGHTS),
        round(0.7 * DIGITS_WEIGHTS) - round(0.4 * DIGITS_WEIGHTS),
    ]
    zeros = sum(int((p == 0).sum()) for p in model.parameters() if p.dim() > 1)
    assert zeros == round(0.7 * DIGITS_WEIGHTS)
    assert [(p.stage, p.step) for p in places] == [(stage, step + 1) for stage in (1, 2) for step in range(4)]
    assert {(p.stages, p.steps) for p in places} == {(2, 4)}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("optimizer", ["fishleg", "adam"])
def test_n_of_m_holds_exactly_at_the_end(optimizer: str, model: DigitsNet, loader: Any) -> None:
    options = PruningOptions(**QUICK_GRADUAL, pattern="2:4")
    tuning = FineTuningOptions(optimizer=optimizer, **SHORT_TRAINING)
    surgeon = run_gradually(model, loader, [0.3, 0.5], tuning, options)
    assert surgeon.weights.names == ["conv2.weight", "conv3.weight", "linear.weight"]
    for name in surgeon.weights.names:
        kept = model.get_parameter(name) != 0
        assert bool((kept.movedim(1, -1).reshape(-1, 4).sum(1) == 2).all()), name


def test_rows_keep_their_bias_at_zero() -> None:
    model = net_6_12_8(4)
    options = PruningOptions(**QUICK_GRADUAL, pattern="rows")
    tuning = FineTuningOptions(optimizer="sgd", **SHORT_TRAINING)
    run_gradually(model, training_batches(4), [0.25, 0.5], tuning, options)
    gone = [~model[i].weight.any(1) for i in (0, 2)]
    assert int(torch.cat(gone).sum()) == 10
    assert all(torch.equal(model[i].bias == 0, rows) for i, rows in zip((0, 2), gone, strict=True))


@pytest.mark.parametrize("optimizer", ["fishleg", "adam"])
def test_q_is_refined_and_never_restarted(optimizer: str, model: DigitsNet, loader: Any) -> None:
    tuning = FineTuningOptions(optimizer=optimizer, **SHORT_TRAINING)
    session = PruningSession(model, loader, options=PruningOptions(**QUICK_GRADUAL), fine_tuning=tuning)
    surgeon, seen = session.surgeon, []
    for event in session.run([0.3, 0.5]):
        if isinstance(event, (Pruned, StageDone)):
            assert surgeon.curvature.learning is not None
            steps = surgeon.curvature.learning.steps
            seen.append((surgeon.curvature.learning, surgeon.curvature.inverse, steps))
    learning, inverse, _ = seen[0]
    assert all(a is learning and b is inverse for a, b, _ in seen)
    assert surgeon.curvature.learning is learning
    assert surgeon.curvature.learning.inverse is surgeon.curvature.inverse is inverse
    # 16 samples by fours, and three to refine between three cuts; one auxiliary step every two of training;
    # three to refine before the next pruning, and again between its cuts
    assert [steps for _, _, steps in seen] == [4 + 6, 10 + 2, 12 + 3 + 6, 21 + 2]


@pytest.mark.parametrize(
    ("options", "ratio"),
    [
        ({}, 10.0),
        ({"pattern": "2:4", "include": ["2"]}, 10.0),
        ({"mask_search_rounds": 0}, 1.0),
        ({"compensation": "sum"}, 1.0),
        ({"pattern": "rows"}, 1.0),
        ({"method": "obert"}, 1.0),
    ],
)
@pytest.mark.parametrize("way", ["gradual", "attach"])
def test_mask_search_in_a_converged_model_uses_less_damping(
    options: dict[str, Any], ratio: float, way: str
) -> None:
    still = net_6_12_8(4)
    moving, data, gammas = copy.deepcopy(still), training_batches(4), []
    chosen = PruningOptions(**options, samples=8)
    for model in (still, moving):
        if model is still:
            surgeon = Surgeon(model, data, options=chosen)
        elif way == "gradual":
            surgeon = PruningSession(
                model, data, options=chosen, fine_tuning=FineTuningOptions(steps=1)
            ).surgeon
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            surgeon = attach(model, data, optimizer, [0.5], every=1, options=chosen).session.surgeon
        surgeon.update_inverse()
        gammas.append(surgeon.curvature.gamma)
    assert gammas[1] == pytest.approx(ratio * gammas[0])


@pytest.mark.parametrize("trained", [False, True])
def test_a_damping_that_is_asked_for_holds_throughout(trained: bool) -> None:
    data, gammas = training_batches(4), []
    model = net_6_12_8(4)
    for damping in (0.3, 0.6):
        options = PruningOptions(relative_damping=damping, samples=8)
        surgeon = Surgeon(copy.deepcopy(model), data, options=options, trained=trained)
        surgeon.update_inverse()
        gammas.append(surgeon.curvature.gamma)
    assert gammas[1] == pytest.approx(2 * gammas[0])


def test_methods_that_do_not_learn_estimate_afresh(model: DigitsNet, loader: Any) -> None:
    tuning = FineTuningOptions(optimizer="sgd", **SHORT_TRAINING)
    options = PruningOptions(**QUICK_GRADUAL, method="diagonal")
    session = PruningSession(model, loader, options=options, fine_tuning=tuning)
    surgeon = session.surgeon
    pruned = (event for event in session.run([0.3, 0.5]) if isinstance(event, Pruned))
    seen = [surgeon.curvature.inverse for _ in pruned]
    assert seen[0] is not seen[1]
    assert surgeon.curvature.learning is None


@pytest.mark.parametrize("optimizer", ["fishleg", "sgd"])
def test_vectorised_learning_can_go_on(optimizer: str) -> None:
    auxiliary = AuxiliaryOptions(vectorize=True, groups=4, warm_start=2)
    options = PruningOptions(**QUICK_GRADUAL, auxiliary=auxiliary)
    tuning = FineTuningOptions(optimizer=optimizer, **SHORT_TRAINING)
    surgeon = run_gradually(net_6_12_8(4), training_batches(4), [0.5], tuning, options)
    assert surgeon.sparsity == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["fishleg", "sgd"])
def test_same_seed_same_result(optimizer: str, trained: DigitsNet, loader: Any) -> None:
    results = []
    for seed in (1, 1, 2):
        model, generator = copy.deepcopy(trained), torch.Generator().manual_seed(seed)
        tuning = FineTuningOptions(optimizer=optimizer, **SHORT_TRAINING)
        options = PruningOptions(**QUICK_GRADUAL)
        session = PruningSession(model, loader, options=options, fine_tuning=tuning, generator=generator)
        losses = [event.loss for event in session.run([0.3, 0.6]) if isinstance(event, TrainingStep)]
        results.append((state_copy(model), session.surgeon.masks, losses))
    assert identical(results[0], results[1])
    assert not identical(results[0], results[2])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("optimizer", ["fishleg", "sgd"])
def test_frozen_parameters_and_modes_stay(
    training: bool, optimizer: str, model: DigitsNet, loader: Any
) -> None:
    model.train(training)
    model.bn1.train(not training)
    frozen = {"conv2.weight", "bn3.bias"}
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    modes, before = [module.training for module in model.modules()], state_copy(model)
    tuning = FineTuningOptions(optimizer=optimizer, weight_decay=0.1, **SHORT_TRAINING)
    run_gradually(model, loader, [0.3, 0.5], tuning, PruningOptions(**QUICK_GRADUAL))
    assert [module.training for module in model.modules()] == modes
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == frozen
    parameters = {name for name, _ in model.named_parameters()}
    assert changed(model, before) & parameters == parameters - frozen


@pytest.mark.parametrize("optimizer", ["fishleg", "sgd"])
def test_a_batchnorm_frozen_in_a_training_model_stays(optimizer: str, model: DigitsNet, loader: Any) -> None:
    model.train()
    model.bn2.eval()
    before = state_copy(model)

    def check(event: Event) -> None:
        if isinstance(event, TrainingStep):
            assert (model.bn1.training, model.bn2.training) == (True, False)

    tuning = FineTuningOptions(optimizer=optimizer, **SHORT_TRAINING)
    run_gradually(model, loader, [0.3, 0.5], tuning, PruningOptions(**QUICK_GRADUAL), check)
    kept = {name for name in before if "bn2.running" in name or "bn2.num" in name}
    assert len(kept) == 3
    assert not changed(model, before) & kept
    assert {"bn1.running_mean", "bn3.running_mean"} <= changed(model, before)


@pytest.mark.slow
def test_modes_are_restored_after_an_error(model: DigitsNet, loader: Any) -> None:
    def fail(event: Event) -> None:
        if isinstance(event, TrainingStep):
            raise KeyboardInterrupt

    for training in (True, False):
        model.train(training)
        with pytest.raises(KeyboardInterrupt):
            run_gradually(model, loader, [0.3], FineTuningOptions(**SHORT_TRAINING), MAGNITUDE, fail)
        assert all(module.training is training for module in model.modules())


def test_training_batches_may_come_from_elsewhere(model: DigitsNet, loader: Any) -> None:
    """The surgeon sees inputs alone; an exact count of training batches says which loader was used."""
    drawn = []

    class Training:
        def __iter__(self) -> Iterator[Batch]:
            for batch in loader:
                drawn.append(batch)
                yield batch

    tuning = FineTuningOptions(optimizer="sgd", steps=6)
    run_gradually(model, [x for x, _ in loader], [0.5], tuning, MAGNITUDE, train_loader=Training())
    assert len(drawn) == 6


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", ["fishleg", "magnitude"])
def test_own_forward(optimizer: str, method: str) -> None:
    batches = [{"features": x, "labels": y} for x, y in training_batches(4)]
    options = PruningOptions(**QUICK_GRADUAL, method=method)
    tuning = FineTuningOptions(optimizer=optimizer, **SHORT_TRAINING)
    surgeon = run_gradually(
        net_6_12_8(4), batches, [0.5], tuning, options, forward=lambda m, b: m(b["features"])
    )
    assert surgeon.sparsity == 0.5


@pytest.mark.parametrize(
    ("sparsities", "message"),
    [
        ([], "at least one sparsity, got an empty list"),
        ([0.5, 0.4], "sparsities must rise, got 0.5 before 0.4"),
        ([0.5, 1.0], r"sparsity must be in \(0, 1\), got 1.0"),
    ],
)
def test_wrong_schedules_change_nothing(sparsities: list[float], message: str) -> None:
    model = net_6_12_8(4)
    before, options = state_copy(model), PruningOptions(**QUICK_GRADUAL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        run_gradually(model, training_batches(4), sparsities, FineTuningOptions(**SHORT_TRAINING), options)
    with pytest.raises(ValueError, match=message):
        attach(model, training_batches(4), optimizer, sparsities, every=1, options=options)
    assert not changed(model, before)
    assert not optimizer._optimizer_step_post_hooks


def test_a_model_that_was_pruned_by_a_given_inverse_can_be_trained() -> None:
    surgeon = Surgeon(net_6_10_4(), labelled_6(), options=PruningOptions(**QUICK), trained=True)
    tuner = FineTuner(surgeon, labelled_6(), FineTuningOptions(steps=3))
    surgeon.prune(0.5, inverse=surgeon.update_inverse())
    tuner.start()
    tuner.begin_stage()
    assert len(list(tuner.train())) == 3


def test_a_schedule_that_cannot_be_met_is_refused_before_it_starts() -> None:
    targets = [0.2, 0.4, 0.6]
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    data = [(torch.randn(16, 8), torch.randint(4, (16,)))]
    options = PruningOptions(**QUICKER, pattern="2:4")
    session = PruningSession(model, data, options=options)
    with pytest.raises(ValueError, match=r"sparsity of 0\.5 at most, got 0\.6"):
        run_gradually(model, data, targets, FineTuningOptions(), options)
    with pytest.raises(ValueError, match=r"sparsity of 0\.5 at most, got 0\.6"):
        attach(model, data, torch.optim.SGD(model.parameters(), lr=0.1), targets, every=1, options=options)
    with pytest.raises(ValueError, match=r"sparsity of 0\.5 at most, got 0\.6"):
        next(session.run(targets))
    assert not session.surgeon.history


def test_zeros_of_excluded_layers_last_too() -> None:
    sparse = fishleg.prune(
        net_8_16_4(), labelled_8(), 0.6, method="magnitude", mode="one-shot", progress=quiet
    )
    zero = sparse.get_parameter("2.weight") == 0
    assert bool(zero.any())
    for optimizer in ("sgd", "fishleg"):
        again = prune_with(
            sparse, labelled_8(), 0.8, exclude=["^2"], samples=16, mode="gradual", stages=1,
            fine_tuning=FineTuningOptions(optimizer=optimizer, steps=2),
        )  # fmt: skip
        now = again.get_parameter("2.weight")
        assert torch.equal(now == 0, zero)
        assert not torch.equal(now, sparse.get_parameter("2.weight"))  # it was trained
