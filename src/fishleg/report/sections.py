"""The sections below the headline: each returns HTML, or nothing where the record holds nothing for it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from fishleg.report.charts import (
    Curve,
    Scale,
    bar,
    box,
    curve_chart,
    fidelity_chart,
    key,
    power_text,
    responsive,
)
from fishleg.report.numbers import NB, count, duration, number, percent, plain
from fishleg.report.record import Event, Step, kinds, listed, mapped
from fishleg.report.style import figure, table

SMALLEST = 1e-90  # of a logarithmic axis


PHASES = {"estimate": "c1", "refine": "c2", "train": "c3"}


LONG = 40  # layers from which the table scrolls inside its frame


def layers_section(run: dict[str, Any]) -> str:
    """How much of each layer went, and how dear its weights are."""
    layers = [layer for layer in listed(run.get("layers")) if isinstance(layer, dict)]
    if not layers:
        return ""
    saliencies = []
    for layer in layers:
        quantiles = [number(q) for q in listed(layer.get("saliency"))]
        clean = sorted(q for q in quantiles if q is not None)
        saliencies.append(clean if len(clean) == len(quantiles) == 5 and clean[2] > SMALLEST else None)
    drawn = [q for quantiles in saliencies if quantiles for q in quantiles if q > SMALLEST]
    scale = Scale(min(drawn) / 1.5, max(drawn) * 1.5, 0, 100, log=True) if drawn else None
    overall = number(run.get("sparsity"))
    overall = overall if overall is not None and 0 <= overall <= 1 else None
    has_macs = any(number(layer.get("macs")) is not None for layer in layers)
    rows = [layer_row(*pair, scale, overall, has_macs) for pair in zip(layers, saliencies, strict=True)]
    heads = [("name", "Layer"), ("size", "Weights"), *([("macs", "MACs")] if has_macs else [])]
    head = "".join(f'<th scope="col" class="{kind}">{text}</th>' for kind, text in heads)
    shares = ruler([(v, f"{v}{NB}%") for v in (0, 100)])
    head += f'<th scope="col" class="picture">Sparsity{shares}</th><td class="share"></td>'
    reading = "The longer the bar, the more of the layer is zero."
    if overall is not None:
        reading += f" The thin line marks the {percent(overall)} of the whole."
    if scale:
        values = scale.ticks()
        marks = ruler([(scale(v), power_text(v, values)) for v in values])
        head += f'<th scope="col" class="saliency">Saliency{marks}</th>'
        reading += (
            " Saliency is the predicted increase of the loss when one weight goes: a line from 5 to 95 % of "
            "the weights, a box for the middle half, a tick for the median; further left is cheaper to prune."
        )
    kind = "layers long" if len(layers) > LONG else "layers"
    content = (
        f'<div class="scroll {kind}" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
    return figure(f"Layers ({len(layers)})", reading, content)


def ruler(ticks: Sequence[tuple[float, str]]) -> str:
    """The axis of a column of strips: text at percentages of its width."""
    marks = []
    for at, text in ticks:
        side = "first" if at < 6 else "last" if at > 94 else ""
        marks.append(f'<i class="{side}" style="left:{at:.1f}%">{escape(text)}</i>')
    return f'<span class="ruler">{"".join(marks)}</span>'


def layer_row(
    layer: dict[str, Any],
    quantiles: list[float] | None,
    scale: Scale | None,
    overall: float | None,
    macs: bool,
) -> str:
    """One line of the table of layers."""
    name = str(layer.get("name") or "?")
    shape = " × ".join(str(n) for n in listed(layer.get("shape")))
    size, sparsity, work = (number(layer.get(k)) for k in ("size", "sparsity", "macs"))
    reason = layer.get("reason")
    title = escape(f"{name} {shape}", quote=True)
    # Long names wrap at their dots: an ellipsis would hide just what tells layers apart.
    broken = escape(name).replace(".", ".<wbr>")
    cells = [f'<th scope="row" title="{title}">{broken} <small>{escape(shape)}</small></th>']
    cells.append(f'<td class="amount size">{"–" if size is None else count(size)}</td>')
    if macs:
        cells.append(f'<td class="amount macs">{"–" if work is None else count(work)}</td>')
    if reason:
        cells.append(f'<td colspan="2" class="reason">not pruned: {escape(str(reason))}</td>')
    elif sparsity is None:
        cells.append('<td colspan="2" class="reason">not recorded</td>')
    else:
        picture = bar(sparsity, f"{name}: sparsity {percent(sparsity)}", overall)
        cells.append(f'<td class="picture">{picture}</td><td class="amount share">{percent(sparsity)}</td>')
    if scale and quantiles:
        q05, q25, median, q75, q95 = (plain(q) for q in quantiles)
        aria = f"{name}: saliency median {median}, middle half {q25} to {q75}, 5 to 95 %: {q05} to {q95}"
        cells.append(f'<td class="picture saliency">{box(quantiles, scale, aria)}</td>')
    elif scale:
        cells.append('<td class="saliency none"></td>')
    return f"<tr>{''.join(cells)}</tr>"


def fidelity_section(steps: Sequence[Step]) -> str:
    """Does the quadratic model of the loss hold?"""
    known = [s for s in steps if s.predicted is not None and s.measured is not None]
    pairs = [
        (
            s.predicted,
            s.measured,
            percent(s.sparsity),
            f"to {percent(s.sparsity)}: predicted {plain(s.predicted)}, measured {plain(s.measured)}",
        )
        for s in known
        if s.predicted is not None and s.measured is not None and min(s.predicted, s.measured) > SMALLEST
    ]
    if not known:
        return ""
    left_out = ""
    if len(pairs) < len(known):
        rows = [
            [percent(s.sparsity), plain(s.predicted or 0.0), plain(s.measured or 0.0)]
            for s in known
            if min(s.predicted or 0.0, s.measured or 0.0) <= SMALLEST
        ]
        said = "Not on the chart, whose logarithmic axes have no place for zero or less:"
        left_out = f'<p class="reading">{said}</p>' + table(["Sparsity", "Predicted", "Measured"], rows)
    chart = ""
    if pairs:
        entries = [("c1", "dot", "one pruning"), ("muted", "dash", "both agree")]
        entries.append(("muted", "area", "within a factor of two"))
        aria = "Measured against predicted increase of the loss. " + "; ".join(pair[3] for pair in pairs)
        chart = key(*entries) + responsive(lambda width: fidelity_chart(width, pairs, aria))
    reading = "How much each pruning raised the loss before any fine-tuning"
    reading += ": above the dashed line it did more harm than predicted, below it less." if pairs else "."
    return figure("Predicted and measured increase of the loss", reading, chart + left_out)


def running_steps(events: Sequence[Event]) -> list[tuple[int, float]]:
    """Steps that go on counting where the log starts again from one, with the number of the start."""
    result, starts, offset, previous = list[tuple[int, float]](), 0, 0.0, 0.0
    for event in events:
        step = number(event.get("step"))
        step = previous + 1 if step is None else step
        if step < previous:
            starts, offset = starts + 1, offset + previous
        result.append((starts, offset + step))
        previous = step
    return result


def q_section(events: Sequence[Event]) -> str:
    """How well Q has learnt the inverse of the Fisher matrix."""
    learned = kinds(events, "q")
    at = running_steps(learned)
    charts, phases = [], list[str]()
    for field, label in (("gauge", "gauge"), ("loss", "auxiliary loss")):
        curves: list[tuple[str, list[tuple[float, float, str]]]] = []
        previous = 0
        for (start, step), event in zip(at, learned, strict=True):
            value, phase = number(event.get(field)), str(event.get("phase") or "estimate")
            if value is None:
                continue
            if not curves or curves[-1][0] != phase or start != previous:
                curves.append((phase, []))
                previous = start
            curves[-1][1].append((step, value, f"{phase}, step {step:g}: {label} {plain(value)}"))
        if not curves:
            continue
        phases += dict.fromkeys(phase for phase, _ in curves if phase not in phases)
        last = plain(curves[-1][1][-1][1])
        labels = ("step of the auxiliary optimiser", label, f"{label} of Q over the steps, last value {last}")
        lines = [Curve(PHASES.get(phase, "c1"), points) for phase, points in curves]
        healthy = (-0.05, 0.05) if field == "gauge" else None
        charts.append(
            responsive(lambda width, c=lines, n=labels, h=healthy: curve_chart(width, 215, c, n, h))  # type: ignore[misc]
        )
    if not charts:
        return ""
    entries = [(PHASES.get(phase, "c1"), "line", phase) for phase in phases]
    entries.append(("muted", "area", "healthy gauge, ±0.05"))
    reading = (
        "Q has learnt the inverse of the Fisher matrix when the gauge stays in the shaded band round zero "
        "and the loss has levelled out."
    )
    return figure("Convergence of Q", reading, key(*entries) + "".join(charts))


def training_section(events: Sequence[Event]) -> str:
    """The training between the prunings."""
    # a resumed run repeats steps; what it did last counts
    latest: dict[tuple[float, float], Event] = {}
    for event in kinds(events, "train"):
        stage, step = number(event.get("stage")) or 0.0, number(event.get("step"))
        if step is not None and number(event.get("loss")) is not None:
            latest[stage, step] = event
    points, dividers = list[tuple[float, float, str]](), list[tuple[float, str]]()
    offset = end = 0.0
    current: float | None = None
    for (stage, step), event in sorted(latest.items(), key=lambda item: item[0]):
        if stage != current:
            offset, current = end, stage
            dividers.append((offset, f"{stage:g}"))
        end = offset + max(step, number(event.get("steps")) or 0.0)
        loss, rate = number(event.get("loss")), number(event.get("lr"))
        said = f"stage {stage:g}, step {step:g}: loss {plain(loss or 0.0)}"
        said += "" if rate is None else f", learning rate {plain(rate)}"
        points.append((offset + step, loss or 0.0, said))
    if not points:
        return ""
    aria = f"Training loss over the steps, from {plain(points[0][1])} to {plain(points[-1][1])}"
    labels = ("training step", "training loss", aria)
    curves = [Curve("c1", points)]
    lines = [d for d in dividers if d[0] >= points[0][0]] if len(dividers) > 1 else []
    chart = responsive(lambda width: curve_chart(width, 290, curves, labels, None, lines))
    reading = (
        "Each pruning (vertical lines, with the number of the stage) throws the loss up; fine-tuning brings "
        "it back down."
    )
    return figure("Training loss", reading, chart)


def timing_section(run: dict[str, Any]) -> str:
    """Where the time went."""
    parts = [
        (str(k), v)
        for k, raw in mapped(run.get("timing")).items()
        if (v := number(raw)) is not None and v > 0
    ]
    if not parts:
        return ""
    total, longest = sum(v for _, v in parts), max(v for _, v in parts)
    rows = []
    for name, value in sorted(parts, key=lambda part: -part[1]):
        said = f"{name}: {duration(value)}, {percent(value / total)}"
        rows.append(
            f'<tr><th scope="row">{escape(name)}</th><td class="picture">{bar(value / longest, said)}</td>'
            f'<td class="amount">{duration(value)}</td><td class="amount">{percent(value / total)}</td></tr>'
        )
    reading = f"The longest bar is what a faster run would have to shorten; all together {duration(total)}."
    content = f'<div class="scroll timing"><table><tbody>{"".join(rows)}</tbody></table></div>'
    return figure("Where the time went", reading, content)


def environment_section(run: dict[str, Any]) -> str:
    """What the run ran on."""
    pairs = mapped(run.get("environment")).items()
    items = "".join(f"<div><dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd></div>" for k, v in pairs)
    return f'<section class="panel"><h2>Environment</h2><dl>{items}</dl></section>' if items else ""


def recipe_section(recipe: str) -> str:
    """The exact text, to run it again."""
    if not recipe.strip():
        return ""
    return (
        '<section class="panel"><details open><summary><h2>Recipe</h2></summary>'
        f'<pre tabindex="0">\n{escape(recipe)}</pre></details></section>'
    )


def command_section(run: dict[str, Any]) -> str:
    """The command line."""
    command = run.get("command")
    if not command:
        return ""
    return (
        f'<section class="panel"><h2>Command</h2><pre tabindex="0">\n{escape(str(command))}</pre></section>'
    )
