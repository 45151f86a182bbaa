"""The whole page: reading the record of a run, rendering it, and writing the file."""

from __future__ import annotations

import os
import tempfile
from html import escape
from pathlib import Path
from typing import Any

from fishleg.report.cards import cards
from fishleg.report.details import command_section, environment_section, recipe_section, timing_section
from fishleg.report.headline import banner, facts, warnings_section
from fishleg.report.layers import layers_section
from fishleg.report.next_steps import next_steps_section
from fishleg.report.progress import fidelity_section, q_section, training_section
from fishleg.report.record import as_list, as_mapping, collect_steps, metric_of, read_log, read_run
from fishleg.report.style import PAGE, STYLE
from fishleg.report.trajectory import metric_section


def write_report(directory: Path, out: Path | None = None) -> Path:
    """Write the report of a run.

    The file is replaced in one step: a failure leaves an earlier report as it was.

    Args:
        directory: The directory of the run, with run.json or log.jsonl.
        out: The file to write. None: report.html in the directory.

    Returns:
        The path of the report.

    Raises:
        FileNotFoundError: The directory holds neither run.json nor log.jsonl.
    """
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
    run = {**run, "warnings": [*as_list(run.get("warnings")), *warnings]}
    page = render_report(run, events, recipe, directory)
    # The temporary file is in the same directory: a rename is atomic only within one file system.
    handle, temporary = tempfile.mkstemp(prefix=f".{out.name}.", suffix=".tmp", dir=out.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(page)
        os.chmod(temporary, 0o644)  # mkstemp makes a file that only its owner can read
        os.replace(temporary, out)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return out


def render_report(
    run: dict[str, Any], events: list[dict[str, Any]], recipe: str, directory: Path | None = None
) -> str:
    """Render the report of a run as one HTML page.

    Every key of the record may be missing. A section without data is left out.

    Args:
        run: The record of the run, as run.json holds it.
        events: The events of its log, as log.jsonl holds them.
        recipe: The text of the recipe.
        directory: The directory of the run, for the commands to go on with; None: they are left out.

    Returns:
        The HTML of the page.
    """
    metric = metric_of(run, events)
    steps = collect_steps(events, metric.value)
    name = str(run.get("name") or "Pruning run")
    sections = [
        cards(run, steps, metric),
        banner(run, events, steps),
        warnings_section(run),
        metric_section(run, events, steps, metric),
        layers_section(run),
        _pair(fidelity_section(run, steps), q_section(events)),
        _pair(training_section(events), timing_section(run)),
        next_steps_section(run, directory),
        environment_section(run),
        recipe_section(recipe),
        command_section(run),
    ]
    known = as_mapping(run.get("environment")).get("fishleg")
    page = PAGE.format(
        title=escape(name),
        style=STYLE,
        facts=facts(run, events),
        body="\n".join(filter(None, sections)),
        version=f" {escape(str(known))}" if known else "",
    )
    return page.encode("utf-8", "replace").decode("utf-8")  # a path may hold bytes that are no text


def _pair(left: str, right: str) -> str:
    """Return two sections beside each other, where the screen is wide enough."""
    return f'<div class="pair">{left}{right}</div>' if left or right else ""
