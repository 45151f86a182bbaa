"""The table of layers: the sparsity of each layer, and the saliency of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from fishleg.report.marks import bar, box_plot
from fishleg.report.numbers import NO_BREAK_SPACE, count, number, percent, plain
from fishleg.report.record import as_list, prunes_rows
from fishleg.report.scales import Scale, power_text
from fishleg.report.style import figure

_SMALLEST = 1e-90  # of a logarithmic axis
_LONG = 40  # a table of more layers scrolls inside its frame

_SALIENCY_READING = (
    " Saliency is the predicted increase of the loss if one weight is removed. The line covers 5 to 95 % of "
    "the weights, the box covers the middle half, and the tick marks the median. Weights further left cost "
    "less to remove."
)


def layers_section(run: dict[str, Any]) -> str:
    """Show the sparsity and the saliency of each layer.

    Args:
        run: The record of the run.

    Returns:
        The HTML of the section; empty without data.
    """
    layers = [layer for layer in as_list(run.get("layers")) if isinstance(layer, dict)]
    if not layers:
        return ""
    saliencies = [_quantiles(layer) for layer in layers]
    drawn = [q for quantiles in saliencies if quantiles for q in quantiles if q > _SMALLEST]
    scale = Scale(min(drawn) / 1.5, max(drawn) * 1.5, 0, 100, log=True) if drawn else None
    overall = number(run.get("sparsity"))
    overall = overall if overall is not None and 0 <= overall <= 1 else None
    has_macs = any(number(layer.get("macs")) is not None for layer in layers)
    rows = [_layer_row(*pair, scale, overall, has_macs) for pair in zip(layers, saliencies, strict=True)]
    reading = "The longer the bar, the more of the layer is zero."
    if overall is not None:
        of = " of the rows" if prunes_rows(run) else ""
        reading += f" The thin line marks the sparsity of the whole model, {percent(overall)}{of}."
    if scale:
        reading += _SALIENCY_READING
    kind = "layers long" if len(layers) > _LONG else "layers"
    content = (
        f'<div class="scroll {kind}" tabindex="0"><table><thead><tr>{_head(has_macs, scale)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
    return figure(f"Layers ({len(layers)})", reading, content)


def _quantiles(layer: dict[str, Any]) -> list[float] | None:
    """Return the five quantiles of the saliency, or None where they cannot be drawn."""
    quantiles = [number(q) for q in as_list(layer.get("saliency"))]
    valid = sorted(q for q in quantiles if q is not None)
    return valid if len(valid) == len(quantiles) == 5 and valid[2] > _SMALLEST else None


def _head(has_macs: bool, scale: Scale | None) -> str:
    columns = [("name", "Layer"), ("size", "Weights"), *([("macs", "MACs")] if has_macs else [])]
    head = "".join(f'<th scope="col" class="{kind}">{text}</th>' for kind, text in columns)
    shares = _ruler([(v, f"{v}{NO_BREAK_SPACE}%") for v in (0, 100)])
    head += f'<th scope="col" class="picture">Sparsity{shares}</th><td class="share"></td>'
    if scale:
        values = scale.ticks()
        ticks = _ruler([(scale(v), power_text(v, values)) for v in values])
        head += f'<th scope="col" class="saliency">Saliency{ticks}</th>'
    return head


def _ruler(ticks: Sequence[tuple[float, str]]) -> str:
    """Return the axis of a table column: texts at percentages of its width."""
    marks = []
    for at, text in ticks:
        side = "first" if at < 6 else "last" if at > 94 else ""
        marks.append(f'<i class="{side}" style="left:{at:.1f}%">{escape(text)}</i>')
    return f'<span class="ruler">{"".join(marks)}</span>'


def _layer_row(
    layer: dict[str, Any],
    quantiles: list[float] | None,
    scale: Scale | None,
    overall: float | None,
    has_macs: bool,
) -> str:
    name = str(layer.get("name") or "?")
    shape = " × ".join(str(n) for n in as_list(layer.get("shape")))
    size, sparsity, macs = (number(layer.get(k)) for k in ("size", "sparsity", "macs"))
    reason = layer.get("reason")
    title = escape(f"{name} {shape}", quote=True)
    # Long names wrap at their dots. An ellipsis would hide the part that distinguishes layers.
    wrapped = escape(name).replace(".", ".<wbr>")
    cells = [f'<th scope="row" title="{title}">{wrapped} <small>{escape(shape)}</small></th>']
    cells.append(f'<td class="amount size">{"–" if size is None else count(size)}</td>')
    if has_macs:
        cells.append(f'<td class="amount macs">{"–" if macs is None else count(macs)}</td>')
    if reason:
        why = escape(str(reason), quote=True)
        cells.append(f'<td colspan="2" class="reason" title="{why}">not pruned: {why}</td>')
    elif sparsity is None:
        cells.append('<td colspan="2" class="reason">not recorded</td>')
    else:
        picture = bar(sparsity, f"{name}: sparsity {percent(sparsity)}", overall)
        cells.append(f'<td class="picture">{picture}</td><td class="amount share">{percent(sparsity)}</td>')
    if scale and quantiles:
        q05, q25, median, q75, q95 = (plain(q) for q in quantiles)
        aria = f"{name}: saliency median {median}, middle half {q25} to {q75}, 5 to 95 %: {q05} to {q95}"
        cells.append(f'<td class="picture saliency">{box_plot(quantiles, scale, aria)}</td>')
    elif scale:
        cells.append('<td class="saliency none"></td>')
    return f"<tr>{''.join(cells)}</tr>"
