"""Reading the record of a run. Every key of it may be missing, and every number may be none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fishleg.report.numbers import NO_BREAK_SPACE, number, percent, plain, with_minus_sign
from fishleg.report.scales import tick_text

Event = dict[str, Any]


def read_run(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Read run.json.

    Args:
        path: The file. It may be missing or damaged.

    Returns:
        The record, empty where it cannot be read, and the problems that were found.
    """
    if not path.exists():
        return {}, ["run.json is missing; this report uses only the log"]
    try:
        run = json.loads(path.read_text("utf-8", "replace"))
    except ValueError as error:
        return {}, [f"run.json could not be read ({error}); this report uses only the log"]
    return (run, []) if isinstance(run, dict) else ({}, ["run.json holds no record of a run"])


def read_log(path: Path) -> tuple[list[Event], int]:
    """Read log.jsonl.

    Args:
        path: The file. It may be missing.

    Returns:
        The events, and the number of unreadable lines. The last line does not count: a run may still be
        writing it.
    """
    lines = path.read_text("utf-8", "replace").split("\n") if path.exists() else []
    lines = [line for line in lines if line.strip()]
    events, broken = list[Event](), 0
    for i, line in enumerate(lines):
        try:
            event = json.loads(line)
        except ValueError:
            broken += i < len(lines) - 1
            continue
        if isinstance(event, dict):
            events.append(event)
    return events, broken


def as_list(value: Any) -> list[Any]:
    """Return a value of the record as a list.

    Args:
        value: Any value.

    Returns:
        The value; an empty list where it is not a list.
    """
    return value if isinstance(value, list) else []


def as_mapping(value: Any) -> dict[str, Any]:
    """Return a value of the record as a mapping.

    Args:
        value: Any value.

    Returns:
        The value; an empty mapping where it is not a mapping.
    """
    return value if isinstance(value, dict) else {}


def events_of_kind(events: Iterable[Event], kind: str) -> list[Event]:
    """Select the events of one kind.

    Args:
        events: Events of the log.
        kind: The value of their key `event`.

    Returns:
        The selected events, in order.
    """
    return [event for event in events if event.get("event") == kind]


def elapsed(run: dict[str, Any], events: Sequence[Event]) -> float | None:
    """Find how long the run has taken so far.

    The record of an unfinished run may be older than its log. The log then counts too.

    Args:
        run: The record of the run.
        events: The events of its log.

    Returns:
        The time in seconds; None where it is unknown.
    """
    seconds = number(run.get("seconds"))
    times = [t for t in (number(event.get("time")) for event in events) if t is not None]
    if seconds is None or run.get("status") != "finished":
        return max([*times, *([] if seconds is None else [seconds])], default=None)
    return seconds


def prunes_rows(run: dict[str, Any]) -> bool:
    """Find what the sparsity of a run counts.

    Args:
        run: The record of the run.

    Returns:
        Whether it counts whole rows; otherwise it counts single weights.
    """
    return run.get("pattern") == "rows"


@dataclass
class Step:
    """One pruning step and the measurements after it.

    Attributes:
        stage: The number of the stage.
        sparsity: The sparsity after the step.
        pruned: The metric right after pruning.
        tuned: The metric after fine-tuning.
        predicted: The predicted increase of the loss.
        measured: The measured increase of the loss.
        rejected: Whether the step was undone.
        reason: Why it was undone.
    """

    stage: float | None
    sparsity: float
    pruned: float | None = None
    tuned: float | None = None
    predicted: float | None = None
    measured: float | None = None
    rejected: bool = False
    reason: str = ""

    @property
    def last(self) -> float | None:
        """The last measurement of the metric."""
        return self.pruned if self.tuned is None else self.tuned


def collect_steps(events: Sequence[Event], value: str) -> list[Step]:
    """Collect the pruning steps of a log. A step that a resumed run repeated replaces its first attempt.

    Args:
        events: The events of the log.
        value: The key of the metric.

    Returns:
        The steps in the order of the log.
    """
    steps: list[Step] = []
    for event in events:
        kind, stage = event.get("event"), number(event.get("stage"))
        sparsity = number(event.get("sparsity"))
        sparsity = number(event.get("target")) if sparsity is None else sparsity
        if kind not in ("prune", "stage", "rollback") or sparsity is None:
            continue
        sparsity = min(max(sparsity, 0.0), 1.0)
        measure = number(event.get(value))
        same = next(
            (s for s in reversed(steps) if abs(s.sparsity - sparsity) < 1e-6 and not s.rejected), None
        )
        if kind == "prune":
            if same is not None and same.stage == stage:
                steps.remove(same)
            predicted, measured = number(event.get("predicted")), number(event.get("measured"))
            steps.append(Step(stage, sparsity, measure, None, predicted, measured))
            continue
        if same is None:
            same = next((s for s in steps[-1:] if stage is not None and s.stage == stage), None)
        if same is None or same.rejected:
            same = Step(stage, sparsity)
            steps.append(same)
        if measure is not None:
            same.tuned = measure
        if kind == "rollback":
            same.rejected, same.reason = True, str(event.get("reason") or "")
    return steps


@dataclass(frozen=True)
class Metric:
    """The name of the metric and how it is written.

    Attributes:
        name: The name.
        value: Its key in the record.
        unit: The unit; "%" for fractions.
        higher: Whether a higher value is better.
    """

    name: str
    value: str
    unit: str
    higher: bool

    def text(self, value: float) -> str:
        """Write a value with its unit.

        Args:
            value: The value.

        Returns:
            The text.
        """
        if self.unit == "%":
            return percent(value, 2)
        return plain(value) + (f"{NO_BREAK_SPACE}{self.unit}" if self.unit else "")

    @property
    def title(self) -> str:
        """The name with a capital first letter. `str.capitalize` would change names like BLEU."""
        return self.name[:1].upper() + self.name[1:]

    def tick(self, value: float, ticks: Sequence[float]) -> str:
        """Write a tick of an axis, without the unit, which the label of the axis has.

        Args:
            value: The value of the tick.
            ticks: The values of all ticks of the axis.

        Returns:
            The text.
        """
        scale = 100 if self.unit == "%" else 1
        return tick_text(scale * value, [scale * tick for tick in ticks])

    def difference(self, before: float, after: float) -> str:
        """Write the change between two values, with its sign.

        Args:
            before: The first value.
            after: The second value.

        Returns:
            The text.
        """
        change = after - before
        if self.unit == "%":
            return with_minus_sign(f"{100 * change:+.2f}") + " percentage points"
        unit = f"{NO_BREAK_SPACE}{self.unit}" if self.unit else ""
        return ("+" if change > 0 else "") + plain(change) + unit


def metric_of(run: dict[str, Any], events: Sequence[Event]) -> Metric:
    """Find the metric of a run: its own, or the loss where it has none.

    Args:
        run: The record of the run.
        events: The events of its log.

    Returns:
        The metric.
    """
    records = [as_mapping(run.get("dense")), as_mapping(run.get("sparse")), *events]
    if any(number(record.get("metric")) is not None for record in records):
        name = str(run.get("metric") or "metric")
        return Metric(
            name, "metric", str(run.get("metric_unit") or ""), run.get("higher_is_better") is not False
        )
    return Metric("loss", "loss", "", False)
