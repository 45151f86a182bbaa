"""What a run leaves behind, read with care: every key may be missing, every number may be none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fishleg.report.charts import tick_text
from fishleg.report.numbers import NB, number, percent, plain, signed

Event = dict[str, Any]


def read_run(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The record and what was wrong with it."""
    if not path.exists():
        return {}, ["run.json is missing: this report knows the log alone"]
    try:
        run = json.loads(path.read_text("utf-8", "replace"))
    except ValueError as error:
        return {}, [f"run.json could not be read ({error}): this report knows the log alone"]
    return (run, []) if isinstance(run, dict) else ({}, ["run.json holds no record of a run"])


def read_log(path: Path) -> tuple[list[Event], int]:
    """The events, and how many lines could not be read; the last may be cut off in the middle of writing."""
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


def listed(value: Any) -> list[Any]:
    """The list, or nothing where the record holds something else."""
    return value if isinstance(value, list) else []


def mapped(value: Any) -> dict[str, Any]:
    """The mapping, or nothing where the record holds something else."""
    return value if isinstance(value, dict) else {}


def kinds(events: Iterable[Event], kind: str) -> list[Event]:
    """The events of one kind."""
    return [event for event in events if event.get("event") == kind]


def elapsed(run: dict[str, Any], events: Sequence[Event]) -> float | None:
    """Seconds the run took so far; the log knows better than a record that was never completed."""
    seconds = number(run.get("seconds"))
    times = [t for t in (number(event.get("time")) for event in events) if t is not None]
    if seconds is None or run.get("status") != "finished":
        return max([*times, *([] if seconds is None else [seconds])], default=None)
    return seconds


@dataclass
class Step:
    """One pruning and what followed."""

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
        """The metric as it was in the end."""
        return self.pruned if self.tuned is None else self.tuned


def collect_steps(events: Sequence[Event], value: str) -> list[Step]:
    """Prunings in the order of the log; what a resumed run did again replaces its first attempt."""
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
    """How the measure of the run is called and written."""

    name: str
    value: str  # its key in the record
    unit: str
    higher: bool

    def text(self, value: float) -> str:
        """A value with its unit."""
        return (
            percent(value, 2)
            if self.unit == "%"
            else plain(value) + (f"{NB}{self.unit}" if self.unit else "")
        )

    @property
    def title(self) -> str:
        """The name as a title; `capitalize` would spoil names like BLEU."""
        return self.name[:1].upper() + self.name[1:]

    def tick(self, value: float, ticks: Sequence[float]) -> str:
        """A value at an axis, whose label has the unit."""
        scale = 100 if self.unit == "%" else 1
        return tick_text(scale * value, [scale * tick for tick in ticks])

    def difference(self, before: float, after: float) -> str:
        """What was gained or lost, with its sign."""
        change = after - before
        if self.unit == "%":
            return signed(f"{100 * change:+.2f}") + " percentage points"
        return ("+" if change > 0 else "") + plain(change) + (f"{NB}{self.unit}" if self.unit else "")


def metric_of(run: dict[str, Any], events: Sequence[Event]) -> Metric:
    """The metric where the run has one, its loss otherwise."""
    records = [mapped(run.get("dense")), mapped(run.get("sparse")), *events]
    if any(number(record.get("metric")) is not None for record in records):
        name = str(run.get("metric") or "metric")
        return Metric(
            name, "metric", str(run.get("metric_unit") or ""), run.get("higher_is_better") is not False
        )
    return Metric("loss", "loss", "", False)
