"""Small SVG charts, as strings.

Nothing here is specific to one page. Colours come from the classes c1, c2 and c3 of the page's style sheet,
so one drawing serves light and dark. SVG text shrinks with its picture; hence every chart takes its width,
and `responsive` draws it twice and lets the style sheet show the one that fits the screen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from fishleg.report.numbers import EXPONENTS, plain, signed

WIDE, HALF, NARROW = 660, 500, 330  # pixels a chart is drawn for; the last is a phone


POINTS = 240  # of a long curve; more than the pixels of a phone can show


HOVERS = 60  # points of a long curve with a tooltip


SPARSITY_TICKS = (0, 90, 50, 99, 95, 75, 98, 99.9, 99.5, 80, 25, 60, 99.8, 99.99, 10, 40, 20, 30, 5, 2, 1)


@dataclass(frozen=True)
class Scale:
    """Maps values onto pixels; `lo` is drawn at `start`."""

    lo: float
    hi: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        lo, hi = self.lo, self.hi
        if self.log:
            lo, hi, value = math.log10(lo), math.log10(hi), math.log10(max(value, self.lo))
        return round(self.start + (self.end - self.start) * (value - lo) / (hi - lo), 2)

    def ticks(self, most: int = 5) -> list[float]:
        """Round values inside the range, about as many as asked for."""
        if not self.log:
            step = nice_step((self.hi - self.lo) / most)
            first, last = math.ceil(self.lo / step - 1e-9), math.floor(self.hi / step + 1e-9)
            return [round(i * step, 12) if step > 1e-9 else i * step for i in range(first, last + 1)]
        first, last = math.ceil(math.log10(self.lo) - 1e-9), math.floor(math.log10(self.hi) + 1e-9)
        if last - first < 1:  # hardly a decade
            values = [m * 10.0**e for e in range(first - 1, last + 1) for m in (1, 2, 5)]
            return [v for v in values if self.lo <= v <= self.hi]
        return [10.0**e for e in range(first, last + 1, max(1, math.ceil((last - first + 1) / most)))]


def nice_step(rough: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next((m * power for m in (1, 2, 5) if m * power >= rough * (1 - 1e-9)), 10 * power)


def padded(values: Sequence[float], share: float = 0.08) -> tuple[float, float]:
    """A range round the values that is never empty."""
    lo, hi = min(values), max(values)
    pad = share * (hi - lo) or max(abs(hi) * 0.05, 1e-6)
    return lo - pad, hi + pad


def depth(sparsity: float) -> float:
    """Powers of ten of compression: 0 for dense, 1 at 90 %, 2 at 99 %; keeps 90, 95 and 98 % apart."""
    return -math.log10(1 - min(max(sparsity, 0.0), 0.9999))


def tip(text: str) -> str:
    """A tooltip that needs no script."""
    return f"<title>{escape(text)}</title>"


def mark(kind: str, x: float, y: float, title: str, extra: str = "") -> str:
    """One point of a chart."""
    shape = {
        "dot": f'<circle cx="{x}" cy="{y}" r="4.5" class="solid"/>',
        "ring": f'<circle cx="{x}" cy="{y}" r="7" class="ring"/>',
        "diamond": f'<path d="M{x} {y - 5.5:.2f}l5.5 5.5-5.5 5.5-5.5-5.5z" class="open"/>',
        "cross": f'<path d="M{x - 5:.2f} {y - 5:.2f}l10 10m0-10l-10 10" class="stroke"/>',
        "down": f'<path d="M{x - 5.5:.2f} {y - 9:.2f}h11l-5.5 9z" class="open"/>',
        "up": f'<path d="M{x - 5.5:.2f} {y + 9:.2f}h11l-5.5-9z" class="open"/>',
    }[kind]
    return f'<g class="mark">{tip(title)}{shape}{extra}</g>'


def key(*entries: tuple[str, str, str]) -> str:
    """A legend of (colour class, kind of mark, text)."""
    drawn = []
    for colour, kind, text in entries:
        if kind in ("line", "dash"):
            shape = f'<path d="M1 8h18" class="{kind}"/>'
        elif kind == "area":
            shape = '<rect x="1" y="2" width="18" height="12" class="area"/>'
        else:
            shape = mark(kind, 10, {"down": 12, "up": 4}.get(kind, 8), text)
        swatch = f'<svg class="{colour}" viewBox="0 0 20 16" width="20" height="16" aria-hidden="true">'
        drawn.append(f"<li>{swatch}{shape}</svg>{escape(text)}</li>")
    return f'<ul class="key">{"".join(drawn)}</ul>'


def responsive(draw: Callable[[int], str], width: int = HALF) -> str:
    """The same chart for a wide and for a narrow screen; only one of the two is shown, also to readers."""
    return f'<div class="wide">{draw(width)}</div><div class="narrow">{draw(NARROW)}</div>'


@dataclass(frozen=True)
class Frame:
    """The axes of one chart and all that surrounds its marks."""

    x: Scale
    y: Scale
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]

    def svg(self, body: str, x_label: str, y_label: str, aria: str) -> str:
        """The finished picture."""
        left, right, bottom, top = self.x.start, self.x.end, self.y.start, self.y.end
        parts = []
        for value, text in self.y_ticks:
            y = self.y(value)
            parts.append(f'<path class="grid" d="M{left} {y}H{right}"/>')
            parts.append(f'<text x="{left - 7}" y="{y + 4:.2f}" text-anchor="end">{escape(text)}</text>')
        for value, text in self.x_ticks:
            x = self.x(value)
            parts.append(f'<path class="tick" d="M{x} {bottom}v5"/>')
            parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{escape(text)}</text>')
        parts.append(f'<path class="axis" d="M{left} {bottom}H{right}"/>')
        # Above the axis and not along it: turned text is hard to read and takes width a phone has not.
        parts.append(f'<text class="label" x="4" y="{top - 12}">{escape(y_label)}</text>')
        parts.append(
            f'<text class="label" x="{(left + right) / 2}" y="{bottom + 37}" text-anchor="middle">'
            f"{escape(x_label)}</text>"
        )
        size = f"0 0 {right + 14:g} {bottom + 44:g}"
        head = f'<svg class="chart" viewBox="{size}" role="img" aria-label="{escape(aria, quote=True)}">'
        return f"{head}{''.join(parts)}{body}</svg>"


def frame(width: int, height: int, x: tuple[float, float], y: tuple[float, float], **options: Any) -> Frame:
    """Axes with round ticks, unless options change them: x_log, y_log, x_format, y_format, x_ticks."""
    y_scale = Scale(*y, height - 44, 30, options.get("y_log", False))
    y_format = options.get("y_format") or tick_text
    y_values = y_scale.ticks(5 if height > 200 else 3)
    y_ticks = [(v, y_format(v, y_values)) for v in y_values]
    left = 14 + 7.2 * max([len(text) for _, text in y_ticks] + [3])
    x_scale = Scale(*x, round(left, 1), width - 14, options.get("x_log", False))
    if "x_ticks" in options:
        x_ticks = options["x_ticks"](x_scale)
    else:
        x_values = x_scale.ticks(4 if width < 400 else 7)
        x_ticks = [(v, (options.get("x_format") or tick_text)(v, x_values)) for v in x_values]
    return Frame(x_scale, y_scale, x_ticks, y_ticks)


def tick_text(value: float, ticks: Sequence[float]) -> str:
    """As many digits as the distance of the ticks asks for."""
    step = abs(ticks[1] - ticks[0]) if len(ticks) > 1 else abs(value)
    digits = max(0, math.ceil(-math.log10(step) - 1e-9)) if step else 0
    if digits > 4 or abs(value) >= 1e5:
        return plain(value)
    return signed(f"{value + 0.0:.{digits}f}")


def power_text(value: float, ticks: Sequence[float]) -> str:
    """Ticks of a logarithmic axis: bare powers of ten once they leave everyday numbers."""
    exponent = round(math.log10(value))
    if 1e-2 <= value <= 1e3:
        return plain(value)
    if math.isclose(value, 10.0**exponent, rel_tol=1e-9):
        return f"10{str(exponent).translate(EXPONENTS)}"
    return plain(value)


def sparsity_ticks(scale: Scale) -> list[tuple[float, str]]:
    """Familiar percentages, as many as fit; the most familiar ones first."""
    chosen: list[float] = []
    for value in SPARSITY_TICKS:
        x = scale(depth(value / 100))
        if x <= scale.end + 1 and all(abs(x - scale(depth(other / 100))) >= 28 for other in chosen):
            chosen.append(value)
    return [(depth(value / 100), f"{value:g}") for value in sorted(chosen)]


@dataclass(frozen=True)
class Curve:
    """A line through many points (x, y, tooltip) in the colour of its class."""

    colour: str
    points: Sequence[tuple[float, float, str]]


def curve_chart(
    width: int,
    height: int,
    curves: Sequence[Curve],
    labels: tuple[str, str, str],
    healthy: tuple[float, float] | None = None,
    dividers: Sequence[tuple[float, str]] = (),
) -> str:
    """Long curves; where points are too many, their mean with the range they cover.

    `labels` are those of x, y and the whole; `healthy` shades a range of y that is always in view.
    """
    total = sum(len(curve.points) for curve in curves)
    xs = [x for curve in curves for x, _, _ in curve.points]
    ys = [y for curve in curves for _, y, _ in curve.points]
    y_range = padded([*ys, *(2 * h for h in healthy or ())])
    axes = frame(width, height, (min(xs), max(xs)) if max(xs) > min(xs) else padded(xs), y_range)
    body = []
    if healthy:
        low, high = axes.y(healthy[0]), axes.y(healthy[1])
        span = f'x="{axes.x.start}" width="{axes.x.end - axes.x.start:.2f}"'
        body.append(f'<rect class="healthy" {span} y="{high}" height="{low - high:.2f}"/>')
    taken = -math.inf
    for at, text in dividers:
        x = axes.x(at)
        body.append(f'<path class="divider" d="M{x} {axes.y.start}V{axes.y.end}"/>')
        if x - taken >= 40 and x + 30 < width:
            body.append(f'<text class="small" x="{x + 4:.2f}" y="{axes.y.end + 8}">{escape(text)}</text>')
            taken = x
    for curve in curves:
        limit = max(2, POINTS * len(curve.points) // total)
        size = math.ceil(len(curve.points) / limit)
        buckets = [curve.points[i : i + size] for i in range(0, len(curve.points), size)]
        line = [
            (axes.x(sum(p[0] for p in b) / len(b)), axes.y(sum(p[1] for p in b) / len(b))) for b in buckets
        ]
        shapes = []
        if size > 1:
            upper = [f"{x} {axes.y(max(p[1] for p in b))}" for (x, _), b in zip(line, buckets, strict=True)]
            lower = [f"{x} {axes.y(min(p[1] for p in b))}" for (x, _), b in zip(line, buckets, strict=True)]
            shapes.append(f'<path class="area" d="M{"L".join([*upper, *reversed(lower)])}z"/>')
        if len(line) > 1:
            shapes.append(f'<path class="line" d="M{"L".join(f"{x} {y}" for x, y in line)}"/>')
        every = max(1, math.ceil(total / size / HOVERS))
        dots = "solid" if len(line) == 1 else "hover"
        for (x, y), bucket in list(zip(line, buckets, strict=True))[::-every]:
            radius = 3.5 if dots == "solid" else 5
            shapes.append(
                f'<circle class="{dots}" cx="{x}" cy="{y}" r="{radius}">{tip(bucket[-1][2])}</circle>'
            )
        body.append(f'<g class="{curve.colour}">{"".join(shapes)}</g>')
    return axes.svg("".join(body), *labels)


def fidelity_chart(width: int, pairs: Sequence[tuple[float, float, str, str]], aria: str) -> str:
    """(predicted, measured, label, tooltip), all positive, against the line where both agree."""
    values = [value for pair in pairs for value in pair[:2]]
    lo, hi = min(values) / 2, max(values) * 2
    height = min(400, width)
    axes = frame(
        width, height, (lo, hi), (lo, hi), x_log=True, y_log=True, x_format=power_text, y_format=power_text
    )
    x, y = axes.x, axes.y
    # within a factor of two of each other
    corners = [(lo, lo), (lo, 2 * lo), (hi / 2, hi), (hi, hi), (hi, hi / 2), (2 * lo, lo)]
    body = [
        f'<path class="healthy" d="M{"L".join(f"{x(a)} {y(b)}" for a, b in corners)}z"/>',
        f'<path class="dash muted" d="M{x(lo)} {y(lo)}L{x(hi)} {y(hi)}"/><g class="c1">',
    ]
    dots = [(x(predicted), y(measured)) for predicted, measured, _, _ in pairs]
    labelled: list[tuple[float, float]] = []
    for predicted, measured, label, title in reversed(pairs):
        at = x(predicted), y(measured)
        text = ""
        # on the side away from the line
        side = -1 if measured > predicted else 1
        middle = at[0] + 29 * side, at[1] + 8 * side
        room = all(abs(middle[0] - a) > 28 or abs(middle[1] - b) > 9 for a, b in dots)
        room = room and all(abs(middle[0] - a) > 46 or abs(middle[1] - b) > 14 for a, b in labelled)
        if room and x.start < at[0] + 56 * side < x.end:
            place = f'x="{at[0] + 8 * side:.2f}" y="{middle[1] + 4:.2f}"'
            anchor = "end" if side < 0 else "start"
            text = f'<text class="small" {place} text-anchor="{anchor}">{escape(label)}</text>'
            labelled.append(middle)
        body.append(mark("dot", *at, title, text))
    return axes.svg(
        "".join(body) + "</g>", "predicted increase of the loss", "measured increase of the loss", aria
    )


def stretched(body: str, aria: str, name: str) -> str:
    """A strip without text that fills the cell of a table: 100 units wide however many pixels that is."""
    label = escape(aria, quote=True)
    return (
        f'<svg class="strip {name}" viewBox="0 0 100 12" preserveAspectRatio="none" role="img" '
        f'aria-label="{label}">{tip(aria)}{body}</svg>'
    )


def bar(share: float, aria: str, reference: float | None = None) -> str:
    """A bar of a share of the cell, on a track, with a thin line at the reference."""
    line = "" if reference is None else f'<path class="reference" d="M{100 * reference:.2f} 0v12"/>'
    length = 100 * min(max(share, 0.0), 1.0)
    return stretched(
        f'<rect class="track" width="100" height="12"/><rect class="fill" width="{length:.2f}" height="12"/>'
        + line,
        aria,
        "bar",
    )


def box(quantiles: Sequence[float], scale: Scale, aria: str) -> str:
    """Whiskers from the first to the last of five quantiles, a box between the quartiles, the median."""
    q05, q25, median, q75, q95 = (scale(q) for q in quantiles)
    grid = "".join(f'<path class="grid" d="M{scale(tick)} 0v12"/>' for tick in scale.ticks())
    return stretched(
        f'{grid}<path class="whisker" d="M{q05} 6H{q95}"/>'
        f'<rect class="box" x="{q25}" y="2" width="{max(q75 - q25, 0.4):.2f}" height="8"/>'
        f'<path class="median" d="M{median} 1v10"/>',
        aria,
        "c2",
    )
