"""The SVG of single marks: points, legends, and the strips that fill the cells of a table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fishleg.report.scales import Scale


def tooltip(text: str) -> str:
    """Make a tooltip that needs no script.

    Args:
        text: The text.

    Returns:
        The SVG.
    """
    return f"<title>{escape(text)}</title>"


def mark(kind: str, x: float, y: float, title: str, extra: str = "") -> str:
    """Draw one point of a chart.

    Args:
        kind: dot, ring, square, diamond, cross, down or up.
        x: The horizontal pixel.
        y: The vertical pixel.
        title: The tooltip.
        extra: SVG to draw with the point.

    Returns:
        The SVG.
    """
    shape = {
        "dot": f'<circle cx="{x}" cy="{y}" r="4.5" class="solid"/>',
        "ring": f'<circle cx="{x}" cy="{y}" r="7" class="ring"/>',
        "square": f'<rect x="{x - 5.5:.2f}" y="{y - 5.5:.2f}" width="11" height="11" class="solid"/>',
        "diamond": f'<path d="M{x} {y - 5.5:.2f}l5.5 5.5-5.5 5.5-5.5-5.5z" class="open"/>',
        "cross": f'<path d="M{x - 5:.2f} {y - 5:.2f}l10 10m0-10l-10 10" class="stroke"/>',
        "down": f'<path d="M{x - 5.5:.2f} {y - 9:.2f}h11l-5.5 9z" class="open"/>',
        "up": f'<path d="M{x - 5.5:.2f} {y + 9:.2f}h11l-5.5-9z" class="open"/>',
    }[kind]
    return f'<g class="mark">{tooltip(title)}{shape}{extra}</g>'


def legend(*entries: tuple[str, str, str]) -> str:
    """Draw a legend.

    Args:
        *entries: (class of the colour, kind, text). The kind is that of a mark, or line, dash or area, or
            "line" and a mark, such as "line dot".

    Returns:
        The HTML.
    """
    items = []
    for colour, kind, text in entries:
        if kind in ("line", "dash"):
            shape = f'<path d="M1 8h18" class="{kind}"/>'
        elif kind == "area":
            shape = '<rect x="1" y="2" width="18" height="12" class="area"/>'
        else:
            line, _, kind = kind.rpartition(" ")
            shape = '<path d="M0 8h20" class="line"/>' if line else ""
            shape += mark(kind, 10, {"down": 12, "up": 4}.get(kind, 8), text)
        swatch = f'<svg class="{colour}" viewBox="0 0 20 16" width="20" height="16" aria-hidden="true">'
        items.append(f"<li>{swatch}{shape}</svg>{escape(text)}</li>")
    return f'<ul class="key">{"".join(items)}</ul>'


def bar(share: float, aria: str, reference: float | None = None) -> str:
    """Draw a bar that fills a share of a table cell.

    Args:
        share: The share in [0, 1].
        aria: The tooltip and the description for screen readers.
        reference: The share at which to draw a thin line; None: no line.

    Returns:
        The SVG.
    """
    line = "" if reference is None else f'<path class="reference" d="M{100 * reference:.2f} 0v12"/>'
    length = 100 * min(max(share, 0.0), 1.0)
    return _strip(
        f'<rect class="track" width="100" height="12"/><rect class="fill" width="{length:.2f}" height="12"/>'
        + line,
        aria,
        "bar",
    )


def box_plot(quantiles: Sequence[float], scale: Scale, aria: str) -> str:
    """Draw a line between the outer two of five quantiles, a box between the quartiles, and the median.

    Args:
        quantiles: Five quantiles in ascending order.
        scale: The scale, from 0 to 100.
        aria: The tooltip and the description for screen readers.

    Returns:
        The SVG.
    """
    q05, q25, median, q75, q95 = (scale(q) for q in quantiles)
    grid = "".join(f'<path class="grid" d="M{scale(tick)} 0v12"/>' for tick in scale.ticks())
    return _strip(
        f'{grid}<path class="whisker" d="M{q05} 6H{q95}"/>'
        f'<rect class="box" x="{q25}" y="2" width="{max(q75 - q25, 0.4):.2f}" height="8"/>'
        f'<path class="median" d="M{median} 1v10"/>',
        aria,
        "c2",
    )


def _strip(body: str, aria: str, name: str) -> str:
    """Return an SVG without text that fills a table cell: 100 units wide, whatever the cell's pixels."""
    label = escape(aria, quote=True)
    return (
        f'<svg class="strip {name}" viewBox="0 0 100 12" preserveAspectRatio="none" role="img" '
        f'aria-label="{label}">{tooltip(aria)}{body}</svg>'
    )
