"""The top of the page: what the run was, what came of it, what to beware of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timezone
from html import escape
from typing import Any

from fishleg.report.numbers import NB, count, duration, number, percent, plain
from fishleg.report.record import Event, Metric, Step, elapsed, listed, mapped


def facts(run: dict[str, Any], events: Sequence[Event]) -> str:
    """The line under the title."""
    parts = [str(run["mode"]).capitalize() + " pruning"] if run.get("mode") else []
    parts += [f"{k} {run[k]}" for k in ("method", "pattern", "likelihood") if run.get(k)]
    if run.get("started"):
        try:
            when = datetime.fromisoformat(re.sub("Z$", "+00:00", str(run["started"])))
            when = when.astimezone(timezone.utc) if when.tzinfo else when
            zone = " UTC" if when.tzinfo else ""
            parts.append(f"started {when.day} {when:%B %Y, %H:%M}{zone}")
        except (ValueError, OverflowError):
            parts.append(f"started {run['started']}")
    seconds, resumed = elapsed(run, events), number(run.get("resumed"))
    if seconds is not None:
        parts.append(f"ran {duration(seconds)}")
    if resumed:
        parts.append("resumed once" if resumed == 1 else f"resumed {resumed:g} times")
    return "".join(f"<li>{escape(part)}</li>" for part in parts)


def banner(run: dict[str, Any], events: Sequence[Event], steps: Sequence[Step]) -> str:
    """What became of a run that has not finished."""
    status = str(run.get("status") or "unknown")
    if status == "finished":
        return ""
    seconds = elapsed(run, events)
    after = f" after {duration(seconds)}" if seconds is not None else ""
    lead = {
        "interrupted": f"Interrupted{after}.",
        "failed": f"Failed{after}.",
        "running": f"Still running{after}.",
    }.get(status, f"The record does not say that this run has finished (status: {status}).")
    stages = [e for e in events if number(e.get("stage")) is not None]
    detail = []
    if stages:
        total = next((n for e in reversed(stages) if (n := number(e.get("stages"))) is not None), None)
        detail.append(f"stage {stages[-1]['stage']:g}" + (f" of {total:g}" if total else ""))
    reached = [step.sparsity for step in steps if not step.rejected]
    if reached:
        target = number(run.get("target"))
        aim = "" if target is None else f" of the {percent(target)} aimed at"
        detail.append(f"sparsity {percent(reached[-1])}{aim}")
    verb = "has" if status == "running" else "had"
    said = f" It {verb} reached {', '.join(detail)}." if detail else ""
    error = f"<pre>{escape(str(run['error']))}</pre>" if run.get("error") else ""
    tone = "bad" if status == "failed" else "note"
    what = "<p>This page shows what was recorded up to then.</p>"
    return (
        f'<section class="banner {tone}" role="status"><p><strong>{escape(lead)}</strong>{escape(said)}</p>'
        f"{error}{what}</section>"
    )


def warnings_section(run: dict[str, Any]) -> str:
    """What the run itself had to say."""
    warnings = [f"<li>{escape(str(warning))}</li>" for warning in listed(run.get("warnings"))]
    if not warnings:
        return ""
    title = "Warning" if len(warnings) == 1 else f"{len(warnings)} warnings"
    return f'<section class="banner note"><h2>{title}</h2><ul>{"".join(warnings)}</ul></section>'


def card(title: str, value: str, *notes: str, tone: str = "") -> str:
    """One number of the headline; the first note may have a tone."""
    said = "".join(f'<p class="{tone if i == 0 else ""}">{escape(n)}</p>' for i, n in enumerate(notes) if n)
    return f'<div class="card"><h2>{escape(title)}</h2><p class="value">{value}</p>{said}</div>'


def change(before: str | None, after: str | None) -> str:
    """`before → after`, or the one that is known."""
    if before is not None and after is not None:
        return f'<span class="from">{escape(before)}</span> <span class="to">→{NB}{escape(after)}</span>'
    return escape(after or before or "–")


def cards(run: dict[str, Any], steps: Sequence[Step], metric: Metric) -> str:
    """The headline."""
    found: list[str] = []
    dense, sparse = mapped(run.get("dense")), mapped(run.get("sparse"))

    def pair(name: str) -> tuple[float | None, float | None]:
        return number(dense.get(name)), number(sparse.get(name))

    def amount(name: str) -> float | None:
        value = number(run.get(name))
        return value if value is not None and value >= 0 else None

    before, after = pair(metric.value)
    if before is not None or after is not None:
        notes, tone = [""], ""
        if before is not None and after is not None:
            gain = (after - before) * (1 if metric.higher else -1)
            unchanged = metric.text(before) == metric.text(after)
            tone = "" if unchanged else "better" if gain > 0 else "worse"
            notes = ["unchanged" if unchanged else f"{metric.difference(before, after)} ({tone})"]
        elif after is None:
            notes = ["of the dense model; the pruned one has no final measurement"]
            if measured := [s for s in steps if s.last is not None and not s.rejected]:
                value, where = measured[-1].last or 0.0, percent(measured[-1].sparsity)
                notes.append(f"last measured: {metric.text(value)} at {where} sparsity")
        losses = [plain(loss) for loss in pair("loss") if loss is not None]
        if len(losses) == 2 and metric.value != "loss":
            notes.append(f"loss {losses[0]} → {losses[1]}")
        both = [None if v is None else metric.text(v) for v in (before, after)]
        found.append(card(metric.title, change(*both), *notes, tone=tone))

    sparsity, target, prunable = amount("sparsity"), amount("target"), amount("prunable")
    if sparsity is None and (reached := [step.sparsity for step in steps if not step.rejected]):
        sparsity = reached[-1]
    if sparsity is not None:
        rows = run.get("pattern") == "rows"
        of = "of the rows" if rows else f"of {count(prunable)} prunable weights" if prunable else ""
        aim = f"target {percent(target)}" if target is not None else ""
        found.append(card("Sparsity", percent(sparsity), of, aim))

    total, kept = amount("parameters"), amount("nonzero")
    if kept is not None:
        of = f"of {count(total)}, {percent(kept / total)} of all" if total else "are not zero"
        found.append(card("Parameters kept", count(kept), of))
    elif total is not None:
        found.append(card("Parameters", count(total)))

    plain_size, packed = amount("bytes_plain") or amount("bytes_dense"), amount("bytes_sparse")
    if packed is not None:
        ratio = ""
        if plain_size and packed:
            ratio = (
                f"packed, {plain_size / packed:.1f}× smaller" if packed < plain_size else "packed: no saving"
            )
        stays = "The ordinary checkpoint stores the zeros too and keeps the size of the dense one."
        plain_text = None if plain_size is None else count(plain_size, "B")
        found.append(card("File size", change(plain_text, count(packed, "B")), ratio, stays if ratio else ""))
    elif plain_size is not None:
        found.append(
            card("File size", count(plain_size, "B"), "ordinary checkpoint, zeros stored like the rest")
        )

    small, left = amount("bytes_small"), amount("parameters_small")
    if small and plain_size:
        of = f"{count(left)} of {count(total)} parameters" if left and total else ""
        both = [count(v, "B") for v in (plain_size, small)]
        found.append(
            card("Cut down", change(both[0], both[1]), of, "small.safetensors: removed rows are gone")
        )

    speed = mapped(run.get("speed"))
    slow, fast = number(speed.get("dense_ms")), number(speed.get("sparse_ms"))
    timed = slow is not None and fast is not None and slow > 0 and fast > 0
    remark = "Zeros alone do not make dense kernels faster."
    macs, macs_kept = amount("macs_dense"), amount("macs_sparse")
    if macs is not None or macs_kept is not None:
        both = [None if v is None else count(v) for v in (macs, macs_kept)]
        share = f"{percent(macs_kept / macs)} kept" if macs and macs_kept is not None else ""
        notes = [share, "multiply-adds per example", "" if timed else remark]
        found.append(card("Arithmetic", change(both[0], both[1]), *notes))
    if timed and slow is not None and fast is not None:
        ratio = (
            f"{slow / fast:.2f}× as fast"
            if slow / fast >= 1.1 or slow / fast < 0.9
            else "no faster than dense"
        )
        what = str(speed.get("what") or "")
        if "dense kernels" in what:  # the same work: no ratio means anything
            ratio = "the same kernels and shapes: what differs is noise"
        # a gain beyond noise says otherwise
        honest = remark if slow / fast < 1.1 else ""
        both = [duration_ms(slow), duration_ms(fast)]
        found.append(card("Speed", change(both[0], both[1]), ratio, what, honest))
    return f'<section class="cards" aria-label="Summary">{"".join(found)}</section>' if found else ""


def duration_ms(value: float) -> str:
    """Milliseconds with three digits."""
    return f"{plain(value)}{NB}ms"
