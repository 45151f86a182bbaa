"""Training between prunings: labels, distillation, length, and the pace of the steps."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import (
    DIGITS_WEIGHTS,
    QUICK,
    QUICK_DIGITS,
    QUICK_GRADUAL,
    QUICKER,
    SHORT_TRAINING,
    changed,
    inputs_6,
    labelled_6,
    net_6_10_4,
    net_6_12_8,
    net_with_dropout,
    run_gradually,
    state_copy,
    training_batches,
)
from torch import Tensor, nn
from torch.nn import functional

from fishleg import (
    Categorical,
    FineTuningOptions,
    Gaussian,
    Likelihood,
    PruningOptions,
    PruningSession,
    Surgeon,
)
from fishleg.pruning import Event, FineTuner, Pruned, StageDone, TrainingStep
from fishleg.pruning.pace import Pace
from fishleg.workloads.digits import split_digits
from fishleg.workloads.digits_net import DigitsNet

MAGNITUDE = PruningOptions(**QUICKER, method="magnitude")


def pruned(
    model: nn.Module,
    calibration: list[Any],
    tuning: FineTuningOptions,
    options: PruningOptions = MAGNITUDE,
    *,
    sparsity: float = 0.5,
    loader: list[Any] | None = None,
) -> FineTuner:
    """What trains a model that was pruned a moment ago."""
    session = PruningSession(model, calibration, options=options, fine_tuning=tuning, train_loader=loader)
    next(event for event in session.stage(sparsity) if isinstance(event, Pruned))
    assert session.fine_tuner is not None
    return session.fine_tuner


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    _, _, images, labels = split_digits()
    return float(functional.cross_entropy(model(images), labels))


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "lr"), [("fishleg", None), ("sgd", 0.05)])
def test_training_improves_on_pruning_alone(
    optimizer: str, lr: float | None, trained: DigitsNet, loader: Any
) -> None:
    alone, tuned = copy.deepcopy(trained), copy.deepcopy(trained)
    list(PruningSession(alone, loader, options=PruningOptions(**QUICK_DIGITS)).run([0.6, 0.9]))
    tuning = FineTuningOptions(optimizer=optimizer, lr=lr, steps=30)
    options = PruningOptions(**QUICK_DIGITS, refine_steps=8)
    surgeon = run_gradually(tuned, loader, [0.6, 0.9], tuning, options)
    assert surgeon.sparsity == round(0.9 * DIGITS_WEIGHTS) / DIGITS_WEIGHTS
    assert held_out_loss(tuned) < 0.7 * held_out_loss(alone)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "lr"), [("fishleg", None), ("adam", 0.01)])
def test_distillation_needs_no_labels(
    optimizer: str, lr: float | None, trained: DigitsNet, loader: Any
) -> None:
    """The KL to the dense model falls by training, on images that it has not seen."""
    model, (_, _, images, _) = copy.deepcopy(trained), split_digits()
    inputs = [x for x, _ in loader]
    divergences: list[float] = []

    @torch.no_grad()
    def measure(event: Event) -> None:
        if isinstance(event, (Pruned, StageDone)):
            divergences.append(float(Categorical().divergence(model(images), trained(images))))

    before = state_copy(trained)
    tuning = FineTuningOptions(optimizer=optimizer, lr=lr, distill=True, steps=40)
    run_gradually(model, inputs, [0.85], tuning, PruningOptions(**QUICK_DIGITS), measure)
    assert divergences[1] < 0.7 * divergences[0]
    assert not changed(trained, before)


@pytest.mark.parametrize("T", [1.0, 4.0])
def test_the_temperature_of_distillation(T: float) -> None:
    """T² KL between the distributions of the logits divided by T; a Gaussian has no temperature."""
    batch, model = training_batches(4)[0], net_6_12_8(4)
    x, _ = batch
    for likelihood in (Categorical(), Gaussian()):
        surgeon = Surgeon(
            model, training_batches(4), likelihood=likelihood, options=PruningOptions(method="magnitude")
        )
        tuning = FineTuningOptions(optimizer="sgd", distill=True, temperature=T, steps=1)
        criterion = FineTuner(surgeon, None, tuning).criterion
        assert criterion.teacher is not None
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
            f, reference = model(x), criterion.teacher(x)
        if isinstance(likelihood, Categorical):
            target = (reference / T).softmax(-1)
            log_ratio = target.log() - (f / T).log_softmax(-1)
            expected = T**2 * (target * log_ratio).sum(-1).mean()
        else:
            expected = 0.5 * (f - reference).square().sum(-1).mean()
        torch.testing.assert_close(criterion(batch).loss, expected)


class Plain(Likelihood):
    """Only what must be given: no divergence."""

    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(f, y)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.multinomial(f.softmax(-1), 1, generator=generator)[:, 0]


def test_labels_or_distillation() -> None:
    model = net_6_12_8(4)
    before = state_copy(model)
    for batches in (
        [x for x, _ in training_batches(4)],
        [(x,) for x, _ in training_batches(4)],
        [{"input": torch.ones(4, 6)}],
    ):
        with pytest.raises(ValueError, match=r"needs \(inputs, targets\) from the loader, or distillation"):
            run_gradually(model, batches, [0.5], FineTuningOptions(**SHORT_TRAINING))
    assert not changed(model, before)


def test_distillation_needs_a_divergence_before_anything_changes() -> None:
    model = net_6_12_8(4)
    before = state_copy(model)
    tuning = FineTuningOptions(distill=True, **SHORT_TRAINING)
    with pytest.raises((ValueError, NotImplementedError), match=r"Plain.*divergence|divergence.*Plain"):
        run_gradually(model, training_batches(4), [0.5], tuning, likelihood=Plain())
    assert not changed(model, before)
    tuning, options = FineTuningOptions(**SHORT_TRAINING), PruningOptions(**QUICK_GRADUAL)
    surgeon = run_gradually(model, training_batches(4), [0.5], tuning, options, likelihood=Plain())
    assert surgeon.history[0].measured is None


def test_epochs_decide_how_long_to_train() -> None:
    tuning = FineTuningOptions(optimizer="sgd", epochs=1.5)
    session = PruningSession(net_6_12_8(4), training_batches(4), options=MAGNITUDE, fine_tuning=tuning)
    events = list(session.run([0.2, 0.4]))
    assert [e.step for e in events if isinstance(e, TrainingStep)] == [*range(1, 7)] * 2


def test_the_pace_follows_the_loss_that_can_be_regained() -> None:
    """KL falls faster than the loss (a mean of ten) above that of the given model, damping rises."""
    options = FineTuningOptions(max_kl=0.1, step_damping=5)
    pace = Pace(options, given=0.4)
    assert pace.update(0.86, knows_floor=True) == pytest.approx(
        (0.1 * 1.4 * 0.25 / 0.9, 10)
    )  # L = 0.46 + a tenth of 0.4
    assert pace.update(0.46, knows_floor=True) == pytest.approx((0.1 * 1.4 * 0.09 / 0.7, 5 / 0.3))
    for _ in range(10):
        found = pace.update(7.0, knows_floor=True)
    assert found == pytest.approx((0.1, 5))
    for _ in range(10):
        found = pace.update(
            0.1, knows_floor=True
        )  # better than it was: a tenth of 0.4 goes on being tried for
    assert found == pytest.approx((0.1 * 1.4 * 0.04**2 / 0.44, 50))
    # a likelihood that has no least value
    assert pace.update(0.1, knows_floor=False) == pytest.approx((0.1 * 1.4 * 0.1**2 / 0.5, 50))
    pace.options = replace(options, regain=0.4)
    assert pace.update(0.1, knows_floor=False) == pytest.approx((0.1 * 1.4 * 0.4**2 / 0.8, 5 / 0.4))
    with pytest.raises(ValueError, match=r"regain must be in \[0, 1\), got 1"):
        FineTuningOptions(regain=1)
    with pytest.raises(ValueError, match=r"temperature must be a number > 0, got 0"):
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
        run = FineTuner(Surgeon(model, data), data, FineTuningOptions(steps=steps))
        assert run.pace.given == pytest.approx(sum(expected[:count]) / count, rel=1e-5)
        assert [batch is data[i] for i, (_, batch) in enumerate(run._ahead)] == [True] * count
        assert next(run._batches) is data[count]
    later = FineTuner(Surgeon(model, data), data[5:], FineTuningOptions(steps=2))
    assert later.pace.given != run.pace.given
    later.load_state_dict(run.state_dict())
    assert later.pace.given == run.pace.given  # the model that was given, not the one a run goes on with
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for quiet in (FineTuningOptions(steps=20, optimizer="sgd"), FineTuningOptions(steps=20, max_kl=None)):
        run = FineTuner(Surgeon(model, data), data, quiet)
        assert (run.pace.given, len(run._ahead)) == (0.0, 1)  # nobody asks for it


def test_a_loss_that_is_not_finite_is_refused_at_once(model: DigitsNet) -> None:
    data = [(torch.full((4, 1, 8, 8), torch.nan).float(), torch.zeros(4, dtype=torch.long))]
    model.train()
    with pytest.raises(ValueError, match="loss on the training loader is not finite: nan"):
        FineTuner(Surgeon(model, [torch.randn(4, 1, 8, 8).float()]), data, FineTuningOptions(steps=2))
    with pytest.raises(RuntimeError):
        FineTuner(Surgeon(model, [torch.randn(4, 1, 8, 8).float()]), [(data[0][0][..., 0], data[0][1])])
    assert model.training  # whatever went wrong


def test_training_that_diverges_raises() -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
    data = [(x, 10 * x[:, :4]) for x, _ in training_batches()]
    told = r"loss is not finite \((inf|nan)\) at step \d+ of 30 after sparsity 0\.5"
    tuning = FineTuningOptions(optimizer="sgd", lr=1e6, steps=30)
    with pytest.raises(ValueError, match=told):
        run_gradually(model, data, [0.5], tuning, MAGNITUDE, likelihood="gaussian")


def test_divergence_in_the_last_step_raises() -> None:
    run = pruned(net_with_dropout(), training_batches(), FineTuningOptions(optimizer="sgd", steps=2))
    steps = run.train()
    next(steps)
    next(steps)
    with torch.no_grad():
        run.surgeon.model[0].bias.fill_(math.inf)
    with pytest.raises(ValueError, match=r"training has made '0\.bias' infinite or NaN"):
        next(steps)


@pytest.mark.slow
def test_batches_without_a_label_that_counts_are_left_out() -> None:
    """They say nothing: neither the weights nor the pace may move."""
    data = training_batches()
    empty = (data[0][0], torch.full((32,), -100))
    plain, mixed = ([*data], [x for batch in data for x in (empty, batch)])
    ends = []
    for loader in (plain, mixed):
        run = pruned(net_with_dropout(), data, FineTuningOptions(optimizer="sgd", steps=5), loader=loader)
        losses = list(run.train())
        assert len(losses) == 5
        ends.append(losses)
    assert ends[0] == ends[1]
    options = PruningOptions(**QUICKER, refine_steps=1, cuts=1)
    expected = FineTuner(Surgeon(net_with_dropout(), data), plain, FineTuningOptions(steps=3))
    run = pruned(net_with_dropout(), data, FineTuningOptions(steps=5), options, loader=mixed)
    assert run.pace.given == pytest.approx(expected.pace.given, rel=0.3)
    assert all(map(math.isfinite, run.train()))
    assert all(map(math.isfinite, run.pace.recent))
    tuning = FineTuningOptions(optimizer="sgd", steps=5)
    nothing = pruned(net_with_dropout(), data, tuning, loader=[empty])
    with pytest.raises(ValueError, match="1001 training batches in a row have no label that counts"):
        list(nothing.train())


def test_the_given_loss_is_that_of_a_model_with_dropout() -> None:
    """The training loss is, and the pace follows the difference of the two."""
    model = net_with_dropout(dropout=0.9)
    with torch.no_grad():
        model[3].weight.mul_(20)
        inputs = [torch.randn(2000, 6) for _ in range(3)]
        data = [(x, model.eval()(x).argmax(1)) for x in inputs]
        model.train()
        with_dropout = sum(float(nn.functional.cross_entropy(model(x), y)) for x, y in data) / 3
        without = sum(float(nn.functional.cross_entropy(model.eval()(x), y)) for x, y in data) / 3
    assert with_dropout > 1.1 * without
    model.train()
    random = torch.get_rng_state()
    run = FineTuner(Surgeon(model, data), data, FineTuningOptions(steps=3))
    assert run.pace.given == pytest.approx(with_dropout, rel=0.03)
    assert torch.equal(torch.get_rng_state(), random)


def test_the_pace_is_in_units_of_the_given_loss_where_that_is_large() -> None:
    """Targets a thousand times as large make losses, and the KL of a good step, a million times as large."""
    options, paces = FineTuningOptions(max_kl=0.1, step_damping=5), []
    for scale in (1.0, 1e6):
        paces.append(Pace(options, given=2.0 * scale).update(2.6 * scale, knows_floor=True))
    assert paces[1][0] == pytest.approx(1e6 * paces[0][0])
    assert paces[1][1] == pytest.approx(paces[0][1])


def test_a_pruned_model_is_not_taken_for_the_teacher() -> None:
    model, data = net_with_dropout(), training_batches()
    tuning = FineTuningOptions(distill=True, optimizer="sgd", steps=4)
    run = pruned(model, data, tuning)
    next(run.train())
    late = FineTuner(Surgeon(model, data, options=MAGNITUDE), data, tuning)
    with pytest.raises(ValueError, match="the teacher is another model"):
        late.load_state_dict(run.state_dict())
    early = FineTuner(Surgeon(net_with_dropout(), data, options=MAGNITUDE), data, tuning)
    early.load_state_dict(run.state_dict())
    assert early.step == 1


def test_a_later_batch_without_targets_is_refused() -> None:
    data = training_batches()
    tuning = FineTuningOptions(optimizer="sgd", steps=4)
    run = pruned(net_with_dropout(), data, tuning, loader=[data[0], data[1][0]])
    with pytest.raises(ValueError, match="a training batch has no targets, others had"):
        list(run.train())


def test_a_causal_model_is_trained_to_predict_the_next_token() -> None:
    class Bigram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.head = nn.Embedding(8, 16), nn.Linear(16, 8)

        def forward(self, input_ids: Tensor) -> Any:
            return {"logits": self.head(self.table(input_ids))}

    model = Bigram()
    tokens = (torch.arange(6) + torch.arange(8).unsqueeze(1)) % 8  # each is followed by the next larger one
    loader = [{"input_ids": tokens, "labels": tokens}]
    options = PruningOptions(include=["head"], method="magnitude", compensation="none")
    tuning = FineTuningOptions(optimizer="adam", lr=0.05, steps=60)
    losses = list(pruned(model, loader, tuning, options, sparsity=0.3).train())
    assert losses[-1] < 0.5 * losses[0]
    assert torch.equal(model(tokens)["logits"].argmax(-1), (tokens + 1) % 8)


def test_a_label_out_of_range_is_named_while_training() -> None:
    loader = [(x, torch.full((8,), 6)) for x in inputs_6()]
    run = pruned(net_6_10_4(), inputs_6(), FineTuningOptions(optimizer="sgd", steps=2), loader=loader)
    with pytest.raises(ValueError, match="6"):
        list(run.train())


@pytest.mark.parametrize("optimizer", ["sgd", "fishleg"])
def test_a_frozen_body_given_in_evaluation_mode_keeps_its_statistics_in_training(optimizer: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8),
                          nn.ReLU(), nn.Linear(8, 4))  # fmt: skip
    model[:2].requires_grad_(False)
    model.eval()
    frozen, moving = ({n: b.clone() for n, b in model[i].named_buffers()} for i in (1, 4))
    tuning = FineTuningOptions(optimizer=optimizer, steps=4)
    options = PruningOptions(**QUICK, batchnorm_batches=0, refine_steps=1)
    run_gradually(model, labelled_6(), [0.5], tuning, options)
    assert all(torch.equal(value, frozen[name]) for name, value in model[1].named_buffers())
    assert not torch.equal(model[4].running_mean, moving["running_mean"])
    assert not model[1].training


def test_a_last_batch_of_one_example_is_left_out_of_the_training() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    data = [*labelled_6()[:2], (torch.randn(1, 6), torch.tensor([0]))]
    run = pruned(model, labelled_6(), FineTuningOptions(optimizer="sgd", steps=5), loader=data)
    assert len(list(run.train())) == 5


def test_running_statistics_that_are_asked_for_hold_while_training() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    options = PruningOptions(**QUICK, batch_statistics=False)
    surgeon = run_gradually(model, labelled_6(), [0.5], FineTuningOptions(steps=2), options)
    assert not surgeon.curvature.learning.options.batch_statistics
