"""Many small steps that add up: the sum of the predictions is compared with the whole change."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fishleg
from fishleg import FineTuningOptions, PruningOptions, PruningSession, Surgeon
from fishleg.pruning import Event, Finished, PruneStep
from fishleg.pruning.accumulated_change import AccumulatedChange
from fishleg.pruning.output_change import OutputChange
from fishleg.workloads.digits_net import DigitsNet

TOGETHER = "steps together: the quadratic model does not hold for their sum"
STAGES = [0.5, 0.55, 0.6, 0.65, 0.7, 0.75]


def small_net() -> tuple[nn.Module, list[Tensor]]:
    """A network with few hidden units, all of which matter: to remove one is a large change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 4))
    x = torch.randn(256, 6)
    y = (x @ torch.randn(6, 4)).argmax(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(200):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval(), list(x.split(64))


def options(**others: Any) -> PruningOptions:
    """Whole rows, few samples: a pruning that takes little time."""
    return PruningOptions(pattern="rows", samples=16, sub_batch=8, floor=0.0, **others)


def timid(scale: float = 0.05) -> Any:
    """Make every prediction too small, as a Q with too little curvature does."""
    original = PruneStep.__init__

    def init(self: PruneStep, **fields: Any) -> None:
        fields["predicted"] = scale * (fields["measured"] or fields["predicted"])
        original(self, **fields)

    return init


@pytest.fixture
def small_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PruneStep, "__init__", timid())


def told(caplog: pytest.LogCaptureFixture) -> int:
    return sum(TOGETHER in record.getMessage() for record in caplog.records)


@pytest.mark.usefixtures("small_predictions")
def test_a_session_judges_small_steps_that_add_up_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    model, data = small_net()
    events: list[Event] = []
    told_at = []
    session = PruningSession(model, data, options=options())
    for event in session.run(STAGES):
        events.append(event)
        told_at.append(told(caplog))
    end = events[-1]
    assert isinstance(end, Finished)
    assert end.divergence is not None
    assert end.predicted == pytest.approx(sum(step.predicted for step in session.surgeon.history))
    assert end.verdict is not None
    assert f"Q predicted {end.predicted:.3g} for the 6 {TOGETHER}" in end.verdict
    assert told_at[-1] == 1
    assert told_at[-2] == 0  # once, with the last numbers


@pytest.mark.usefixtures("small_predictions")
def test_direct_calls_of_the_surgeon_are_judged_as_well(caplog: pytest.LogCaptureFixture) -> None:
    model, data = small_net()
    surgeon = Surgeon(model, data, options=options())
    for target in STAGES:
        surgeon.prune(target)
    assert told(caplog) == 1
    total = surgeon.total_change()
    assert (total.steps, told(caplog)) == (6, 1)
    assert total.verdict is not None


@pytest.mark.usefixtures("small_predictions")
def test_one_step_is_judged(caplog: pytest.LogCaptureFixture) -> None:
    model, data = small_net()
    *_, end = PruningSession(model, data, options=options()).run([0.75])
    assert isinstance(end, Finished)
    assert end.verdict is not None
    assert "does not hold for such a large step" in end.verdict
    assert caplog.text.count("does not hold for such a large step") == 1


@pytest.mark.usefixtures("small_predictions")
def test_training_in_between_leaves_the_total_out(caplog: pytest.LogCaptureFixture) -> None:
    model, data = small_net()
    labelled = [(x, x[:, :4].argmax(1)) for x in data]
    tuned = FineTuningOptions(steps=2, optimizer="sgd")
    *_, end = PruningSession(model, labelled, options=options(), fine_tuning=tuned).run(STAGES)
    assert isinstance(end, Finished)
    assert (end.predicted, end.verdict, told(caplog)) == (None, None, 0)
    assert end.divergence is not None


@pytest.mark.usefixtures("small_predictions")
def test_a_change_from_outside_begins_a_new_sum(caplog: pytest.LogCaptureFixture) -> None:
    model, data = small_net()
    surgeon = Surgeon(model, data, options=options())
    surgeon.prune(0.5)
    surgeon.prune(0.55)
    with torch.no_grad():
        model[2].bias.add_(torch.tensor([5.0, 0.0, 0.0, 0.0]))  # type: ignore[index]
    surgeon.prune(0.6)
    total = surgeon.total_change()
    assert total.steps == 1
    assert total.measured == pytest.approx(surgeon.history[-1].measured)


def test_magnitudes_predict_nothing() -> None:
    model, data = small_net()
    *_, end = PruningSession(model, data, options=options(method="magnitude")).run(STAGES)
    assert isinstance(end, Finished)
    assert (end.predicted, end.verdict) == (None, None)


@pytest.mark.usefixtures("small_predictions")
def test_a_resumed_session_gives_the_same_verdict_and_tells_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dense, data = small_net()
    whole = PruningSession(copy.deepcopy(dense), data, options=options())
    *_, expected = whole.run(STAGES)
    caplog.clear()
    first = PruningSession(copy.deepcopy(dense), data, options=options())
    first.prepare()
    for number, target in enumerate(STAGES[:5]):
        list(first.stage(target, number=number + 1, of=6))
    before = told(caplog)
    again = PruningSession(copy.deepcopy(dense), data, options=options())
    again.prepare()
    again.model.load_state_dict(first.model.state_dict())
    again.load_state_dict(first.state_dict())
    *_, end = again.run(STAGES)
    assert isinstance(end, Finished)
    assert end == expected
    assert (before, told(caplog)) == (0, 1)


def test_a_harmful_refresh_is_named_as_the_cause() -> None:
    class Fixed(OutputChange):
        def __init__(self) -> None:
            pass

        def outputs(self) -> list[Tensor]:
            return []

        def divergence_from(self, before: list[Tensor]) -> float | None:
            return 1.0

    change = AccumulatedChange(Fixed(), judged=True)
    step = PruneStep(target=0.5, sparsity=0.5, removed=1, predicted=0.01, measured=1.0, gamma=1.0)
    change.before_step([], 0)
    change.after_step([step], 0.5, refresh_harmed=True)
    verdict = change.total([step], 0.5).verdict
    assert verdict is not None
    assert "the refresh of BatchNorm's statistics has changed the outputs" in verdict


@pytest.mark.slow
def test_a_good_run_on_the_digits_has_no_verdict(
    model: DigitsNet, images: list[Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []
    with caplog.at_level(logging.WARNING, "fishleg"):
        fishleg.prune(model, images, 0.7, progress=events.append)
    end = events[-1]
    assert isinstance(end, Finished)
    assert end.predicted is not None
    assert (end.verdict, caplog.text) == (None, "")


def test_a_good_run_on_a_small_net_has_no_verdict(caplog: pytest.LogCaptureFixture) -> None:
    model, data = small_net()
    session = PruningSession(model, data, options=PruningOptions(samples=64, sub_batch=8))
    *_, end = session.run([0.1, 0.2, 0.3])
    assert isinstance(end, Finished)
    assert (end.verdict, caplog.text) == (None, "")
