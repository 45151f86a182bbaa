"""The tables and pictures of README.md and the documents, all made from the committed results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fishleg.formats.files import write_atomically
from reproduction.harness import RESULTS, fill
from reproduction.tables.benchmarks import benchmark_tables
from reproduction.tables.figures import figure_tables
from reproduction.tables.resnet18 import cost, relative_cost, resnet18_tables
from reproduction.tables.robustness import promises

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"


def all_tables(results: Path = RESULTS) -> dict[str, str]:
    """Every table by name, as Markdown."""
    figures = results / "figures"
    return {
        **figure_tables(figures),
        **resnet18_tables(figures),
        "cost": cost(figures),
        "cost-arms": relative_cost(figures),
        **benchmark_tables(results / "benchmarks"),
        "promises": promises(results / "benchmarks"),
    }


def documents() -> list[Path]:
    """README.md and the pages of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def outdated(paths: Sequence[Path]) -> dict[Path, bytes]:
    """The new content of every document, and of every picture it shows, that differs from the results."""
    tables, found = all_tables(), {}
    made = {path.name: path for path in RESULTS.rglob("*.png")}
    for path in paths:
        text = path.read_text("utf-8")
        found[path] = fill(text, tables).encode()
        for name in re.findall(r"pictures/([\w.-]+\.png)", text):
            if name in made:
                found[PICTURES / name] = made[name].read_bytes()
    return {path: new for path, new in found.items() if not path.exists() or path.read_bytes() != new}


def update(paths: Sequence[Path]) -> list[Path]:
    """Fill the tables of the documents and copy the pictures that they show; returns what has changed."""
    changed = outdated(paths)
    PICTURES.mkdir(exist_ok=True)
    for path, new in changed.items():
        write_atomically(path, new)
    return list(changed)
