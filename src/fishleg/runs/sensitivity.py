"""The loss increase that Q predicts if a single layer is pruned; no pruned model is evaluated."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fishleg.formats.results import write_figure
from fishleg.pruning import Surgeon, default_sparsity
from fishleg.runs.budgets import check_reachable
from fishleg.runs.errors import ToolError
from fishleg.runs.recipe import Recipe
from fishleg.runs.setup import Phases, make_session, prepare, quiet
from fishleg.runs.sources import no_exit

_PICTURES = (".png", ".svg", ".pdf")
_GRID = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
_RESISTANT = 5.0  # a layer resists if its share of the loss is so many times its share of the weights


@dataclass(frozen=True)
class Sensitivity:
    """The predicted loss increase of each layer at several sparsities.

    Args:
        grid: The sparsities.
        curves: By weight name, the predicted loss increase at each sparsity of the grid.
        sizes: The number of weights, by weight name.
        at: The sparsity of the grid at which layers are compared.
    """

    grid: tuple[float, ...]
    curves: dict[str, list[float]]
    sizes: dict[str, int]
    at: float

    def loss_at(self, name: str) -> float:
        """Return the predicted loss increase if this layer alone is pruned to the sparsity `at`.

        Args:
            name: The name of the weight.

        Returns:
            The loss increase.
        """
        return self.curves[name][self.grid.index(self.at)]

    def resistant(self) -> list[str]:
        """Return the small layers that cost far more loss per removed weight than the others.

        They are candidates for exclusion.
        """
        total, size = sum(map(self.loss_at, self.curves)), sum(self.sizes.values())
        if total <= 0:
            return []
        found = []
        for name in self.curves:
            share, fair = self.loss_at(name) / total, self.sizes[name] / size
            if share > _RESISTANT * fair and share > 0.05 and fair < 0.1:
                found.append(name)
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return all results as values for JSON."""
        layers = [
            {
                "name": n,
                "size": self.sizes[n],
                "predicted": self.curves[n],
                "resistant": n in self.resistant(),
            }
            for n in self.curves
        ]
        return {"grid": list(self.grid), "judged_at": self.at, "layers": layers}

    def table(self) -> str:
        """Return a table for the terminal: the most sensitive layer first, and advice at the end."""
        width = max(len(name) for name in self.curves)
        heads = "".join(f"{s:>9.0%}" for s in self.grid)
        lines = ["predicted loss increase if this layer alone is pruned to a sparsity of"]
        lines.append(f"{'layer':<{width}} {'size':>10}{heads}")
        resistant = self.resistant()
        for name in sorted(self.curves, key=self.loss_at, reverse=True):
            cells = "".join(f"{value:>9.2g}" for value in self.curves[name])
            lines.append(
                f"{name:<{width}} {self.sizes[name]:>10,}{cells}{'  resists' if name in resistant else ''}"
            )
        if resistant:
            flags = " ".join(f"--exclude '^{name.replace('.', chr(92) + '.')}$'" for name in resistant)
            share = sum(self.sizes[n] for n in resistant) / sum(self.sizes.values())
            lines += [
                "",
                f"Small layers ({share:.1%} of the weights) with a large predicted loss. To keep them dense:",
                flags,
            ]
        else:
            lines += [
                "",
                "No small layer stands out: global pruning balances the layers by itself.",
            ]
        return "\n".join(lines)

    def draw(self, path: Path) -> None:
        """Draw the curves.

        Args:
            path: The file to write; its ending gives the format.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 5), layout="constrained")
        axis = figure.subplots()
        worst = sorted(self.curves, key=self.loss_at, reverse=True)
        for i, (name, curve) in enumerate((n, self.curves[n]) for n in worst):
            label, alpha = (name, 1.0) if i < 10 else (None, 0.25)
            positive = [max(value, 1e-12) for value in curve]
            axis.plot(
                [100 * s for s in self.grid], positive, marker="o", markersize=3, label=label, alpha=alpha
            )
        axis.set_yscale("log")
        axis.set(xlabel="sparsity of the layer, %", ylabel="predicted loss increase")
        axis.set_title("Loss increase that Q predicts for each layer alone (the ten largest are named)")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=7)
        write_figure(path, figure, new=True)


def check_picture(path: Path) -> None:
    """Check that a picture can be drawn and written, before the long work.

    Args:
        path: The file to write.

    Raises:
        ToolError: matplotlib is missing, the format is unknown, or the file cannot be written.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ToolError("a picture needs matplotlib: pip install 'fishleg[plot]'") from None
    if path.suffix.lower() not in _PICTURES:
        raise ToolError(f"picture must end in {', '.join(_PICTURES)}, got {str(path)!r}")
    if os.path.lexists(path):
        raise ToolError(f"picture: {path} is there already: choose another name, or delete it")
    if not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise ToolError(f"picture: {path} cannot be written: its directory does not exist or is read-only")


def sensitivity(surgeon: Surgeon, at: float = 0.9, grid: Sequence[float] = _GRID) -> Sensitivity:
    """Predict the loss increase of every prunable weight at several sparsities.

    Args:
        surgeon: The surgeon of the model; its Q is estimated if needed.
        at: The sparsity at which layers are compared; it is added to the grid.
        grid: The sparsities. Those that the pattern does not allow are left out.

    Returns:
        The curves.

    Raises:
        ToolError: The sparsity `at` is not in (0, 1), or the pattern does not allow it.
    """
    limit = surgeon.pattern.limit
    if not 0 < at < 1 or at > limit:
        raise ToolError(f"sparsity must be in (0, 1) and at most the pattern's limit {limit}, got {at}")
    grid = tuple(sorted({s for s in (*grid, at) if s <= limit}))
    # a small layer cannot reach every sparsity: it keeps at least one weight or group
    most = {name: 1 - 1 / scores.numel() for name, scores in surgeon.weights.magnitudes().items()}
    for sparsity in grid:
        for name in surgeon.weights.names:
            check_reachable(surgeon, min(sparsity, most[name]), only=[name])
    pruner = surgeon.pruner
    inverse = surgeon.curvature.latest(surgeon.masks)
    curves: dict[str, list[float]] = {name: [] for name in surgeon.weights.names}
    for sparsity in grid:
        for name in surgeon.weights.names:
            target = min(sparsity, most[name])
            masks = pruner.search(
                inverse, pruner.select(inverse, target, surgeon.masks, only=[name]), surgeon.masks
            )
            curves[name].append(pruner.predict(inverse, masks)[name])
    sizes = {name: surgeon.model.get_parameter(name).numel() for name in surgeon.weights.names}
    return Sensitivity(grid, curves, sizes, at)


def analyse(recipe: Recipe, *, on_phase: Phases = quiet) -> Sensitivity:
    """Predict the loss increase of every layer of the model that a recipe names.

    Args:
        recipe: The options. Without a sparsity, layers are compared at the default of the pattern.
        on_phase: Receives a text before each step that may take long.

    Returns:
        The curves.
    """
    with no_exit():
        surgeon = make_session(prepare(recipe, on_phase=on_phase)).surgeon
        on_phase("estimating Q")
        surgeon.update_inverse()
    return sensitivity(surgeon, recipe.schedule.sparsity or default_sparsity(surgeon.pattern))
