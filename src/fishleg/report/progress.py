"""The sections with curves over the run: predicted and measured loss, the learning of Q, and training."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from fishleg.report.charts import Curve, Pair, Point, curve_chart, fidelity_chart, responsive
from fishleg.report.marks import legend
from fishleg.report.numbers import number, percent, plain
from fishleg.report.record import Event, Step, as_mapping, events_of_kind
from fishleg.report.style import figure, table

_SMALLEST = 1e-90  # of a logarithmic axis
_PHASE_COLOURS = {"estimate": "c1", "refine": "c2", "train": "c3"}
_HEALTHY_GAUGE = (-0.05, 0.05)


def fidelity_section(run: dict[str, Any], steps: Sequence[Step]) -> str:
    """Compare the increase of the loss that the quadratic model predicts with the measured one.

    Args:
        run: The record of the run; its entry `total` is about all steps together.
        steps: The pruning steps.

    Returns:
        The HTML of the section; empty without data.
    """
    known = [
        (step.predicted, step.measured, percent(step.sparsity))
        for step in steps
        if step.predicted is not None and step.measured is not None
    ]
    sentence, total = _total(as_mapping(run.get("total")))
    if not known and not sentence:
        return ""
    pairs = [
        (predicted, measured, at, f"to {at}: predicted {plain(predicted)}, measured {plain(measured)}")
        for predicted, measured, at in known
        if min(predicted, measured) > _SMALLEST
    ]
    chart = _draw_fidelity(pairs, total) if pairs else ""
    reading = "The increase of the loss in each pruning step, before any fine-tuning." if known else ""
    if pairs:
        reading += " Above the dashed line the loss rose more than predicted, below it less."
    return figure("Predicted and measured increase of the loss", reading, sentence + chart + _left_out(known))


def _draw_fidelity(pairs: Sequence[Pair], total: Pair | None) -> str:
    entries = [("c1", "dot", "one pruning step")]
    entries += [("c2", "square", "all steps together")] if total is not None else []
    entries += [("muted", "dash", "both agree"), ("muted", "area", "within a factor of two")]
    texts = [pair[3] for pair in (*pairs, *([] if total is None else [total]))]
    aria = "Measured against predicted increase of the loss. " + "; ".join(texts)
    return legend(*entries) + responsive(lambda width: fidelity_chart(width, pairs, total, aria))


def _left_out(known: Sequence[tuple[float, float, str]]) -> str:
    """Return a table of the steps that logarithmic axes cannot show."""
    rows = [
        [at, plain(predicted), plain(measured)]
        for predicted, measured, at in known
        if min(predicted, measured) <= _SMALLEST
    ]
    if not rows:
        return ""
    note = "These steps are not in the chart, because its logarithmic axes cannot show zero or less:"
    return f'<p class="reading">{note}</p>' + table(["Sparsity", "Predicted", "Measured"], rows)


def _total(total: dict[str, Any]) -> tuple[str, Pair | None]:
    """Return what is known about all steps together, as HTML, and as a point if it can be drawn."""
    predicted, measured = number(total.get("predicted")), number(total.get("measured"))
    steps, verdict = number(total.get("steps")), total.get("verdict")
    if measured is None:
        return "", None
    several = f"All {steps:g} steps together" if steps and steps > 1 else "The whole pruning"
    texts = [f"{several}: the KL divergence from the outputs of the dense model is {plain(measured)}."]
    point: Pair | None = None
    if predicted is not None:
        texts.append(f"The sum of the predictions is {plain(predicted)}{_ratio(predicted, measured)}.")
        if steps and steps > 1 and min(predicted, measured) > _SMALLEST:
            text = f"all steps: predicted {plain(predicted)}, measured {plain(measured)}"
            point = predicted, measured, "all steps", text
    sentence = escape(" ".join(texts))
    if not verdict:
        return f"<p>{sentence}</p>", point
    # the whole verdict stands among the warnings of the run
    warning = f"<h2>The predictions do not add up</h2><p>{sentence}</p>"
    return f'<div class="banner bad" role="note">{warning}</div>', point


def _ratio(predicted: float, measured: float) -> str:
    if min(predicted, measured) <= _SMALLEST:
        return ""
    ratio = measured / predicted
    if 0.95 < ratio < 1.05:
        return ": both agree"
    return f"; measured is {plain(float(f'{ratio:.2g}'))} times as much"


def _continuous_steps(events: Sequence[Event]) -> list[tuple[int, float]]:
    """Return (number of the restart, step) per event; steps continue where the log restarts at one."""
    result, restarts, offset, previous = list[tuple[int, float]](), 0, 0.0, 0.0
    for event in events:
        step = number(event.get("step"))
        step = previous + 1 if step is None else step
        if step < previous:
            restarts, offset = restarts + 1, offset + previous
        result.append((restarts, offset + step))
        previous = step
    return result


def _phase_curves(events: Sequence[Event], field: str, label: str) -> list[tuple[str, list[Point]]]:
    """Return the points of one field, a list per phase and per restart of the log."""
    curves: list[tuple[str, list[Point]]] = []
    previous = 0
    for (restart, step), event in zip(_continuous_steps(events), events, strict=True):
        value, phase = number(event.get(field)), str(event.get("phase") or "estimate")
        if value is None:
            continue
        if not curves or curves[-1][0] != phase or restart != previous:
            curves.append((phase, []))
            previous = restart
        curves[-1][1].append((step, value, f"{phase}, step {step:g}: {label} {plain(value)}"))
    return curves


def q_section(events: Sequence[Event]) -> str:
    """Show how well Q has learned the inverse of the Fisher matrix.

    Args:
        events: The events of the log.

    Returns:
        The HTML of the section; empty without data.
    """
    learned = events_of_kind(events, "q")
    charts, phases = [], list[str]()
    for field, label in (("gauge", "gauge"), ("auxiliary_loss", "auxiliary loss")):
        curves = _phase_curves(learned, field, label)
        if not curves:
            continue
        phases += dict.fromkeys(phase for phase, _ in curves if phase not in phases)
        last = plain(curves[-1][1][-1][1])
        labels = ("step of the auxiliary optimiser", label, f"{label} of Q over the steps, last value {last}")
        lines = [Curve(_PHASE_COLOURS.get(phase, "c1"), points) for phase, points in curves]
        healthy = _HEALTHY_GAUGE if field == "gauge" else None
        charts.append(_responsive_curves(215, lines, labels, healthy))
    if not charts:
        return ""
    entries = [(_PHASE_COLOURS.get(phase, "c1"), "line", phase) for phase in phases]
    entries.append(("muted", "area", "healthy gauge, ±0.05"))
    reading = (
        "Q has learned the inverse of the Fisher matrix when the gauge stays in the shaded band around zero "
        "and the loss no longer falls."
    )
    return figure("Convergence of Q", reading, legend(*entries) + "".join(charts))


def _responsive_curves(
    height: int,
    curves: Sequence[Curve],
    labels: tuple[str, str, str],
    healthy: tuple[float, float] | None = None,
    dividers: Sequence[tuple[float, str]] = (),
) -> str:
    return responsive(lambda width: curve_chart(width, height, curves, labels, healthy, dividers))


def training_section(events: Sequence[Event]) -> str:
    """Show the loss of the training between the pruning steps.

    Args:
        events: The events of the log.

    Returns:
        The HTML of the section; empty without data.
    """
    # A resumed run repeats steps. The last repetition counts.
    latest: dict[tuple[float, float], tuple[Event, float]] = {}
    for event in events_of_kind(events, "train"):
        stage, step = number(event.get("stage")) or 0.0, number(event.get("step"))
        loss = number(event.get("loss"))
        if step is not None and loss is not None:
            latest[stage, step] = event, loss
    points, dividers = list[Point](), list[tuple[float, str]]()
    offset = end = 0.0
    current: float | None = None
    for (stage, step), (event, loss) in sorted(latest.items(), key=lambda item: item[0]):
        if stage != current:
            offset, current = end, stage
            dividers.append((offset, f"{stage:g}"))
        end = offset + max(step, number(event.get("steps")) or 0.0)
        rate = number(event.get("lr"))
        text = f"stage {stage:g}, step {step:g}: loss {plain(loss)}"
        text += "" if rate is None else f", learning rate {plain(rate)}"
        points.append((offset + step, loss, text))
    if not points:
        return ""
    aria = f"Training loss over the steps, from {plain(points[0][1])} to {plain(points[-1][1])}"
    lines = [d for d in dividers if d[0] >= points[0][0]] if len(dividers) > 1 else []
    chart = _responsive_curves(
        290, [Curve("c1", points)], ("training step", "training loss", aria), None, lines
    )
    reading = (
        "The vertical lines mark the pruning steps, with the number of the stage. Pruning raises the loss. "
        "Fine-tuning lowers it again."
    )
    return figure("Training loss", reading, chart)
