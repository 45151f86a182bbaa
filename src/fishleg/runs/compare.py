"""Compare several methods on the same budget: one run for each, one table and one picture for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fishleg.formats.results import foreign_file, write_figure, write_json
from fishleg.options.declaration import nearest
from fishleg.options.names import EMPIRICAL_METHODS, METHODS
from fishleg.runs.directory import LOG, RECIPE, RUN, check_unused, read_record
from fishleg.runs.errors import ToolError
from fishleg.runs.events import Listener, read_events
from fishleg.runs.existing_run import open_run
from fishleg.runs.launch import resume, start
from fishleg.runs.recipe import Recipe

# The compensation that each method is published with. Other methods use the recipe's.
_COMPENSATION = {"magnitude": "none", "obert": "sum", "mfac": "sum"}
_TABLE, _PICTURE, _MAKER = "comparison.json", "comparison.png", "fishleg compare"
_MARKS = "osD^vP*X"  # of single points, which may lie on top of each other


@dataclass(frozen=True)
class Comparison:
    """The results of several methods.

    Args:
        records: The record of each run (run.json), by method.
        curves: Pairs (sparsity, metric) after each stage, by method.
    """

    records: dict[str, dict[str, Any]]
    curves: dict[str, list[tuple[float, float]]]

    def as_dict(self) -> dict[str, Any]:
        """Return the main results by method, as values for JSON."""
        keys = (
            "sparsity", "sparse", "dense", "metric", "bytes_sparse", "macs_sparse", "macs_small", "seconds",
            "warnings",
        )  # fmt: skip
        return {
            method: {**{k: record.get(k) for k in keys}, "curve": self.curves[method]}
            for method, record in self.records.items()
        }

    def table(self) -> str:
        """Return a table for the terminal, the best method first."""
        first = next(iter(self.records.values()))
        percent, name = first["metric_unit"] == "%", first["metric"]

        def formatted(value: float) -> str:
            return f"{100 * value:.2f} %" if percent else f"{value:.4g}"

        ranked = sorted(
            self.records, key=lambda m: self.records[m]["sparse"]["metric"], reverse=first["higher_is_better"]
        )
        lines = [f"dense {name} {formatted(first['dense']['metric'])}"]
        lines.append(
            f"{'method':<12}{name:>12}{'sparsity':>10}{'packed bytes':>14}{'MACs kept':>11}{'seconds':>9}"
        )
        for method in ranked:
            r = self.records[method]
            macs = _kept_macs(r) / r["macs_dense"] if r.get("macs_dense") else float("nan")
            lines.append(
                f"{method:<12}{formatted(r['sparse']['metric']):>12}{r['sparsity']:>10.2%}"
                f"{r['bytes_sparse']:>14,}{macs:>11.1%}{r['seconds']:>9.0f}"
            )
        return "\n".join(lines)

    def draw(self, path: Path, *, new: bool = False) -> bool:
        """Draw the metric against the sparsity.

        Args:
            path: The file to write; its ending gives the format.
            new: Whether the file must not exist yet.

        Returns:
            Whether it was drawn; False if matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return False
        first = next(iter(self.records.values()))
        scale = 100 if first["metric_unit"] == "%" else 1
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axis = figure.subplots()
        for i, (method, curve) in enumerate(self.curves.items()):
            points = [(100 * s, scale * m) for s, m in curve]
            style = _style(method, i, len(points))
            axis.plot(*zip(*points, strict=True), label=method, clip_on=False, **style)
        axis.axhline(scale * first["dense"]["metric"], color="grey", linewidth=0.8, label="dense")
        _keep_percentages(axis, metric=scale == 100)
        axis.set(xlabel="sparsity, %", ylabel=f"{first['metric']}{', %' if scale == 100 else ''}")
        axis.set_title(f"{first['name']}, {first['mode']}")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
        write_figure(path, figure, new=new)
        return True


def _kept_macs(record: dict[str, Any]) -> int:
    """Return the multiply-adds that are left. Rows count only if they are cut out."""
    if record.get("pattern") == "rows":
        return int(record.get("macs_small", record["macs_dense"]))
    return int(record["macs_sparse"])


def _style(method: str, index: int, points: int) -> dict[str, Any]:
    """Return how a method is drawn: as a line with dots, or as a mark where there is a single point."""
    if points == 1:  # the legend shows a line for every style that has one
        return {"linestyle": "none", "marker": _MARKS[index % len(_MARKS)], "markersize": 7, "alpha": 0.8}
    line = {"linewidth": 2.5} if method == "fishleg" else {"linestyle": "--"}
    return {"marker": "o", "markersize": 3, **line}


def _keep_percentages(axis: Any, metric: bool) -> None:
    """Leave no place above 100 % or below 0 % on the axis of the sparsity and, if `metric`, of the metric."""
    low, high = axis.get_xlim()
    axis.set_xlim(max(low, 0), min(high, 100))
    if metric:
        low, high = axis.get_ylim()
        axis.set_ylim(max(low, 0), min(high, 100))


def compare_methods(
    recipe: Recipe,
    methods: Sequence[str],
    base: Path | None = None,
    make_listener: Callable[[str], Listener] | None = None,
) -> Comparison:
    """Run several methods on the same budget, one after another. Finished runs are not repeated.

    With `empirical = true` the methods that support the empirical Fisher use it; the others do not.

    Args:
        recipe: The options that all runs share; each run gets a directory inside its `out`.
        methods: The names of the methods.
        base: The directory that relative paths refer to; default: the current one.
        make_listener: Called with each method before its run; what it returns receives the events.

    Returns:
        The records and curves of all runs.

    Raises:
        ToolError: A method is unknown or named twice, or a directory is in use.
    """
    base = base or Path.cwd()
    recipes = _recipes(recipe, methods, base)
    out = (base / recipe.run.out).resolve()
    new = {name: not (out / name).exists() for name in (_TABLE, _PICTURE)}  # then nothing may come in between
    records, curves = {}, {}
    for method, this in recipes.items():
        directory = Path(this.run.out)
        records[method] = _run(this, directory, base, make_listener)
        events = read_events(directory / LOG)
        curves[method] = [(e["sparsity"], e["metric"]) for e in events if e["event"] == "stage"]
    result = Comparison(records, curves)
    try:
        write_json(out / _TABLE, {"made_by": _MAKER, "methods": result.as_dict()}, new=new[_TABLE])
        result.draw(out / _PICTURE, new=new[_PICTURE])
    except FileExistsError as error:
        raise ToolError(
            f"{error.filename} has appeared meanwhile and is not written over: move it away, and give the "
            "command again"
        ) from None
    return result


def _recipes(recipe: Recipe, methods: Sequence[str], base: Path) -> dict[str, Recipe]:
    """Return the recipe of each method. All are checked before the first run starts.

    Raises:
        ToolError: A method is unknown or named twice, or a directory is in use.
    """
    if not methods:
        raise ToolError(f"methods must name at least one of {', '.join(METHODS)}")
    for method in methods:
        if method not in METHODS:
            raise ToolError(
                f"methods must be among {', '.join(METHODS)}, got {method!r}{nearest(method, METHODS)}"
            )
    if len(set(methods)) < len(methods):
        raise ToolError(f"methods must differ, got {', '.join(methods)}")
    empirical = recipe.pruning.empirical
    if empirical and not any(method in EMPIRICAL_METHODS for method in methods):
        known = ", ".join(EMPIRICAL_METHODS)
        raise ToolError(f"empirical = true needs one of the methods {known}, got {', '.join(methods)}")
    out = (base / recipe.run.out).resolve()
    if (out / RUN).exists():
        raise ToolError(f"{out} holds a single run: choose another directory for the comparison (--out NAME)")
    if (foreign := foreign_file(out / _TABLE, _MAKER, out / _PICTURE)) is not None:
        raise ToolError(
            f"out: {foreign} is there, which a comparison would overwrite: choose another directory "
            "(--out NAME)"
        )
    recipes = {}
    for method in methods:
        changes: dict[str, Any] = {"method": method, "out": str(out / method)}
        changes["empirical"] = empirical and method in EMPIRICAL_METHODS
        if recipe.pruning.compensation == "joint" and method in _COMPENSATION:
            changes["compensation"] = _COMPENSATION[method]
        recipes[method] = recipe.replace(**changes)
        if (out / method / RUN).exists():
            _check_same(recipes[method], out / method)
        else:
            check_unused(out / method)
    return recipes


def _check_same(recipe: Recipe, directory: Path) -> None:
    before = (directory / RECIPE).read_text() if (directory / RECIPE).exists() else ""
    if before and before != recipe.to_toml():
        raise ToolError(
            f"{directory} holds a run with other options: choose another directory (--out NAME), or delete it"
        )


def _run(
    recipe: Recipe, directory: Path, base: Path, make_listener: Callable[[str], Listener] | None
) -> dict[str, Any]:
    going_on = (directory / RUN).exists()
    if going_on and (record := read_record(directory)).get("status") == "finished":
        return record
    listeners = [] if make_listener is None else [make_listener(recipe.pruning.method)]
    try:
        if going_on:
            return resume(directory, listeners=listeners, trust=_is_own(directory, recipe, base)).execute()
        return start(recipe, base=base, listeners=listeners).execute()
    finally:
        for listener in listeners:
            listener.close()


def _is_own(directory: Path, recipe: Recipe, base: Path) -> bool:
    """Return whether a run began with this recipe in this directory: its code is then the user's own."""
    run = open_run(directory, trust=True)  # which runs nothing
    same = run.recipe.replace(out=recipe.run.out).sections() == recipe.sections()
    return same and run.base.resolve() == base.resolve()
