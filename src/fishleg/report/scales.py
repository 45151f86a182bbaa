"""Scales and axes of the charts: values to pixels, round ticks, and their text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from fishleg.report.numbers import EXPONENT_DIGITS, plain, with_minus_sign

Ticks = Sequence[tuple[float, str]]
TickFormat = Callable[[float, Sequence[float]], str]

# The percentages that may label a sparsity axis, the most familiar ones first.
_SPARSITY_TICKS = (0, 90, 50, 99, 95, 75, 98, 99.9, 99.5, 80, 25, 60, 99.8, 99.99, 10, 40, 20, 30, 5, 2, 1)
_LEAST_TICK_DISTANCE = 28  # pixels


@dataclass(frozen=True)
class Scale:
    """A map from values to pixels.

    Attributes:
        lo: The value that is drawn at `start`.
        hi: The value that is drawn at `end`.
        start: The first pixel.
        end: The last pixel.
        log: Whether the scale is logarithmic.
    """

    lo: float
    hi: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value.

        Args:
            value: The value.

        Returns:
            The pixel, with two digits.
        """
        lo, hi = self.lo, self.hi
        if self.log:
            lo, hi, value = math.log10(lo), math.log10(hi), math.log10(max(value, self.lo))
        return round(self.start + (self.end - self.start) * (value - lo) / (hi - lo), 2)

    def ticks(self, most: int = 5) -> list[float]:
        """Choose round values inside the range.

        Args:
            most: About the largest number of values.

        Returns:
            The values, in ascending order.
        """
        if not self.log:
            step = _round_up((self.hi - self.lo) / most)
            first, last = math.ceil(self.lo / step - 1e-9), math.floor(self.hi / step + 1e-9)
            return [round(i * step, 12) if step > 1e-9 else i * step for i in range(first, last + 1)]
        first, last = math.ceil(math.log10(self.lo) - 1e-9), math.floor(math.log10(self.hi) + 1e-9)
        if last - first < 1:  # less than two powers of ten
            values = [m * 10.0**e for e in range(first - 1, last + 1) for m in (1, 2, 5)]
            return [v for v in values if self.lo <= v <= self.hi]
        return [10.0**e for e in range(first, last + 1, max(1, math.ceil((last - first + 1) / most)))]


def _round_up(step: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is not below `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next((m * power for m in (1, 2, 5) if m * power >= step * (1 - 1e-9)), 10 * power)


def padded(values: Sequence[float], share: float = 0.08) -> tuple[float, float]:
    """Compute a range around values that is never empty.

    Args:
        values: At least one value.
        share: The margin on each side, as a share of the range of the values.

    Returns:
        The ends of the range.
    """
    lo, hi = min(values), max(values)
    pad = share * (hi - lo) or max(abs(hi) * 0.05, 1e-6)
    return lo - pad, hi + pad


def compression(sparsity: float) -> float:
    """Compute −log₁₀(1 − sparsity): 0 for a dense model, 1 at 90 %, 2 at 99 %.

    On this scale 90, 95 and 98 % lie well apart.

    Args:
        sparsity: The sparsity in [0, 1].

    Returns:
        The power of ten of the compression, at most 4.
    """
    return -math.log10(1 - min(max(sparsity, 0.0), 0.9999))


def tick_text(value: float, ticks: Sequence[float]) -> str:
    """Write a tick of a linear axis with as many digits as the distance of the ticks needs.

    Args:
        value: The value of the tick.
        ticks: The values of all ticks of the axis.

    Returns:
        The text.
    """
    step = abs(ticks[1] - ticks[0]) if len(ticks) > 1 else abs(value)
    digits = max(0, math.ceil(-math.log10(step) - 1e-9)) if step else 0
    if digits > 4 or abs(value) >= 1e5:
        return plain(value)
    return with_minus_sign(f"{value + 0.0:.{digits}f}")


def power_text(value: float, ticks: Sequence[float]) -> str:
    """Write a tick of a logarithmic axis; a power of ten outside 0.01 to 1000 as an exponent.

    Args:
        value: The value of the tick, > 0.
        ticks: The values of all ticks of the axis. They are not used.

    Returns:
        The text.
    """
    exponent = round(math.log10(value))
    if 1e-2 <= value <= 1e3:
        return plain(value)
    if math.isclose(value, 10.0**exponent, rel_tol=1e-9):
        return f"10{str(exponent).translate(EXPONENT_DIGITS)}"
    return plain(value)


def sparsity_ticks(scale: Scale) -> list[tuple[float, str]]:
    """Choose familiar percentages for a sparsity axis, as many as fit.

    Args:
        scale: The scale of the axis, in units of `compression`.

    Returns:
        The ticks with their text, in ascending order.
    """
    chosen: list[float] = []
    for value in _SPARSITY_TICKS:
        x = scale(compression(value / 100))
        distances = [abs(x - scale(compression(other / 100))) for other in chosen]
        if x <= scale.end + 1 and all(distance >= _LEAST_TICK_DISTANCE for distance in distances):
            chosen.append(value)
    return [(compression(value / 100), f"{value:g}") for value in sorted(chosen)]


@dataclass(frozen=True)
class Axes:
    """The axes of one chart.

    Attributes:
        x: The horizontal scale.
        y: The vertical scale.
        x_ticks: Values and texts of the horizontal ticks.
        y_ticks: Values and texts of the vertical ticks.
    """

    x: Scale
    y: Scale
    x_ticks: Ticks
    y_ticks: Ticks

    def svg(self, body: str, x_label: str, y_label: str, aria: str) -> str:
        """Draw the chart.

        Args:
            body: The SVG of the marks.
            x_label: The label of the horizontal axis.
            y_label: The label of the vertical axis.
            aria: The description for screen readers.

        Returns:
            The SVG of the chart.
        """
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
        # The label is above the axis. Rotated text along it is hard to read and needs width.
        parts.append(f'<text class="label" x="4" y="{top - 12}">{escape(y_label)}</text>')
        parts.append(
            f'<text class="label" x="{(left + right) / 2}" y="{bottom + 37}" text-anchor="middle">'
            f"{escape(x_label)}</text>"
        )
        size = f"0 0 {right + 14:g} {bottom + 44:g}"
        head = f'<svg class="chart" viewBox="{size}" role="img" aria-label="{escape(aria, quote=True)}">'
        return f"{head}{''.join(parts)}{body}</svg>"


def make_axes(
    width: int,
    height: int,
    x: tuple[float, float],
    y: tuple[float, float],
    *,
    log: bool = False,
    y_format: TickFormat = tick_text,
    x_format: TickFormat = tick_text,
    x_ticks: Callable[[Scale], Ticks] | None = None,
) -> Axes:
    """Make axes with round ticks.

    Args:
        width: The width of the chart in pixels.
        height: The height of the chart in pixels.
        x: The horizontal range.
        y: The vertical range.
        log: Whether both scales are logarithmic.
        y_format: Writes the vertical ticks.
        x_format: Writes the horizontal ticks.
        x_ticks: Chooses the horizontal ticks; None: round values.

    Returns:
        The axes.
    """
    y_scale = Scale(*y, height - 44, 30, log)
    y_values = y_scale.ticks(5 if height > 200 else 3)
    y_ticks = [(v, y_format(v, y_values)) for v in y_values]
    left = 14 + 7.2 * max([len(text) for _, text in y_ticks] + [3])
    x_scale = Scale(*x, round(left, 1), width - 14, log)
    if x_ticks is not None:
        return Axes(x_scale, y_scale, x_ticks(x_scale), y_ticks)
    x_values = x_scale.ticks(4 if width < 400 else 7)
    return Axes(x_scale, y_scale, [(v, x_format(v, x_values)) for v in x_values], y_ticks)
