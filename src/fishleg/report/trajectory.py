"""The metric against sparsity: the chart a reader looks at first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from fishleg.report.charts import WIDE, depth, frame, key, mark, padded, responsive, sparsity_ticks
from fishleg.report.numbers import number, percent
from fishleg.report.record import Event, Metric, Step, kinds, mapped
from fishleg.report.style import figure, table


@dataclass(frozen=True)
class Series:
    """Points (sparsity, value, tooltip) that share a mark and a place in the legend."""

    name: str
    colour: str
    shape: str
    points: list[tuple[float, float, str]]
    joined: bool = False


def collect_series(steps: Sequence[Step], metric: Metric, tunes: bool) -> list[Series]:
    """The points of the prunings; without fine-tuning there is one measurement and not two."""
    pruned = Series("after pruning", "c2", "diamond", [], joined=not tunes)
    tuned = Series("after fine-tuning", "c1", "dot", [], joined=True)
    rejected = Series("rejected trial", "c3", "cross", [])
    for step in steps:
        if step.rejected:
            found = [(rejected, step.last)]
        elif tunes:
            found = [(pruned, step.pruned), (tuned, step.tuned)]
        else:
            found = [(pruned, step.last)]
        for series, value in found:
            if value is not None:
                why = f" ({step.reason})" if step.rejected and step.reason else ""
                text = f"{series.name} at {percent(step.sparsity)} sparsity: {metric.text(value)}{why}"
                series.points.append((step.sparsity, value, text))
    return [series for series in (pruned, tuned, rejected) if series.points]


def metric_section(
    run: dict[str, Any], events: Sequence[Event], steps: Sequence[Step], metric: Metric
) -> str:
    """The metric against sparsity, with the numbers beside it."""
    dense = number(mapped(run.get("dense")).get(metric.value))
    final, at = number(mapped(run.get("sparse")).get(metric.value)), number(run.get("sparsity"))
    tunes = run.get("mode") == "gradual" or bool(kinds(events, "train"))
    series = collect_series(steps, metric, tunes)
    if final is not None and at is not None:
        text = f"final model at {percent(at)} sparsity: {metric.text(final)}"
        series.append(Series("final model", "c1" if tunes else "c2", "ring", [(at, final, text)]))
    if not series:
        return ""
    entries = [(s.colour, s.shape, s.name) for s in series]
    entries += [("muted", "dash", f"dense model, {metric.text(dense)}")] if dense is not None else []
    reading = (
        f"{'Higher' if metric.higher else 'Lower'} is better. The axis is stretched towards 100 % sparsity: "
        "equal distances mean equal factors of compression."
    )
    limits, clipped = value_range(series, dense, metric.higher)
    if clipped:
        reading += " Triangles at the edge stand for points beyond it, with their value."
    chart = responsive(lambda width: draw(width, series, dense, limits, metric), WIDE)
    numbers = numbers_table(steps, metric, tunes)
    content = f'<div class="beside"><div>{key(*entries)}{chart}</div>{numbers}</div>'
    return figure(f"{metric.title} against sparsity", reading, content)


def value_range(
    series: Sequence[Series], dense: float | None, higher: bool
) -> tuple[tuple[float, float], bool]:
    """The range of the axis, and whether it leaves points out.

    A collapse right after pruning must not flatten the differences that matter in the end.
    """
    reference = [] if dense is None else [dense]
    lo, hi = padded([v for s in series for _, v, _ in s.points] + reference)
    core = [v for s in series if s.shape != "diamond" for _, v, _ in s.points]
    if core and any(s.shape == "dot" for s in series):
        low, high = padded(core + reference, 0.12)
        room = 3 * (high - low)
        near = (max(lo, high - room), high) if higher else (low, min(hi, low + room))
        if near[1] - near[0] < 0.6 * (hi - lo):
            return near, True
    return (lo, hi), False


def draw(
    width: int, series: Sequence[Series], dense: float | None, limits: tuple[float, float], metric: Metric
) -> str:
    """The chart."""
    lo, hi = limits
    deepest = 1.04 * depth(max(s for group in series for s, _, _ in group.points)) or 0.1
    height = 360 if width > 400 else 320
    axes = frame(width, height, (0.0, deepest), limits, x_ticks=sparsity_ticks, y_format=metric.tick)
    body = []
    if dense is not None:
        body.append(f'<path class="dash muted" d="M{axes.x.start} {axes.y(dense)}H{axes.x.end}"/>')
    for group in series:
        ordered = sorted(group.points)
        at = [(axes.x(depth(s)), axes.y(min(max(v, lo), hi))) for s, v, _ in ordered]
        body.append(f'<g class="{group.colour}">')
        if group.joined and len(at) > 1:
            body.append(f'<path class="line" d="M{"L".join(f"{x} {y}" for x, y in at)}"/>')
        for (x, y), (_, value, text) in zip(at, ordered, strict=True):
            if lo <= value <= hi:
                body.append(mark(group.shape, x, y, text))
                continue
            anchor = "middle" if x < axes.x.end - 24 else "end"
            said = escape(metric.text(value))
            place = f'x="{x}" y="{y + (-15 if value < lo else 24):.2f}" text-anchor="{anchor}"'
            label = f'<text class="small" {place}>{said}</text>'
            body.append(mark("down" if value < lo else "up", x, y, text, label))
        body.append("</g>")
    unit = f" [{metric.unit}]" if metric.unit else ""
    aria = f"{metric.title} against sparsity. " + "; ".join(t for s in series for _, _, t in s.points)
    return axes.svg("".join(body), "sparsity [% of prunable weights]", metric.title + unit, aria)


def numbers_table(steps: Sequence[Step], metric: Metric, tunes: bool) -> str:
    """What the chart shows, to read off and to copy."""
    if len(steps) < 2:
        return ""
    rows = []
    for step in steps:
        values = (step.pruned, step.tuned) if tunes else (step.last,)
        texts = ["–" if value is None else metric.text(value) for value in values]
        rows.append([percent(step.sparsity), *texts, "rejected" if step.rejected else ""])
    head = ["Sparsity", "Pruned", "Tuned", ""] if tunes else ["Sparsity", metric.title, ""]
    if not any(step.rejected for step in steps):
        head, rows = head[:-1], [row[:-1] for row in rows]
    return table(head, rows, "numbers")
