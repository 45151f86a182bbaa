"""One self-contained HTML page from the record of a pruning run.

`write_report` reads run.json and log.jsonl, which the run keeps up to date, so a run that was interrupted or
is still going can be looked at too. The page needs neither network nor scripts. Every key of the record may
be missing: what is there is shown, a section without data is left out.
"""

from __future__ import annotations

import os
import tempfile
from html import escape
from pathlib import Path
from typing import Any

from fishleg.report.headline import banner, cards, facts, warnings_section
from fishleg.report.record import collect_steps, listed, mapped, metric_of, read_log, read_run
from fishleg.report.sections import (
    command_section,
    environment_section,
    fidelity_section,
    layers_section,
    q_section,
    recipe_section,
    timing_section,
    training_section,
)
from fishleg.report.style import PAGE, STYLE
from fishleg.report.trajectory import metric_section

__all__ = ["render_report", "write_report"]


def write_report(directory: Path, out: Path | None = None) -> Path:
    """Write the report of the run recorded in `directory` (to its report.html unless told otherwise)."""
    directory = Path(directory)
    out = directory / "report.html" if out is None else Path(out)
    run_path, log_path, recipe_path = (directory / n for n in ("run.json", "log.jsonl", "recipe.toml"))
    if not run_path.exists() and not log_path.exists():
        raise FileNotFoundError(f"{directory} holds no record of a run: neither run.json nor log.jsonl")
    run, warnings = read_run(run_path)
    events, broken = read_log(log_path)
    if broken:
        warnings.append(f"log.jsonl: {broken} unreadable line(s) left out")
    recipe = recipe_path.read_text("utf-8", "replace") if recipe_path.exists() else ""
    page = render_report({**run, "warnings": [*listed(run.get("warnings")), *warnings]}, events, recipe)
    # Beside the target, since a rename is atomic only within one file system.
    handle, temporary = tempfile.mkstemp(prefix=f".{out.name}.", suffix=".tmp", dir=out.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(page)
        os.chmod(temporary, 0o644)  # mkstemp lets nobody else read
        os.replace(temporary, out)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return out


def render_report(run: dict[str, Any], events: list[dict[str, Any]], recipe: str) -> str:
    """The page as one string."""
    metric = metric_of(run, events)
    steps = collect_steps(events, metric.value)
    name = str(run.get("name") or "Pruning run")
    sections = [
        cards(run, steps, metric),
        banner(run, events, steps),
        warnings_section(run),
        metric_section(run, events, steps, metric),
        layers_section(run),
        '<div class="pair">' + fidelity_section(steps) + q_section(events) + "</div>",
        '<div class="pair">' + training_section(events) + timing_section(run) + "</div>",
        environment_section(run),
        recipe_section(recipe),
        command_section(run),
    ]
    body = "\n".join(section for section in sections if section and section != '<div class="pair"></div>')
    return PAGE.format(
        title=escape(name), style=STYLE, facts=facts(run, events), body=body, version=version(run)
    )


def version(run: dict[str, Any]) -> str:
    """` 0.1.0`, where known."""
    known = mapped(run.get("environment")).get("fishleg")
    return f" {escape(str(known))}" if known else ""
