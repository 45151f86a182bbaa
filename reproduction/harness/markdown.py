"""Tables in Markdown, and documents whose tables are filled from results.

A document marks a table with `<!-- table: NAME -->` and `<!-- end -->`; the lines between are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Cell = str | float | None | dict[str, Any]  # a dictionary has a mean and its standard error, "sem"


def fill(text: str, tables: Mapping[str, str]) -> str:
    """The document with every marked table replaced by the one of that name."""

    def one(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{tables[match[1]]}\n<!-- end -->"

    return re.sub(r"<!-- table: ([\w-]+) -->\n.*?<!-- end -->", one, text, flags=re.DOTALL)


def markdown(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table; numbers with three digits, means with their errors."""
    lines = [_line(head), _line(["---"] * len(head))]
    return "\n".join([*lines, *(_line([cell(value) for value in row]) for row in rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cell(value: Cell) -> str:
    """One cell as text."""
    if isinstance(value, str):
        return value
    if value is None:
        return "–"
    if isinstance(value, dict):
        if value["mean"] is None:
            return "–"
        return f"{_number(value['mean'])} ± {_number(value['sem'], 1 if value['sem'] < 1 else 2)}"
    return _number(value)


def _number(value: float, digits: int = 3) -> str:
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.{digits - 1}e}"
    return f"{round(value):d}" if abs(value) >= 10**digits else f"{value:.{digits}g}"
