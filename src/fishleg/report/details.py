"""The sections at the end of the page: time, environment, recipe and command."""

from __future__ import annotations

from html import escape
from typing import Any

from fishleg.report.marks import bar
from fishleg.report.numbers import duration, number, percent
from fishleg.report.record import as_mapping
from fishleg.report.style import figure


def timing_section(run: dict[str, Any]) -> str:
    """Show how much time each part of the run took.

    Args:
        run: The record of the run.

    Returns:
        The HTML of the section; empty without data.
    """
    parts = [
        (str(k), v)
        for k, raw in as_mapping(run.get("timing")).items()
        if (v := number(raw)) is not None and v > 0
    ]
    if not parts:
        return ""
    total, longest = sum(v for _, v in parts), max(v for _, v in parts)
    rows = []
    for name, value in sorted(parts, key=lambda part: -part[1]):
        aria = f"{name}: {duration(value)}, {percent(value / total)}"
        rows.append(
            f'<tr><th scope="row">{escape(name)}</th><td class="picture">{bar(value / longest, aria)}</td>'
            f'<td class="amount">{duration(value)}</td><td class="amount">{percent(value / total)}</td></tr>'
        )
    reading = f"The parts of the run, the longest first. In total {duration(total)}."
    content = f'<div class="scroll timing"><table><tbody>{"".join(rows)}</tbody></table></div>'
    return figure("Time spent", reading, content)


def environment_section(run: dict[str, Any]) -> str:
    """Show the versions and the device of the run.

    Args:
        run: The record of the run.

    Returns:
        The HTML of the section; empty without data.
    """
    pairs = as_mapping(run.get("environment")).items()
    items = "".join(f"<div><dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd></div>" for k, v in pairs)
    return f'<section class="panel"><h2>Environment</h2><dl>{items}</dl></section>' if items else ""


def recipe_section(recipe: str) -> str:
    """Show the recipe, with which the run can be repeated.

    Args:
        recipe: The text of the recipe.

    Returns:
        The HTML of the section; empty for an empty recipe.
    """
    if not recipe.strip():
        return ""
    return (
        '<section class="panel"><details open><summary><h2>Recipe</h2></summary>'
        f'<pre tabindex="0">\n{escape(recipe)}</pre></details></section>'
    )


def command_section(run: dict[str, Any]) -> str:
    """Show the command line that started the run.

    Args:
        run: The record of the run.

    Returns:
        The HTML of the section; empty without data.
    """
    command = run.get("command")
    if not command:
        return ""
    return (
        f'<section class="panel"><h2>Command</h2><pre tabindex="0">\n{escape(str(command))}</pre></section>'
    )
