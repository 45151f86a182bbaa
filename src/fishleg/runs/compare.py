"""Several methods on the same budget: a run each, then one table and one picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fishleg.cli.display import make_display
from fishleg.formats.checkpoint import write_json
from fishleg.runs import run as runs
from fishleg.runs.directory import LOG, check_unused, read_record
from fishleg.runs.errors import ToolError, nearest
from fishleg.runs.events import read_events
from fishleg.runs.recipe import METHODS, Recipe

# what each method is published with; the others compensate as the recipe says
_COMPENSATION = {"magnitude": "none", "obert": "sum", "mfac": "sum"}


@dataclass(frozen=True)
class Comparison:
    """The records of all runs by method, and the metric against sparsity of each."""

    records: dict[str, dict[str, Any]]
    curves: dict[str, list[tuple[float, float]]]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        keys = ("sparsity", "sparse", "dense", "metric", "bytes_sparse", "macs_sparse", "seconds", "warnings")
        return {
            method: {**{k: record.get(k) for k in keys}, "curve": self.curves[method]}
            for method, record in self.records.items()
        }

    def table(self) -> str:
        """For people, best first."""
        first = next(iter(self.records.values()))
        percent, name = first["metric_unit"] == "%", first["metric"]

        def shown(value: float) -> str:
            return f"{100 * value:.2f} %" if percent else f"{value:.4g}"

        ranked = sorted(
            self.records, key=lambda m: self.records[m]["sparse"]["metric"], reverse=first["higher_is_better"]
        )
        lines = [f"dense {name} {shown(first['dense']['metric'])}"]
        lines.append(
            f"{'method':<12}{name:>12}{'sparsity':>10}{'packed bytes':>14}{'MACs kept':>11}{'seconds':>9}"
        )
        for method in ranked:
            r = self.records[method]
            macs = r["macs_sparse"] / r["macs_dense"] if r.get("macs_dense") else float("nan")
            lines.append(
                f"{method:<12}{shown(r['sparse']['metric']):>12}{r['sparsity']:>10.2%}{r['bytes_sparse']:>14,}"
                f"{macs:>11.1%}{r['seconds']:>9.0f}"
            )
        return "\n".join(lines)

    def draw(self, path: Path) -> bool:
        """The curves as a picture; False without matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return False
        first = next(iter(self.records.values()))
        scale = 100 if first["metric_unit"] == "%" else 1
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axis = figure.subplots()
        for method, curve in self.curves.items():
            style = {"linewidth": 2.5} if method == "fishleg" else {"linestyle": "--"}
            points = [(100 * s, scale * m) for s, m in curve]
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=method, **style)
        axis.axhline(scale * first["dense"]["metric"], color="grey", linewidth=0.8)
        axis.set(xlabel="sparsity, %", ylabel=f"{first['metric']}{', %' if scale == 100 else ''}")
        axis.set_title(f"{first['name']}, {first['mode']}")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
        figure.savefig(path, dpi=130)
        return True


def compare_methods(recipe: Recipe, methods: Sequence[str], base: Path | None = None) -> Comparison:
    """One run per method under the recipe's `out`; finished ones are not done again."""
    base = base or Path.cwd()
    if not methods:
        raise ToolError(f"methods must name at least one of {', '.join(METHODS)}")
    for method in methods:
        if method not in METHODS:
            raise ToolError(
                f"methods must be among {', '.join(METHODS)}, got {method!r}{nearest(method, METHODS)}"
            )
    if len(set(methods)) < len(methods):
        raise ToolError(f"methods must differ, got {', '.join(methods)}")
    out = (base / recipe.out).resolve()
    if (out / "run.json").exists():
        raise ToolError(f"{out} holds a single run: choose another out for the comparison")
    recipes = {}
    for method in methods:  # all of them before the first run: what is wrong with the last shows at once
        this = replace(recipe, method=method, out=str(out / method))
        if recipe.compensation == "joint" and method in _COMPENSATION:
            this = replace(this, compensation=_COMPENSATION[method])
        recipes[method] = this
        if (out / method / "run.json").exists():
            _check_same(this, out / method)
        else:
            check_unused(out / method)
    records, curves = {}, {}
    for method, this in recipes.items():
        records[method] = _run(this, out / method, base)
        events = read_events(out / method / LOG)
        curves[method] = [(e["sparsity"], e["metric"]) for e in events if e["event"] == "stage"]
    result = Comparison(records, curves)
    write_json(out / "comparison.json", result.as_dict())
    result.draw(out / "comparison.png")
    return result


def _check_same(recipe: Recipe, directory: Path) -> None:
    before = (directory / "recipe.toml").read_text() if (directory / "recipe.toml").exists() else ""
    if before and before != recipe.to_toml():
        raise ToolError(f"{directory} holds a run with other options: choose another out, or delete it")


def _run(recipe: Recipe, directory: Path, base: Path) -> dict[str, Any]:
    if (directory / "run.json").exists():
        record = read_record(directory)
        if record.get("status") == "finished":
            return record
        run = runs.resume(directory)
    else:
        run = runs.start(recipe, base=base)
    print(f"-- {recipe.method}", file=sys.stderr, flush=True)
    run.listen(make_display(run.evaluator.unit, run.evaluator.name))
    return run.execute()
