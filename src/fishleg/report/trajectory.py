"""The section with the metric against sparsity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from fishleg.report.charts import WIDE, Point, responsive
from fishleg.report.marks import legend, mark
from fishleg.report.numbers import number, percent
from fishleg.report.record import Event, Metric, Step, as_mapping, events_of_kind, prunes_rows
from fishleg.report.scales import Axes, compression, make_axes, padded, sparsity_ticks
from fishleg.report.style import figure, table

_LEAST_POINT = 0.01  # the least range of an axis with percentages


@dataclass(frozen=True)
class _Series:
    """Points (sparsity, value, tooltip) that share a mark and an entry of the legend."""

    name: str
    colour: str
    shape: str
    points: list[Point]
    joined: bool = False

    @property
    def has_line(self) -> bool:
        return self.joined and len(self.points) > 1


def metric_section(
    run: dict[str, Any], events: Sequence[Event], steps: Sequence[Step], metric: Metric
) -> str:
    """Show the metric against sparsity, as a chart and as a table.

    Args:
        run: The record of the run.
        events: The events of its log.
        steps: The pruning steps.
        metric: The metric of the run.

    Returns:
        The HTML of the section; empty without data.
    """
    dense = number(as_mapping(run.get("dense")).get(metric.value))
    final, at = number(as_mapping(run.get("sparse")).get(metric.value)), number(run.get("sparsity"))
    fine_tuned = run.get("mode") == "gradual" or bool(events_of_kind(events, "train"))
    series = _collect_series(steps, metric, fine_tuned)
    if final is not None and at is not None:
        text = f"final model at {percent(at)} sparsity: {metric.text(final)}"
        series.append(_Series("final model", "c1" if fine_tuned else "c2", "ring", [(at, final, text)]))
    if not series:
        return ""
    entries = [(s.colour, f"line {s.shape}" if s.has_line else s.shape, s.name) for s in series]
    entries += [("muted", "dash", f"dense model, {metric.text(dense)}")] if dense is not None else []
    reading = (
        f"{'Higher' if metric.higher else 'Lower'} is better. Equal distances on the sparsity axis are equal "
        "factors of compression."
    )
    limits, clipped = _value_range(series, dense, metric)
    if clipped:
        reading += " A triangle at the edge marks a point outside the chart, with its value."
    unit = "rows" if prunes_rows(run) else "prunable weights"
    chart = responsive(lambda width: _draw(width, series, dense, limits, metric, unit), WIDE)
    numbers = _numbers_table(steps, metric, fine_tuned)
    content = f'<div class="beside"><div>{legend(*entries)}{chart}</div>{numbers}</div>'
    return figure(f"{metric.title} against sparsity", reading, content)


def _collect_series(steps: Sequence[Step], metric: Metric, fine_tuned: bool) -> list[_Series]:
    """Return the series of the steps. Without fine-tuning a step has one measurement instead of two."""
    pruned = _Series("after pruning", "c2", "diamond", [], joined=not fine_tuned)
    tuned = _Series("after fine-tuning", "c1", "dot", [], joined=True)
    rejected = _Series("rejected trial", "c3", "cross", [])
    for step in steps:
        if step.rejected:
            found = [(rejected, step.last)]
        elif fine_tuned:
            found = [(pruned, step.pruned), (tuned, step.tuned)]
        else:
            found = [(pruned, step.last)]
        for series, value in found:
            if value is not None:
                why = f" ({step.reason})" if step.rejected and step.reason else ""
                text = f"{series.name} at {percent(step.sparsity)} sparsity: {metric.text(value)}{why}"
                series.points.append((step.sparsity, value, text))
    return [series for series in (pruned, tuned, rejected) if series.points]


def _value_range(
    series: Sequence[_Series], dense: float | None, metric: Metric
) -> tuple[tuple[float, float], bool]:
    """Return the range of the axis, and whether it leaves points out.

    A very bad value right after pruning is left out, because it would flatten the final differences.
    """
    reference = [] if dense is None else [dense]
    values = [v for s in series for _, v, _ in s.points] + reference
    lo, hi = _wanted_range(series, values, reference, metric.higher)
    if metric.unit == "%" and min(values) >= 0 and max(values) <= 1:
        lo, hi = _within_percentages(lo, hi)
    return (lo, hi), not all(lo <= value <= hi for value in values)


def _within_percentages(lo: float, hi: float) -> tuple[float, float]:
    """Return a range of fractions that has no place below 0 or above 1 and is a percentage point wide."""
    middle, half = (lo + hi) / 2, max(hi - lo, _LEAST_POINT) / 2
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _wanted_range(
    series: Sequence[_Series], values: Sequence[float], reference: list[float], higher: bool
) -> tuple[float, float]:
    lo, hi = padded(values)
    core = [v for s in series if s.shape != "diamond" for _, v, _ in s.points]
    if core and any(s.shape == "dot" for s in series):
        low, high = padded(core + reference, 0.12)
        margin = 3 * (high - low)
        near = (max(lo, high - margin), high) if higher else (low, min(hi, low + margin))
        if near[1] - near[0] < 0.6 * (hi - lo):
            return near
    return lo, hi


def _draw(
    width: int,
    series: Sequence[_Series],
    dense: float | None,
    limits: tuple[float, float],
    metric: Metric,
    unit_of_sparsity: str,
) -> str:
    deepest = 1.04 * compression(max(s for group in series for s, _, _ in group.points)) or 0.1
    height = 360 if width > 400 else 320
    axes = make_axes(width, height, (0.0, deepest), limits, x_ticks=sparsity_ticks, y_format=metric.tick)
    body = []
    if dense is not None:
        body.append(f'<path class="dash muted" d="M{axes.x.start} {axes.y(dense)}H{axes.x.end}"/>')
    body += [_draw_series(axes, group, limits, metric) for group in series]
    unit = f" [{metric.unit}]" if metric.unit else ""
    aria = f"{metric.title} against sparsity. " + "; ".join(t for s in series for _, _, t in s.points)
    return axes.svg("".join(body), f"sparsity [% of {unit_of_sparsity}]", metric.title + unit, aria)


def _draw_series(axes: Axes, series: _Series, limits: tuple[float, float], metric: Metric) -> str:
    lo, hi = limits
    ordered = sorted(series.points)
    at = [(axes.x(compression(s)), axes.y(min(max(v, lo), hi))) for s, v, _ in ordered]
    parts = [f'<g class="{series.colour}">']
    if series.has_line:
        parts.append(f'<path class="line" d="M{"L".join(f"{x} {y}" for x, y in at)}"/>')
    for (x, y), (_, value, text) in zip(at, ordered, strict=True):
        if lo <= value <= hi:
            parts.append(mark(series.shape, x, y, text))
            continue
        anchor = "middle" if x < axes.x.end - 24 else "end"
        place = f'x="{x}" y="{y + (-15 if value < lo else 24):.2f}" text-anchor="{anchor}"'
        label = f'<text class="small" {place}>{escape(metric.text(value))}</text>'
        parts.append(mark("down" if value < lo else "up", x, y, text, label))
    return "".join([*parts, "</g>"])


def _numbers_table(steps: Sequence[Step], metric: Metric, fine_tuned: bool) -> str:
    if len(steps) < 2:
        return ""
    rows = []
    for step in steps:
        values = (step.pruned, step.tuned) if fine_tuned else (step.last,)
        texts = ["–" if value is None else metric.text(value) for value in values]
        rows.append([percent(step.sparsity), *texts, "rejected" if step.rejected else ""])
    head = ["Sparsity", "Pruned", "Tuned", ""] if fine_tuned else ["Sparsity", metric.title, ""]
    if not any(step.rejected for step in steps):
        head, rows = head[:-1], [row[:-1] for row in rows]
    return table(head, rows, "numbers")
