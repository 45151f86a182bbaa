"""The headline of the page: one card per number."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from fishleg.report.numbers import NO_BREAK_SPACE, count, milliseconds, number, percent, plain
from fishleg.report.record import Metric, Step, as_mapping, prunes_rows

_NO_FASTER = "Zeros alone do not make dense kernels faster."
_LEAST_GAIN = 1.1  # the ratio of times from which a gain is beyond noise


def cards(run: dict[str, Any], steps: Sequence[Step], metric: Metric) -> str:
    """Show the results of the run as cards.

    Args:
        run: The record of the run.
        steps: The pruning steps.
        metric: The metric of the run.

    Returns:
        The HTML of the section; empty without data.
    """
    found = [
        _metric_card(run, steps, metric),
        _sparsity_card(run, steps),
        _parameters_card(run),
        _file_size_card(run),
        _arithmetic_card(run),
        _speed_card(run),
    ]
    drawn = "".join(found)
    return f'<section class="cards" aria-label="Summary">{drawn}</section>' if drawn else ""


def _card(title: str, value: str, *notes: str, tone: str = "") -> str:
    """Return one card; the tone colours the first note."""
    texts = "".join(f'<p class="{tone if i == 0 else ""}">{escape(n)}</p>' for i, n in enumerate(notes) if n)
    return f'<div class="card"><h2>{escape(title)}</h2><p class="value">{value}</p>{texts}</div>'


def _change(before: str | None, after: str | None) -> str:
    """Return `before → after`, or the one that is known."""
    if before is not None and after is not None:
        arrow = f"→{NO_BREAK_SPACE}"
        return f'<span class="from">{escape(before)}</span> <span class="to">{arrow}{escape(after)}</span>'
    return escape(after or before or "–")


def _amount(run: dict[str, Any], name: str) -> float | None:
    value = number(run.get(name))
    return value if value is not None and value >= 0 else None


def _metric_card(run: dict[str, Any], steps: Sequence[Step], metric: Metric) -> str:
    dense, sparse = as_mapping(run.get("dense")), as_mapping(run.get("sparse"))
    before, after = number(dense.get(metric.value)), number(sparse.get(metric.value))
    if before is None and after is None:
        return ""
    notes, tone = [""], ""
    refreshed = number(as_mapping(run.get("refreshed")).get(metric.value))
    if before is not None and after is not None:
        sign = 1 if metric.higher else -1
        against = (
            before  # the better of the two: a gain from the refresh must not hide a loss from the pruning
        )
        if refreshed is not None and sign * refreshed > sign * before:
            against = refreshed
        unchanged = metric.text(against) == metric.text(after)
        tone = "" if unchanged else "better" if sign * after > sign * against else "worse"
        notes = ["unchanged" if unchanged else f"{metric.difference(against, after)} ({tone})"]
        if metric.text(against) != metric.text(before):
            notes[0] += f", against {metric.text(against)} with refreshed BatchNorm"
    elif after is None:
        notes = ["dense model; the pruned model has no final measurement"]
        if measured := [s for s in steps if s.last is not None and not s.rejected]:
            value, where = measured[-1].last or 0.0, percent(measured[-1].sparsity)
            notes.append(f"last measured: {metric.text(value)} at {where} sparsity")
    if before is not None and refreshed is not None and metric.text(refreshed) != metric.text(before):
        notes.append(f"dense with refreshed BatchNorm statistics: {metric.text(refreshed)}")
    losses = [plain(loss) for r in (dense, sparse) if (loss := number(r.get("loss"))) is not None]
    if len(losses) == 2 and metric.value != "loss":
        notes.append(f"loss {losses[0]} → {losses[1]}")
    both = [None if v is None else metric.text(v) for v in (before, after)]
    return _card(metric.title, _change(*both), *notes, tone=tone)


def _sparsity_card(run: dict[str, Any], steps: Sequence[Step]) -> str:
    sparsity, target, prunable = (_amount(run, name) for name in ("sparsity", "target", "prunable"))
    if sparsity is None and (reached := [step.sparsity for step in steps if not step.rejected]):
        sparsity = reached[-1]
    if sparsity is None:
        return ""
    of = "of the rows" if prunes_rows(run) else f"of {count(prunable)} prunable weights" if prunable else ""
    aim = f"target {percent(target)}" if target is not None else ""
    return _card("Sparsity", percent(sparsity), of, aim)


def _parameters_card(run: dict[str, Any]) -> str:
    """Return the parameters before and after: if rows are cut out those that are left, else the non-zeros."""
    total, nonzero, small = (_amount(run, name) for name in ("parameters", "nonzero", "parameters_small"))
    left = small if small is not None else nonzero
    if left is None:
        return "" if total is None else _card("Parameters", count(total))
    notes = [f"{percent(left / total)} " if total else ""]
    if small is None:
        notes[0] += "are not zero"
        if prunes_rows(run) and total is not None:
            stay = "The removed rows are not cut out: they stay in the model as zeros."
            return _card("Parameters", count(total), *notes, stay)
    else:
        notes[0] += "are left when the removed rows are cut out"
        zero_rows = _amount(run, "zero_rows_small")
        if zero_rows:
            rows = "1 zero row stays" if zero_rows == 1 else f"{zero_rows:g} zero rows stay"
            notes.append(f"{rows} in the model, because other layers need the place.")
    return _card("Parameters", _change(None if total is None else count(total), count(left)), *notes)


def _plain_size(run: dict[str, Any]) -> float | None:
    return _amount(run, "bytes_plain") or _amount(run, "bytes_dense")


def _smaller(before: float | None, after: float) -> str:
    if not before or not after:
        return ""
    return f"{before / after:.1f}× smaller" if after < before else "not smaller"


def _file_size_card(run: dict[str, Any]) -> str:
    size, packed, small = _plain_size(run), _amount(run, "bytes_sparse"), _amount(run, "bytes_small")
    before = None if size is None else count(size, "B")
    if small is not None:
        ratio = ", ".join(filter(None, ("small.safetensors", _smaller(size, small))))
        other = "" if packed is None else f"packed, with all rows: {count(packed, 'B')}"
        return _card("File size", _change(before, count(small, "B")), ratio, other)
    if packed is None:
        stores = "plain checkpoint, which also stores the zeros"
        return "" if before is None else _card("File size", before, stores)
    ratio = _smaller(size, packed)
    stays = "The plain checkpoint also stores the zeros. It is as large as that of the dense model."
    ratio, stays = (f"packed, {ratio}", stays) if ratio else ("", "")
    return _card("File size", _change(before, count(packed, "B")), ratio, stays)


def _times(run: dict[str, Any]) -> tuple[float, float] | None:
    """Return the milliseconds of the dense and of the sparse model, or None without a measurement."""
    speed = as_mapping(run.get("speed"))
    dense, sparse = number(speed.get("dense_ms")), number(speed.get("sparse_ms"))
    return (dense, sparse) if dense is not None and sparse is not None and min(dense, sparse) > 0 else None


def _arithmetic_card(run: dict[str, Any]) -> str:
    """Return the multiply-adds before and after. Rows that stay in the model as zeros save nothing."""
    dense, small = _amount(run, "macs_dense"), _amount(run, "macs_small")
    left = small if prunes_rows(run) else _amount(run, "macs_sparse")
    if dense is None and left is None:
        return ""
    both = [None if v is None else count(v) for v in (dense, left)]
    unit = "multiply-adds per example"
    if left is None:
        finished = prunes_rows(run) and run.get("status") == "finished"
        return _card("Arithmetic", _change(*both), unit, "No row is cut out." if finished else "")
    share = f"{percent(left / dense)} of them " if dense else ""
    share += (
        "are left when the removed rows are cut out" if prunes_rows(run) else "use a weight that is not zero"
    )
    remark = "" if _times(run) or prunes_rows(run) else _NO_FASTER
    return _card("Arithmetic", _change(*both), unit, share, remark)


def _speed_card(run: dict[str, Any]) -> str:
    times = _times(run)
    if times is None:
        return ""
    dense, sparse = times
    gain = dense / sparse
    ratio = f"{gain:.2f}× as fast" if gain >= _LEAST_GAIN or gain < 0.9 else "no faster than dense"
    what = str(as_mapping(run.get("speed")).get("what") or "")
    if "dense kernels" in what:  # both do the same work, so the ratio means nothing
        ratio = "same kernels and shapes; the difference is noise"
    cut = _amount(run, "macs_small") is not None  # there are fewer rows, not more zeros
    remark = _NO_FASTER if gain < _LEAST_GAIN and not cut else ""
    return _card("Speed", _change(milliseconds(dense), milliseconds(sparse)), ratio, what, remark)
