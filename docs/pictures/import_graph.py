"""Draw the rooms of fishleg by rank, and which room imports which: docs/pictures/import_graph.svg.

The imports are read from the source with `ast`; nothing is imported.
Run: python docs/pictures/import_graph.py
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "fishleg"
TARGET = Path(__file__).with_suffix(".svg")
RANKS = [
    ["options", "runtime", "report"],
    ["curvature", "formats", "shrinking", "workloads"],
    ["inverse"],
    ["optim"],
    ["pruning"],
    ["runs"],
    ["cli"],
]


# where the first room of each rank stands: shifted, so that few arrows run behind a box
_LEFT, _STEP, _RISE = [2.2, 0.9, 2.9, 5.3, 3.4, 7.0, 9.0], 2.7, 1.35


def room_of(path: Path) -> str:
    """Return the room that a source file belongs to; a single file in the package is its own room."""
    parts = path.relative_to(SOURCE).parts
    return parts[0].removesuffix(".py")


def imports() -> dict[tuple[str, str], int]:
    """Return (importing room, imported room) with the number of import statements."""
    known = {room for rank in RANKS for room in rank}
    found: dict[tuple[str, str], int] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = []
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module]
                if node.module == "fishleg":
                    modules = [f"fishleg.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            for module in modules:
                parts = module.split(".")
                if parts[0] == "fishleg" and len(parts) > 1:
                    edge = room_of(path), parts[1]
                    if edge[0] != edge[1] and known.issuperset(edge):
                        found[edge] = found.get(edge, 0) + 1
    return found


def draw() -> None:
    """Draw the picture."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    plt.rcParams.update({"svg.hashsalt": "fishleg", "font.size": 11})
    figure, axes = plt.subplots(figsize=(8.4, 7.4))
    places = {
        room: (_LEFT[height] + _STEP * i, _RISE * height)
        for height, rank in enumerate(RANKS)
        for i, room in enumerate(rank)
    }
    for (high, low), count in sorted(imports().items()):
        (x0, y0), (x1, y1) = places[high], places[low]
        axes.add_patch(
            FancyArrowPatch(
                (x0, y0 - 0.3), (x1, y1 + 0.3), arrowstyle="-|>",
                mutation_scale=9, linewidth=0.5 + 0.12 * min(count, 12), color="#8892b0",
                shrinkA=0, shrinkB=0, zorder=1,
            )
        )  # fmt: skip
    for room, (x, y) in places.items():
        box = FancyBboxPatch(
            (x - 0.95, y - 0.3), 1.9, 0.6, boxstyle="round,pad=0.02",
            facecolor="#e8eaf6", edgecolor="#3f51b5", zorder=2,
        )  # fmt: skip
        axes.add_patch(box)
        axes.text(x, y, room, ha="center", va="center", weight="bold", zorder=3)
    for height in range(len(RANKS)):
        axes.text(-1.5, _RISE * height, f"rank {height + 1}", va="center", color="#666666")
    axes.set_xlim(-1.6, 10.2)
    axes.set_ylim(-0.5, _RISE * (len(RANKS) - 1) + 0.5)
    axes.axis("off")
    figure.savefig(TARGET, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    draw()
