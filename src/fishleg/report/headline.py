"""The top of the page: what the run was, whether it has finished, and its warnings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timezone
from html import escape
from typing import Any

from fishleg.report.numbers import duration, number, percent
from fishleg.report.record import Event, Step, as_list, elapsed


def facts(run: dict[str, Any], events: Sequence[Event]) -> str:
    """Show the line under the title: mode, method, pattern, likelihood, start and duration.

    Args:
        run: The record of the run.
        events: The events of its log.

    Returns:
        The HTML of the list items.
    """
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
    """Show the state of a run that has not finished.

    Args:
        run: The record of the run.
        events: The events of its log.
        steps: The pruning steps.

    Returns:
        The HTML of the section; empty for a finished run.
    """
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
    reached = _reached(run, events, steps)
    verb = "has" if status == "running" else "had"
    detail = f" It {verb} reached {', '.join(reached)}." if reached else ""
    error = f"<pre>{escape(str(run['error']))}</pre>" if run.get("error") else ""
    tone = "bad" if status == "failed" else "note"
    note = "<p>This page shows the record up to that time.</p>"
    return (
        f'<section class="banner {tone}" role="status"><p><strong>{escape(lead)}</strong>{escape(detail)}</p>'
        f"{error}{note}</section>"
    )


def _reached(run: dict[str, Any], events: Sequence[Event], steps: Sequence[Step]) -> list[str]:
    """Return the stage and the sparsity that an unfinished run has reached, as far as they are known."""
    texts = []
    stages = [e for e in events if number(e.get("stage")) is not None]
    if stages:
        total = next((n for e in reversed(stages) if (n := number(e.get("stages"))) is not None), None)
        texts.append(f"stage {stages[-1]['stage']:g}" + (f" of {total:g}" if total else ""))
    sparsities = [step.sparsity for step in steps if not step.rejected]
    if sparsities:
        target = number(run.get("target"))
        aim = "" if target is None else f" (target {percent(target)})"
        texts.append(f"sparsity {percent(sparsities[-1])}{aim}")
    return texts


def warnings_section(run: dict[str, Any]) -> str:
    """Show the warnings of the run.

    Args:
        run: The record of the run.

    Returns:
        The HTML of the section; empty without warnings.
    """
    warnings = [f"<li>{escape(str(warning))}</li>" for warning in as_list(run.get("warnings"))]
    if not warnings:
        return ""
    title = "Warning" if len(warnings) == 1 else f"{len(warnings)} warnings"
    return f'<section class="banner note"><h2>{title}</h2><ul>{"".join(warnings)}</ul></section>'
