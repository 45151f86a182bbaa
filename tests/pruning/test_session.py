"""The session: its events in order, what it decides, and going on from a saved state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import QUICK, inputs_6, inputs_8, labelled_6, net_8_16_4, state_copy
from oracles import identical
from torch import Tensor, nn

from fishleg import Categorical, FineTuningOptions, PruningOptions, PruningSession, Surgeon
from fishleg.pruning import (
    Event,
    Finished,
    InverseUpdated,
    Pruned,
    StageDone,
    StageStarted,
    TrainingStep,
)
from fishleg.runtime.replay import Replayable


def names(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def net_with_norm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


def test_events_without_training() -> None:
    session = PruningSession(net_8_16_4(), inputs_8(), options=PruningOptions(**QUICK))
    events = list(session.run([0.25, 0.5]))
    stage = ["StageStarted", "InverseUpdated", "Pruned", "StageDone"]
    assert names(events) == [*stage, *stage, "Finished"]
    assert [event.stage for event in events] == [1] * 4 + [2] * 5
    assert {event.stages for event in events} == {2}
    assert [event.update for event in events if isinstance(event, InverseUpdated)] == ["estimate", "refine"]
    started = [event for event in events if isinstance(event, StageStarted)]
    assert [(event.target, event.update) for event in started] == [(0.25, "estimate"), (0.5, "refine")]
    assert [event.step for event in events if isinstance(event, Pruned)] == session.surgeon.history
    assert [event.step for event in events if isinstance(event, StageDone)] == session.surgeon.history
    assert [str(event) != "" for event in events] == [False, False, True, False] * 2 + [True]


def test_events_with_training() -> None:
    tuning = FineTuningOptions(optimizer="sgd", steps=2, lr=0.1)
    options = PruningOptions(**QUICK, method="diagonal")
    session = PruningSession(net_with_norm(), labelled_6(), options=options, fine_tuning=tuning)
    events = list(session.run([0.25, 0.5]))
    stage = ["StageStarted", "InverseUpdated", "Pruned", "TrainingStep", "TrainingStep", "StageDone"]
    assert names(events) == [*stage, *stage, "Finished"]
    assert [event.update for event in events if isinstance(event, InverseUpdated)] == ["estimate"] * 2
    steps = [event for event in events if isinstance(event, TrainingStep)]
    assert [(event.stage, event.step, event.steps) for event in steps] == [
        (1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 2),
    ]  # fmt: skip
    assert [event.lr for event in steps] == pytest.approx([0.1, 0.05] * 2)  # a cosine in each stage


def test_an_event_comes_after_what_it_reports() -> None:
    model = net_8_16_4()
    before, session = state_copy(model), PruningSession(model, inputs_8(), options=PruningOptions(**QUICK))
    for event in session.run([0.5]):
        curvature, pruned = session.surgeon.curvature, bool(session.surgeon.history)
        if isinstance(event, StageStarted):
            assert curvature.next_update == event.update == "estimate"
        elif isinstance(event, InverseUpdated):
            assert curvature.is_current
        assert pruned is not isinstance(event, (StageStarted, InverseUpdated))
        assert identical(dict(model.state_dict()), before) is not pruned


@pytest.mark.parametrize("method", ["fishleg", "diagonal", "magnitude"])
@pytest.mark.parametrize("cuts", [None, 2])
def test_two_prunings_of_a_surgeon_equal_a_session_of_both(method: str, cuts: int | None) -> None:
    options = PruningOptions(**QUICK, method=method, cuts=cuts)
    session = PruningSession(net_8_16_4(), inputs_8(), options=options)
    list(session.run([0.3, 0.6]))
    surgeon = Surgeon(net_8_16_4(), inputs_8(), options=options)
    for sparsity in (0.3, 0.6):
        surgeon.prune(sparsity)
    assert identical(dict(session.model.state_dict()), dict(surgeon.model.state_dict()))
    assert session.surgeon.history == surgeon.history
    one_by_one = PruningSession(net_8_16_4(), inputs_8(), options=options)
    for sparsity in (0.3, 0.6):
        list(one_by_one.stage(sparsity))
    assert identical(dict(session.model.state_dict()), dict(one_by_one.model.state_dict()))


@pytest.mark.parametrize(
    ("method", "options", "tuned", "cuts"),
    [
        ("fishleg", {}, True, 3),
        ("fishleg", {}, False, 1),
        ("fishleg", {"refine_steps": 0}, True, 1),
        ("fishleg", {"cuts": 2, "refine_steps": 1}, False, 2),
        ("diagonal", {}, True, 1),
        ("diagonal", {"cuts": 2}, True, 2),
        ("diagonal", {"cuts": 2}, False, 2),
    ],
)
def test_the_number_of_cuts(
    method: str, options: dict[str, Any], tuned: bool, cuts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = FineTuningOptions(optimizer="sgd", steps=1) if tuned else None
    chosen = PruningOptions(**QUICK, method=method, **options)
    session = PruningSession(net_with_norm(), labelled_6(), options=chosen, fine_tuning=tuning)
    surgeon, targets, updates = session.surgeon, [], []
    cut, update = surgeon._cut, surgeon.curvature.update

    def noted_update(*given: Any) -> Any:
        updates.append(surgeon.curvature.next_update)
        return update(*given)

    monkeypatch.setattr(surgeon, "_cut", lambda q, target: targets.append(target) or cut(q, target))
    monkeypatch.setattr(surgeon.curvature, "update", noted_update)
    list(session.run([0.5]))
    assert targets == pytest.approx([1 - 0.5 ** ((i + 1) / cuts) for i in range(cuts)])
    between = "refine" if method == "fishleg" else "estimate"
    assert [action for action in updates if action != "reuse"] == ["estimate", *[between] * (cuts - 1)]


@pytest.mark.parametrize("tuned", [False, True])
def test_the_last_event_has_the_divergence_from_the_dense_model(tuned: bool) -> None:
    model, data = net_with_norm().eval(), labelled_6()
    dense = copy.deepcopy(model)
    tuning = FineTuningOptions(optimizer="sgd", steps=2) if tuned else None
    options = PruningOptions(**QUICK, measure_batches=2)
    session = PruningSession(model, data, options=options, fine_tuning=tuning)
    *_, finished = session.run([0.3, 0.6])
    assert isinstance(finished, Finished)
    assert (finished.sparsity, finished.unit) == (session.surgeon.sparsity, "weights")
    with torch.no_grad():
        expected = [float(Categorical().divergence(model(x), dense(x))) for x, _ in data[:2]]
    assert finished.divergence == pytest.approx(sum(expected) / 2, rel=1e-4)
    assert f"KL to the dense model's outputs {finished.divergence:.3g}" in str(finished)


def test_without_measuring_there_is_no_divergence() -> None:
    options = PruningOptions(**QUICK, measure_batches=0)
    *_, finished = PruningSession(net_8_16_4(), inputs_8(), options=options).run([0.5])
    assert isinstance(finished, Finished)
    assert finished.divergence is None


class Started:
    """A session with training batches that can be set to a place; all from the same dense model."""

    def __init__(
        self, options: PruningOptions, tuning: FineTuningOptions | None, prepare: bool = True
    ) -> None:
        self.model = net_with_norm()
        self.training = Replayable(labelled_6(), 1)
        self.session = PruningSession(
            self.model, inputs_6(), options=options, fine_tuning=tuning,
            train_loader=None if tuning is None else self.training,
        )  # fmt: skip
        if prepare:
            self.session.prepare()
            self.restart()

    def restart(self) -> None:
        """Forget the training batches that were looked at."""
        if self.session.fine_tuner is not None:
            self.session.fine_tuner.restart_data()
            self.training.restart()

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "session": self.session, "training": self.training}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.session.load_state_dict(state["session"])
        self.restart()
        self.training.load_state_dict(state["training"])

    def run(self) -> tuple[list[Event], list[dict[str, Any]]]:
        events, states = [], []
        for event in self.session.run([0.3, 0.6]):
            events.append(event)
            states.append(self.state())
        return events, states

    def result(self) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Any]]:
        return state_copy(self.model), self.session.surgeon.masks, self.session.surgeon.history


def outcomes(events: list[Event]) -> list[Event]:
    """Events that report a result; the others may come once more when a run goes on."""
    return [event for event in events if isinstance(event, (Pruned, TrainingStep, Finished))]


GRADUAL = [("fishleg", "fishleg"), ("fishleg", "sgd"), ("diagonal", "fishleg"), ("obert", "adam")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "optimizer"), [("fishleg", None), ("diagonal", None), ("magnitude", None), *GRADUAL]
)
def test_a_session_goes_on_from_every_event_bit_for_bit(method: str, optimizer: str | None) -> None:
    options = PruningOptions(samples=8, sub_batch=4, refine_steps=1, method=method)
    tuning = None if optimizer is None else FineTuningOptions(optimizer=optimizer, steps=2, update_every=1)
    first = Started(options, tuning)
    events, states = first.run()
    kinds = {StageStarted, InverseUpdated, Pruned, StageDone, Finished, *([TrainingStep] if tuning else [])}
    assert {type(event) for event in events} == kinds
    for i, (event, state) in enumerate(zip(events, states, strict=True)):
        resumed = Started(options, tuning)
        resumed.load(state)
        later, _ = resumed.run()
        expected = outcomes(events[i + 1 :]) or [events[-1]]  # a finished run only ends once more
        assert outcomes(later) == expected, (i, event)
        assert identical(resumed.result()[:2], first.result()[:2]), (i, event)
        assert resumed.session.surgeon.history == first.session.surgeon.history


def test_a_state_can_be_loaded_without_preparing() -> None:
    """The place within a stage is not lost; how far the dense model is away is not known, though."""
    options = PruningOptions(**QUICK, method="magnitude")
    tuning = FineTuningOptions(optimizer="sgd", steps=3)
    first = Started(options, tuning)
    events, states = first.run()
    at = next(i for i, event in enumerate(events) if isinstance(event, TrainingStep))
    resumed = Started(options, tuning, prepare=False)
    resumed.load(states[at])
    later, _ = resumed.run()
    assert outcomes(later)[:-1] == outcomes(events[at + 1 :])[:-1]
    assert identical(resumed.result()[:2], first.result()[:2])
    assert isinstance(later[-1], Finished)
    assert later[-1].divergence is None


def test_an_unfinished_stage_goes_on_with_its_training() -> None:
    options = PruningOptions(**QUICK, method="magnitude")
    tuning = FineTuningOptions(optimizer="sgd", steps=3)
    first = Started(options, tuning)
    events, states = first.run()
    at = next(i for i, event in enumerate(events) if isinstance(event, Pruned))
    resumed = Started(options, tuning)
    resumed.load(states[at])
    assert names(list(resumed.session.stage(0.3))) == ["TrainingStep"] * 3 + ["StageDone"]


@pytest.mark.parametrize(("stopped_at", "expected"), [(Pruned, ["StageDone"]), (StageDone, [])])
def test_every_stage_is_done_exactly_once(stopped_at: type[Event], expected: list[str]) -> None:
    """A stage that was pruned, but not reported as done, is reported after a restart; no other is."""
    dense = net_8_16_4()
    model, options = copy.deepcopy(dense), PruningOptions(**QUICK)
    session = PruningSession(model, inputs_8(), options=options)
    for event in session.run([0.25, 0.5]):
        if isinstance(event, stopped_at):
            state = copy.deepcopy((model.state_dict(), session.state_dict()))
            break
    again = PruningSession(copy.deepcopy(dense), inputs_8(), options=options)
    again.prepare()
    again.model.load_state_dict(state[0])
    again.load_state_dict(state[1])
    rest = names(list(again.run([0.25, 0.5])))
    assert rest == [*expected, "StageStarted", "InverseUpdated", "Pruned", "StageDone", "Finished"]


def test_a_session_in_no_grad_mode() -> None:
    with torch.no_grad():
        session = PruningSession(net_8_16_4(), inputs_8(), options=PruningOptions(**QUICK))
        list(session.run([0.5]))
    assert session.surgeon.sparsity == 0.5


def test_modes_are_restored_when_the_events_are_not_taken_to_the_end() -> None:
    model = net_with_norm().train()
    model[1].eval()
    modes = [module.training for module in model.modules()]
    session = PruningSession(
        model, labelled_6(), options=PruningOptions(**QUICK, method="magnitude"),
        fine_tuning=FineTuningOptions(optimizer="sgd", steps=3),
    )  # fmt: skip
    events = session.run([0.5])
    next(event for event in events if isinstance(event, TrainingStep))
    events.close()  # type: ignore[attr-defined]
    assert [module.training for module in model.modules()] == modes
