"""Small SVG charts, as strings.

Colours come from the classes c1, c2 and c3 of the style sheet, so one drawing serves a light and a dark page.
The text of an SVG shrinks with the picture. Therefore every chart takes its width, and `responsive` draws it
twice: the style sheet shows the drawing that fits the screen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from fishleg.report.marks import mark, tooltip
from fishleg.report.scales import Axes, make_axes, padded, power_text

WIDE, _HALF, _NARROW = 660, 500, 330  # the widths of charts in pixels; the last is that of a phone
_POINTS = 240  # that the curves of a chart are drawn with: more than a phone has pixels for
_TOOLTIPS = 60  # of the curves of a chart

Point = tuple[float, float, str]  # x, y, tooltip
Pair = tuple[float, float, str, str]  # predicted, measured, label, tooltip


@dataclass(frozen=True)
class Curve:
    """A line through many points.

    Attributes:
        colour: The class of its colour.
        points: The points (x, y, tooltip).
    """

    colour: str
    points: Sequence[Point]


def responsive(draw: Callable[[int], str], width: int = _HALF) -> str:
    """Draw a chart for a wide and for a narrow screen. The style sheet shows only one of the two.

    Args:
        draw: Draws the chart in a width in pixels.
        width: The width on a wide screen.

    Returns:
        The HTML of both drawings.
    """
    return f'<div class="wide">{draw(width)}</div><div class="narrow">{draw(_NARROW)}</div>'


def curve_chart(
    width: int,
    height: int,
    curves: Sequence[Curve],
    labels: tuple[str, str, str],
    healthy: tuple[float, float] | None = None,
    dividers: Sequence[tuple[float, str]] = (),
) -> str:
    """Draw long curves. Where there are too many points, draw their mean and the range that they cover.

    Args:
        width: The width of the chart in pixels.
        height: The height of the chart in pixels.
        curves: The curves, with at least one point in all.
        labels: The label of x, the label of y, and the description for screen readers.
        healthy: A range of y that is shaded and always in view.
        dividers: Vertical lines, with their text.

    Returns:
        The SVG of the chart.
    """
    total = sum(len(curve.points) for curve in curves)
    xs = [x for curve in curves for x, _, _ in curve.points]
    ys = [y for curve in curves for _, y, _ in curve.points]
    y_range = padded([*ys, *(2 * h for h in healthy or ())])
    axes = make_axes(width, height, (min(xs), max(xs)) if max(xs) > min(xs) else padded(xs), y_range)
    body = []
    if healthy:
        low, high = axes.y(healthy[0]), axes.y(healthy[1])
        span = f'x="{axes.x.start}" width="{axes.x.end - axes.x.start:.2f}"'
        body.append(f'<rect class="healthy" {span} y="{high}" height="{low - high:.2f}"/>')
    body.append(_draw_dividers(axes, width, dividers))
    body += [_draw_curve(axes, curve, total) for curve in curves]
    return axes.svg("".join(body), *labels)


def _draw_dividers(axes: Axes, width: int, dividers: Sequence[tuple[float, str]]) -> str:
    parts = []
    last_text = -math.inf
    for at, text in dividers:
        x = axes.x(at)
        parts.append(f'<path class="divider" d="M{x} {axes.y.start}V{axes.y.end}"/>')
        if x - last_text >= 40 and x + 30 < width:
            parts.append(f'<text class="small" x="{x + 4:.2f}" y="{axes.y.end + 8}">{escape(text)}</text>')
            last_text = x
    return "".join(parts)


def _draw_curve(axes: Axes, curve: Curve, total: int) -> str:
    limit = max(2, _POINTS * len(curve.points) // total)
    size = math.ceil(len(curve.points) / limit)
    buckets = [curve.points[i : i + size] for i in range(0, len(curve.points), size)]
    line = [(axes.x(sum(p[0] for p in b) / len(b)), axes.y(sum(p[1] for p in b) / len(b))) for b in buckets]
    shapes = []
    if size > 1:
        upper = [f"{x} {axes.y(max(p[1] for p in b))}" for (x, _), b in zip(line, buckets, strict=True)]
        lower = [f"{x} {axes.y(min(p[1] for p in b))}" for (x, _), b in zip(line, buckets, strict=True)]
        shapes.append(f'<path class="area" d="M{"L".join([*upper, *reversed(lower)])}z"/>')
    if len(line) > 1:
        shapes.append(f'<path class="line" d="M{"L".join(f"{x} {y}" for x, y in line)}"/>')
    every = max(1, math.ceil(total / size / _TOOLTIPS))
    dots = "solid" if len(line) == 1 else "hover"
    for (x, y), bucket in list(zip(line, buckets, strict=True))[::-every]:
        radius = 3.5 if dots == "solid" else 5
        shapes.append(
            f'<circle class="{dots}" cx="{x}" cy="{y}" r="{radius}">{tooltip(bucket[-1][2])}</circle>'
        )
    return f'<g class="{curve.colour}">{"".join(shapes)}</g>'


def fidelity_chart(width: int, pairs: Sequence[Pair], total: Pair | None, aria: str) -> str:
    """Draw measured against predicted values, with the line where both agree.

    Args:
        width: The width of the chart in pixels.
        pairs: (predicted, measured, label, tooltip) of each step, with positive values.
        total: The same of all steps together, which has a mark of its own; None: unknown.
        aria: The description for screen readers.

    Returns:
        The SVG of the chart.
    """
    drawn = [*pairs, *([] if total is None else [total])]
    values = [value for pair in drawn for value in pair[:2]]
    lo, hi = min(values) / 2, max(values) * 2
    axes = make_axes(
        width, min(400, width), (lo, hi), (lo, hi), log=True, x_format=power_text, y_format=power_text
    )
    x, y = axes.x, axes.y
    # the region within a factor of two
    corners = [(lo, lo), (lo, 2 * lo), (hi / 2, hi), (hi, hi), (hi, hi / 2), (2 * lo, lo)]
    body = [
        f'<path class="healthy" d="M{"L".join(f"{x(a)} {y(b)}" for a, b in corners)}z"/>',
        f'<path class="dash muted" d="M{x(lo)} {y(lo)}L{x(hi)} {y(hi)}"/>',
    ]
    dots = [(x(predicted), y(measured)) for predicted, measured, _, _ in drawn]
    labelled: list[tuple[float, float]] = []
    for pair in reversed(drawn):
        predicted, measured, label, title = pair
        at = x(predicted), y(measured)
        text = ""
        side = -1 if measured > predicted else 1  # away from the line
        middle = at[0] + 29 * side, at[1] + 8 * side
        free = all(abs(middle[0] - a) > 28 or abs(middle[1] - b) > 9 for a, b in dots)
        free = free and all(abs(middle[0] - a) > 46 or abs(middle[1] - b) > 14 for a, b in labelled)
        if free and x.start < at[0] + 56 * side < x.end:
            place = f'x="{at[0] + 8 * side:.2f}" y="{middle[1] + 4:.2f}"'
            anchor = "end" if side < 0 else "start"
            text = f'<text class="small" {place} text-anchor="{anchor}">{escape(label)}</text>'
            labelled.append(middle)
        colour, shape = ("c2", "square") if pair is total else ("c1", "dot")
        body.append(f'<g class="{colour}">{mark(shape, *at, title, text)}</g>')
    return axes.svg("".join(body), "predicted increase of the loss", "measured increase of the loss", aria)
