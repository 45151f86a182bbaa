"""Pruning with training in between: zeros last, Q goes on learning, and nothing else is touched."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracles import identical
from torch import Tensor, nn
from torch.nn import functional
from trained import trained_digits

from fishleg.curvature.likelihoods import Categorical, Gaussian, Likelihood
from fishleg.inverse.options import AuxiliaryOptions
from fishleg.optim.fishleg import FishLeg
from fishleg.pruning.attach import attach
from fishleg.pruning.gradual import Gradual, Progress, gradual
from fishleg.pruning.surgeon import PruneStep, Surgeon
from fishleg.pruning.tuning import OPTIMIZERS, FineTuningOptions
from fishleg.workloads.digits import split_digits
from fishleg.workloads.digits_net import DigitsNet

TOTAL = 72 + 1152 + 4608 + 320
QUICK: dict[str, Any] = {"samples": 16, "sub_batch": 8, "batchnorm_batches": 2}
SHORT: dict[str, Any] = {"steps": 4, "update_every": 2, "refine": 3}
Batch = tuple[Tensor, Tensor]


@pytest.fixture(scope="module")
def trained() -> DigitsNet:
    return trained_digits(3)


@pytest.fixture
def model(trained: DigitsNet) -> DigitsNet:
    return copy.deepcopy(trained)


@pytest.fixture(scope="module")
def loader() -> list[Batch]:
    images, labels, _, _ = split_digits()
    return list(zip(images[:640].split(64), labels[:640].split(64), strict=True))


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def changed(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))


def examples() -> list[Batch]:
    inputs = torch.randn(4, 32, 6, generator=torch.Generator().manual_seed(0))
    return [(x, x[:, :4].argmax(1)) for x in inputs]


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    _, _, images, labels = split_digits()
    return float(functional.cross_entropy(model(images), labels))


# --- zeros and counts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", ["fishleg", "magnitude", "obert"])
def test_zeros_last_after_every_step(optimizer: str, method: str, model: DigitsNet, loader: Any) -> None:
    surgeon = Surgeon(model, loader, method=method, **QUICK)
    places: list[Progress] = []
    pruned: list[dict[str, Tensor]] = []
    last: dict[str, Tensor] = {}

    def on_prune(step: PruneStep) -> None:
        assert not model.training
        for name, mask in surgeon.masks.items():
            assert not pruned or not bool((mask & ~pruned[-1][name]).any())
            assert torch.equal(model.get_parameter(name) == 0, ~mask)
        pruned.append(surgeon.masks)
        last.update(state(model))

    def on_step(progress: Progress) -> None:
        assert model.training
        assert math.isfinite(progress.loss)
        places.append(progress)
        for name, mask in surgeon.masks.items():
            weight = model.get_parameter(name).detach()
            assert torch.equal(weight == 0, ~mask), name
            assert not torch.equal(weight, last[name]), name
        last.update(state(model))

    def on_stage(step: PruneStep) -> None:
        assert not model.training
        assert surgeon.masks is pruned[-1]

    tuning = FineTuningOptions(optimizer=optimizer, weight_decay=0.01, **SHORT)
    steps = gradual(surgeon, [0.4, 0.7], tuning=tuning, on_prune=on_prune, on_step=on_step, on_stage=on_stage)
    assert steps == surgeon.history
    assert [step.removed for step in steps] == [round(0.4 * TOTAL), round(0.7 * TOTAL) - round(0.4 * TOTAL)]
    zeros = sum(int((p == 0).sum()) for p in model.parameters() if p.dim() > 1)
    assert zeros == round(0.7 * TOTAL)
    assert [(p.stage, p.step) for p in places] == [(stage, step + 1) for stage in (0, 1) for step in range(4)]
    assert {(p.stages, p.steps) for p in places} == {(2, 4)}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("optimizer", ["fishleg", "adam"])
def test_n_of_m_holds_exactly_at_the_end(optimizer: str, model: DigitsNet, loader: Any) -> None:
    surgeon = Surgeon(model, loader, pattern="2:4", **QUICK)
    gradual(surgeon, [0.3, 0.5], tuning=FineTuningOptions(optimizer=optimizer, **SHORT))
    assert surgeon.prunable == ["conv2.weight", "conv3.weight", "linear.weight"]
    for name in surgeon.prunable:
        kept = model.get_parameter(name) != 0
        assert bool((kept.movedim(1, -1).reshape(-1, 4).sum(1) == 2).all()), name


def test_rows_keep_their_bias_at_zero() -> None:
    model = mlp()
    surgeon = Surgeon(model, examples(), pattern="rows", **QUICK)
    gradual(surgeon, [0.25, 0.5], tuning=FineTuningOptions(optimizer="sgd", **SHORT))
    gone = [~model[i].weight.any(1) for i in (0, 2)]
    assert int(torch.cat(gone).sum()) == 10
    assert all(torch.equal(model[i].bias == 0, rows) for i, rows in zip((0, 2), gone, strict=True))


# --- Q ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["fishleg", "adam"])
def test_q_is_refined_and_never_restarted(optimizer: str, model: DigitsNet, loader: Any) -> None:
    surgeon = Surgeon(model, loader, **QUICK)
    seen: list[tuple[object, object, int]] = []

    def look(_: object) -> None:
        assert surgeon.learning is not None
        seen.append((surgeon.learning, surgeon.inverse, surgeon.learning.steps))

    tuning = FineTuningOptions(optimizer=optimizer, **SHORT)
    gradual(surgeon, [0.3, 0.5], tuning=tuning, on_prune=look, on_stage=look)
    learning, inverse, _ = seen[0]
    assert all(a is learning and b is inverse for a, b, _ in seen)
    assert surgeon.learning is learning
    assert surgeon.learning.inverse is surgeon.inverse is inverse
    # 16 samples by fours, and three to refine between three cuts; one auxiliary step every two of training;
    # three to refine before the next pruning, and again between its cuts
    assert [steps for _, _, steps in seen] == [4 + 6, 10 + 2, 12 + 3 + 6, 21 + 2]


@pytest.mark.parametrize(
    ("options", "ratio"),
    [
        ({}, 10.0),
        ({"pattern": "2:4", "include": ["2"]}, 10.0),
        ({"exchanges": 0}, 1.0),
        ({"compensation": "sum"}, 1.0),
        ({"pattern": "rows"}, 1.0),
        ({"method": "obert"}, 1.0),
    ],
)
@pytest.mark.parametrize("way", ["gradual", "attach"])
def test_exchanges_in_a_model_at_rest_go_with_less_damping(
    options: dict[str, Any], ratio: float, way: str
) -> None:
    still = mlp()
    moving, data, gammas = copy.deepcopy(still), examples(), []
    for model in (still, moving):
        surgeon = Surgeon(model, data, samples=8, **options)
        if model is moving and way == "gradual":
            Gradual(surgeon, data, FineTuningOptions(steps=1))
        elif model is moving:
            attach(surgeon, torch.optim.SGD(model.parameters(), lr=0.1), [0.5], every=1)
        surgeon.estimate()
        gammas.append(surgeon.gamma)
    assert gammas[1] == pytest.approx(ratio * gammas[0])


@pytest.mark.parametrize("trains", [False, True])
def test_a_damping_that_is_asked_for_holds_throughout(trains: bool) -> None:
    data, gammas = examples(), []
    model = mlp()
    for damping in (0.3, 0.6):
        surgeon = Surgeon(copy.deepcopy(model), data, relative_damping=damping, samples=8)
        surgeon.trains = trains
        surgeon.estimate()
        gammas.append(surgeon.gamma)
    assert gammas[1] == pytest.approx(2 * gammas[0])


def test_methods_that_do_not_learn_estimate_afresh(model: DigitsNet, loader: Any) -> None:
    surgeon = Surgeon(model, loader, method="diagonal", **QUICK)
    seen: list[object] = []
    tuning = FineTuningOptions(optimizer="sgd", **SHORT)
    gradual(surgeon, [0.3, 0.5], tuning=tuning, on_prune=lambda _: seen.append(surgeon.inverse))
    assert seen[0] is not seen[1]
    assert surgeon.learning is None


@pytest.mark.parametrize("optimizer", ["fishleg", "sgd"])
def test_vectorised_learning_can_go_on(optimizer: str) -> None:
    options = AuxiliaryOptions(vectorize=True, groups=4, warm_start=2)
    surgeon = Surgeon(mlp(), examples(), auxiliary=options, **QUICK)
    gradual(surgeon, [0.5], tuning=FineTuningOptions(optimizer=optimizer, **SHORT))
    assert surgeon.sparsity == 0.5


@pytest.mark.parametrize("optimizer", ["fishleg", "sgd"])
def test_same_seed_same_result(optimizer: str, trained: DigitsNet, loader: Any) -> None:
    results = []
    for seed in (1, 1, 2):
        model, generator = copy.deepcopy(trained), torch.Generator().manual_seed(seed)
        surgeon = Surgeon(model, loader, generator=generator, **QUICK)
        losses: list[float] = []
        tuning = FineTuningOptions(optimizer=optimizer, **SHORT)
        gradual(surgeon, [0.3, 0.6], tuning=tuning, on_step=lambda p, losses=losses: losses.append(p.loss))
        results.append((state(model), surgeon.masks, losses))
    assert identical(results[0], results[1])
    assert not identical(results[0], results[2])


# --- what must not change -----------------------------------------------------------------------------------


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
    modes, before = [module.training for module in model.modules()], state(model)
    surgeon = Surgeon(model, loader, **QUICK)
    gradual(surgeon, [0.3, 0.5], tuning=FineTuningOptions(optimizer=optimizer, weight_decay=0.1, **SHORT))
    assert [module.training for module in model.modules()] == modes
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == frozen
    parameters = {name for name, _ in model.named_parameters()}
    assert changed(model, before) & parameters == parameters - frozen


@pytest.mark.parametrize("optimizer", ["fishleg", "sgd"])
def test_a_batchnorm_frozen_in_a_training_model_stays(optimizer: str, model: DigitsNet, loader: Any) -> None:
    model.train()
    model.bn2.eval()
    before = state(model)
    surgeon = Surgeon(model, loader, **QUICK)

    def check(_: object) -> None:
        assert (model.bn1.training, model.bn2.training) == (True, False)

    gradual(surgeon, [0.3, 0.5], tuning=FineTuningOptions(optimizer=optimizer, **SHORT), on_step=check)
    kept = {name for name in before if "bn2.running" in name or "bn2.num" in name}
    assert len(kept) == 3
    assert not changed(model, before) & kept
    assert {"bn1.running_mean", "bn3.running_mean"} <= changed(model, before)


def test_modes_are_restored_after_an_error(model: DigitsNet, loader: Any) -> None:
    def fail(_: object) -> None:
        raise KeyboardInterrupt

    for training in (True, False):
        model.train(training)
        surgeon = Surgeon(model, loader, method="magnitude")
        with pytest.raises(KeyboardInterrupt):
            gradual(surgeon, [0.3], tuning=FineTuningOptions(**SHORT), on_step=fail)
        assert all(module.training is training for module in model.modules())


# --- what training is good for ------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "lr"), [("fishleg", None), ("sgd", 0.05)])
def test_training_improves_on_pruning_alone(
    optimizer: str, lr: float | None, trained: DigitsNet, loader: Any
) -> None:
    alone, tuned = copy.deepcopy(trained), copy.deepcopy(trained)
    Surgeon(alone, loader, **QUICK).staged([0.6, 0.9])
    surgeon = Surgeon(tuned, loader, **QUICK)
    gradual(surgeon, [0.6, 0.9], tuning=FineTuningOptions(optimizer=optimizer, lr=lr, steps=30, refine=8))
    assert surgeon.sparsity == round(0.9 * TOTAL) / TOTAL
    assert held_out_loss(tuned) < 0.7 * held_out_loss(alone)


@pytest.mark.parametrize(("optimizer", "lr"), [("fishleg", None), ("adam", 0.01)])
def test_distillation_needs_no_labels(
    optimizer: str, lr: float | None, trained: DigitsNet, loader: Any
) -> None:
    """The KL to the dense model falls by training, on images that it has not seen."""
    model, (_, _, images, _) = copy.deepcopy(trained), split_digits()
    inputs = [x for x, _ in loader]
    divergences: list[float] = []

    @torch.no_grad()
    def measure(_: object) -> None:
        divergences.append(float(Categorical().divergence(model(images), trained(images))))

    before, surgeon = state(trained), Surgeon(model, inputs, **QUICK)
    tuning = FineTuningOptions(optimizer=optimizer, lr=lr, distill=True, steps=20)
    gradual(surgeon, [0.85], tuning=tuning, on_prune=measure, on_stage=measure)
    assert divergences[1] < 0.7 * divergences[0]
    assert not changed(trained, before)


@pytest.mark.parametrize("T", [1.0, 4.0])
def test_the_temperature_of_distillation(T: float) -> None:
    """T² KL between the distributions of the logits divided by T; a Gaussian has no temperature."""
    batch, model = examples()[0], mlp()
    x, _ = batch
    for likelihood in (Categorical(), Gaussian()):
        surgeon = Surgeon(model, examples(), likelihood, method="magnitude")
        run = Gradual(surgeon, None, FineTuningOptions(optimizer="sgd", distill=True, temperature=T, steps=1))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
            f, reference = model(x), run.teacher(x)
        if isinstance(likelihood, Categorical):
            target = (reference / T).softmax(-1)
            log_ratio = target.log() - (f / T).log_softmax(-1)
            expected = T**2 * (target * log_ratio).sum(-1).mean()
        else:
            expected = 0.5 * (f - reference).square().sum(-1).mean()
        torch.testing.assert_close(run.loss(batch), expected)


def test_training_batches_may_come_from_elsewhere(model: DigitsNet, loader: Any) -> None:
    """The surgeon sees inputs alone; an exact count of training batches says which loader was used."""
    drawn = []

    class Training:
        def __iter__(self) -> Iterator[Batch]:
            for batch in loader:
                drawn.append(batch)
                yield batch

    surgeon = Surgeon(model, [x for x, _ in loader], method="magnitude")
    gradual(surgeon, [0.5], Training(), FineTuningOptions(optimizer="sgd", steps=6))
    assert len(drawn) == 6


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", ["fishleg", "magnitude"])
def test_own_forward(optimizer: str, method: str) -> None:
    batches = [{"features": x, "labels": y} for x, y in examples()]
    surgeon = Surgeon(mlp(), batches, method=method, forward=lambda m, b: m(b["features"]), **QUICK)
    gradual(surgeon, [0.5], tuning=FineTuningOptions(optimizer=optimizer, **SHORT))
    assert surgeon.sparsity == 0.5


# --- errors -------------------------------------------------------------------------------------------------


class Plain(Likelihood):
    """Only what must be given: no divergence."""

    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(f, y)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.multinomial(f.softmax(-1), 1, generator=generator)[:, 0]


def test_labels_or_distillation() -> None:
    model = mlp()
    before = state(model)
    for batches in ([x for x, _ in examples()], [(x,) for x, _ in examples()], [{"input": torch.ones(4, 6)}]):
        with pytest.raises(ValueError, match=r"needs \(inputs, targets\) from the loader, or distillation"):
            gradual(Surgeon(model, batches, **QUICK), [0.5], tuning=FineTuningOptions(**SHORT))
    assert not changed(model, before)


def test_distillation_needs_a_divergence_before_anything_changes() -> None:
    model = mlp()
    before = state(model)
    surgeon = Surgeon(model, examples(), Plain(), **QUICK)
    with pytest.raises((ValueError, NotImplementedError), match=r"Plain.*divergence|divergence.*Plain"):
        gradual(surgeon, [0.5], tuning=FineTuningOptions(distill=True, **SHORT))
    assert not changed(model, before)
    gradual(surgeon, [0.5], tuning=FineTuningOptions(**SHORT))
    assert surgeon.history[0].measured is None


@pytest.mark.parametrize(
    ("sparsities", "message"),
    [
        ([], "at least one sparsity, got an empty list"),
        ([0.5, 0.4], "sparsities must rise, got 0.5 before 0.4"),
        ([0.5, 1.0], r"sparsity must be in \(0, 1\), got 1.0"),
    ],
)
def test_wrong_schedules_change_nothing(sparsities: list[float], message: str) -> None:
    model = mlp()
    before, surgeon = state(model), Surgeon(model, examples(), **QUICK)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        gradual(surgeon, sparsities, tuning=FineTuningOptions(**SHORT))
    with pytest.raises(ValueError, match=message):
        attach(surgeon, optimizer, sparsities, every=1)
    assert not changed(model, before)
    assert not optimizer._optimizer_step_post_hooks


def test_steps_for() -> None:
    batches = examples()
    assert FineTuningOptions().steps_for(batches) == 4
    assert FineTuningOptions(epochs=2.5).steps_for(batches) == 10
    assert FineTuningOptions(epochs=0.01).steps_for(batches) == 1
    assert FineTuningOptions(epochs=3, steps=7).steps_for(batches) == 7
    assert FineTuningOptions(steps=7).steps_for(iter(batches)) == 7
    with pytest.raises(ValueError, match="epochs need a loader with a length; give steps instead"):
        FineTuningOptions(epochs=2).steps_for(iter(batches))


def test_epochs_decide_how_long_to_train() -> None:
    places: list[Progress] = []
    surgeon = Surgeon(mlp(), examples(), method="magnitude")
    tuning = FineTuningOptions(optimizer="sgd", epochs=1.5)
    gradual(surgeon, [0.2, 0.4], tuning=tuning, on_step=places.append)
    assert [p.step for p in places] == [*range(1, 7)] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "lion"}, "optimizer must be one of fishleg, sgd, adam, got 'lion'"),
        ({"epochs": 0.0}, "epochs must be > 0 and finite, got 0.0"),
        ({"epochs": math.nan}, "epochs must be > 0 and finite, got nan"),
        ({"epochs": math.inf}, "epochs must be > 0 and finite, got inf"),
        ({"steps": 0}, "steps must be >= 1 and whole, got 0"),
        ({"lr": 0.0}, "lr must be > 0 and finite, got 0.0"),
        ({"lr": math.inf}, "lr must be > 0 and finite, got inf"),
        ({"update_every": 0}, "update_every must be >= 1 and whole, got 0"),
        ({"refine": -1}, "refine must be >= 0 and whole, got -1"),
        ({"cuts": 0}, "cuts must be >= 1 and whole, got 0"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FineTuningOptions(**options)


# --- a training loop of one's own ---------------------------------------------------------------------------

MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "fishleg": lambda m: FishLeg(m, lr=0.1, weight_decay=0.1, update_every=2),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, check: Callable[[], None]) -> None:
    batches = examples()
    for i in range(steps):
        x, y = batches[i % len(batches)]
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        check()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("method", "start", "due"), [("fishleg", 0, [1, 4, 7]), ("obert", 2, [3, 6, 9])])
def test_attach_prunes_when_it_is_due(name: str, method: str, start: int, due: list[int]) -> None:
    """Steps are counted from 0: start=0 prunes after the first."""
    model = mlp()
    optimizer, surgeon = MAKERS[name](model), Surgeon(model, examples(), method=method, **QUICK)
    pruned_at: list[int] = []
    done = 0

    def check() -> None:
        nonlocal done
        done += 1
        kept = surgeon.masks
        assert all(torch.equal(model.get_parameter(key) == 0, ~mask) for key, mask in kept.items())
        assert len(surgeon.history) == sum(step <= done for step in due)

    attach(
        surgeon, optimizer, [0.25, 0.5, 0.75], every=3, start=start,
        on_prune=lambda _: pruned_at.append(done + 1),
    )  # fmt: skip
    train(model, optimizer, 12, check)
    assert pruned_at == due
    zeros = sum(int((p == 0).sum()) for p in model.parameters() if p.dim() > 1)
    assert zeros == round(0.75 * (72 + 96 + 32))
    assert [step.target for step in surgeon.history] == [0.25, 0.5, 0.75]


def test_attach_prunes_by_a_q_of_the_surgeons_own() -> None:
    """FishLeg's is damped for steps, and at the first of them has learned nothing yet."""
    model = mlp()
    optimizer, surgeon = FishLeg(model, lr=0.1), Surgeon(model, examples(), **QUICK)
    attach(surgeon, optimizer, [0.3, 0.5], every=2)
    train(model, optimizer, 4, lambda: None)
    assert surgeon.inverse is not None
    assert surgeon.inverse is not optimizer.inverse
    assert all(step.gamma == surgeon.gamma > 0 for step in surgeon.history)


@pytest.mark.parametrize("name", MAKERS)
def test_attach_keeps_the_zeros_that_there_are(name: str) -> None:
    """From before it was attached, at every step, long before the next pruning is due."""
    model = mlp()
    surgeon = Surgeon(model, examples(), **QUICK)
    surgeon.staged([0.3, 0.5])
    optimizer = MAKERS[name](model)

    def check() -> None:
        assert all(torch.equal(model.get_parameter(n) == 0, ~mask) for n, mask in surgeon.masks.items())

    attach(surgeon, optimizer, [0.7], every=10, start=5)
    train(model, optimizer, 3, check)
    assert surgeon.sparsity == 0.5


@pytest.mark.parametrize("name", MAKERS)
def test_attach_can_be_removed(name: str) -> None:
    model = mlp()
    optimizer, surgeon = MAKERS[name](model), Surgeon(model, examples(), **QUICK)
    handle = attach(surgeon, optimizer, [0.3, 0.6], every=2)
    train(model, optimizer, 2, lambda: None)
    handle.remove()
    train(model, optimizer, 4, lambda: None)
    assert len(surgeon.history) == 1
    assert surgeon.sparsity == 0.3


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("method", "start", "stop"), [("fishleg", 0, 4), ("fishleg", 2, 5), ("obert", 1, 1)])
def test_attach_goes_on_after_a_restart(name: str, method: str, start: int, stop: int) -> None:
    """Stopped at any step and loaded into new objects, it ends with the bits of an undisturbed run."""
    data, given, schedule = examples(), mlp(), [0.25, 0.5, 0.75]

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, Surgeon]:
        model = copy.deepcopy(given)
        return model, MAKERS[name](model), Surgeon(model, data, method=method, **QUICK)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for i in range(first, last):
            x, y = data[i % len(data)]
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    model, optimizer, surgeon = begin()
    attach(surgeon, optimizer, schedule, every=3, start=start)
    steps(model, optimizer, 0, 12)
    undisturbed = state(model)

    model, optimizer, surgeon = begin()
    attach(surgeon, optimizer, schedule, every=3, start=start)
    steps(model, optimizer, 0, stop)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), surgeon.state_dict()])
    model, optimizer, surgeon = begin()
    for part, values in zip((model, optimizer, surgeon), saved, strict=True):
        part.load_state_dict(values)
    if surgeon.history:
        with pytest.raises(ValueError, match="after 0 steps 0 of 3 prunings should be done, and"):
            attach(surgeon, optimizer, schedule, every=3, start=start)
    attach(surgeon, optimizer, schedule, every=3, start=start, done=stop)
    steps(model, optimizer, stop, 12)
    assert [step.target for step in surgeon.history] == schedule
    assert identical(state(model), undisturbed)


@pytest.mark.parametrize(("every", "start", "done"), [(0, 0, 0), (-1, 0, 0), (1, -1, 0), (1, 0, -1)])
def test_attach_with_wrong_numbers(every: int, start: int, done: int) -> None:
    model = mlp()
    told = f"every must be >= 1, start and done >= 0, got {every}, {start} and {done}"
    with pytest.raises(ValueError, match=told):
        attach(Surgeon(model, examples()), MAKERS["sgd"](model), [0.5], every=every, start=start, done=done)


def paced(model: DigitsNet, **options: Any) -> Gradual:
    loader = [(torch.randn(8, 1, 8, 8).float(), torch.zeros(8, dtype=torch.long))]
    return Gradual(
        Surgeon(model, loader), loader, FineTuningOptions(max_kl=0.1, step_damping=5, steps=1, **options)
    )


def test_the_pace_follows_the_loss_that_can_be_regained(model: DigitsNet) -> None:
    """KL falls faster than the loss (a mean of ten) above that of the given model, damping rises."""
    run = paced(model)
    run.given = 0.4
    assert run._pace(0.86) == pytest.approx((0.1 * 1.4 * 0.25 / 0.9, 10))  # L = 0.46 + a tenth of 0.4
    assert run._pace(0.46) == pytest.approx((0.1 * 1.4 * 0.09 / 0.7, 5 / 0.3))
    for _ in range(10):
        found = run._pace(7.0)
    assert found == pytest.approx((0.1, 5))
    for _ in range(10):
        found = run._pace(0.1)  # better than it was: a tenth of 0.4 goes on being tried for
    assert found == pytest.approx((0.1 * 1.4 * 0.04**2 / 0.44, 50))
    run._floor = None  # as for a likelihood that has no least value
    assert run._pace(0.1) == pytest.approx((0.1 * 1.4 * 0.1**2 / 0.5, 50))
    run.tuning = replace(run.tuning, regain=0.4)
    assert run._pace(0.1) == pytest.approx((0.1 * 1.4 * 0.4**2 / 0.8, 5 / 0.4))
    with pytest.raises(ValueError, match=r"regain must be in \[0, 1\), got 1"):
        FineTuningOptions(regain=1)
    with pytest.raises(ValueError, match=r"temperature must be > 0 and finite, got 0"):
        FineTuningOptions(temperature=0)


def test_the_loss_of_the_given_model_is_measured_on_the_first_batches(model: DigitsNet) -> None:
    """On as many as a stage trains on, eight at most; neither the model nor the order of the data changes."""
    data = [(torch.randn(16, 1, 8, 8).float(), torch.randint(10, (16,))) for _ in range(12)]
    with torch.no_grad():
        model.eval()
        expected = [float(torch.nn.functional.cross_entropy(model(x), y)) for x, y in data]
    model.train()
    before = copy.deepcopy(model.state_dict())
    for steps, count in ((3, 3), (20, 8)):
        run = Gradual(Surgeon(model, data), data, FineTuningOptions(steps=steps))
        assert run.given == pytest.approx(sum(expected[:count]) / count, rel=1e-5)
        assert [batch is data[i] for i, batch in enumerate(run.ahead)] == [True] * count
        assert next(run.batches) is data[count]
    later = Gradual(Surgeon(model, data), data[5:], FineTuningOptions(steps=2))
    assert later.given != run.given
    later.load_state_dict(run.state_dict())
    assert later.given == run.given  # the model that was given, not the one a run goes on with
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for quiet in (FineTuningOptions(steps=20, optimizer="sgd"), FineTuningOptions(steps=20, max_kl=math.inf)):
        run = Gradual(Surgeon(model, data), data, quiet)
        assert (run.given, len(run.ahead)) == (0.0, 1)  # nobody asks for it


def test_a_loss_that_is_not_finite_is_told_at_once(model: DigitsNet) -> None:
    data = [(torch.full((4, 1, 8, 8), torch.nan).float(), torch.zeros(4, dtype=torch.long))]
    model.train()
    with pytest.raises(ValueError, match="loss on the training loader is not finite: nan"):
        Gradual(Surgeon(model, [torch.randn(4, 1, 8, 8).float()]), data, FineTuningOptions(steps=2))
    with pytest.raises(RuntimeError):
        Gradual(Surgeon(model, [torch.randn(4, 1, 8, 8).float()]), [(data[0][0][..., 0], data[0][1])])
    assert model.training  # whatever went wrong
