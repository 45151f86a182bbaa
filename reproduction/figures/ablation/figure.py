"""The pictures: one of panel A, one of B and C, one of D."""

from __future__ import annotations

import statistics
from typing import Any

from reproduction.figures.ablation.pruning import stages
from reproduction.figures.ablation.shared import (
    FACTORS,
    FLS,
    FLS_80,
    FLS_NEAR,
    LOOK,
    OBERT,
    OBERT_MORE,
    OURS,
    SCHEDULES,
    UNTRAINED,
)
from reproduction.harness import Results, band, mean, spaced

_GAP = "loss above its minimum, relative"
_COLOURS_OF_P = {"I": "black", "Q": "tab:orange"}


def draw(settings: dict[str, Any], structures: list[str], results: Results) -> dict[str, Any]:
    """The figures by the suffix of their files."""
    from matplotlib.figure import Figure

    sizes = {"-a": (15, 8.4), "-bc": (15, 4.6), "-d": (15, 13)}
    figures = {name: Figure(figsize=size, layout="constrained") for name, size in sizes.items()}
    _draw_preconditioning(settings, results, figures["-a"])
    _draw_structures(settings, structures, results, figures["-bc"])
    parts: Any = figures["-d"].subfigures(2, 1, height_ratios=[3.4, 1])
    _draw_blocks(settings, results, parts[0])
    _draw_time(settings, results, parts[1])
    return figures


def _draw_preconditioning(settings: dict[str, Any], results: Results, figure: Any) -> None:
    axes = figure.subplots(2, 3)
    steps = settings["A"]["noise-free steps"]
    fine, coarse, at = spaced(steps, 60), spaced(steps, 14), spaced(settings["A"]["steps"], 14)
    descents = {"descent on Q itself": results["A: flow"]}
    for factor in FACTORS:
        found = results["A: descent on the factor"]
        descents[f"descent on the {factor} factor"] = {
            key.removeprefix(f"{factor}, "): unit for key, unit in found.items() if key.startswith(factor)
        }
    for axis, (title, units) in zip(axes[0], descents.items(), strict=True):
        for key, unit in units.items():
            start, _, P = key.rpartition(", P=")
            style = {"I": "-", "I/γ": "--"}.get(start, ":")
            label = f"P = {P}, $Q_0$ = {start}, rate {unit['rate']:.2g}"
            band(axis, fine, unit["gap"], label, color=_COLOURS_OF_P[P], linestyle=style)
        axis.set(title=f"A   without noise: {title}", ylim=(1e-9, 1e3))
    for factor, style in zip(FACTORS, ("-", "--"), strict=True):
        for P, colour in _COLOURS_OF_P.items():
            unit = results[f"A: {factor}, noise-free, P={P}"]
            label = f"P = {P}, {factor}, rate {unit['rate']:g}"
            band(axes[1][0], coarse, unit["gap"], label, color=colour, linestyle=style)
    axes[1][0].set(title="A   without noise: Adam on the factor", ylim=(1e-9, 1e3))
    for axis, factor in zip(axes[1][1:], FACTORS, strict=True):
        for schedule, style in zip(SCHEDULES, ("-", "--"), strict=True):
            for P, colour in _COLOURS_OF_P.items():
                unit = results[f"A: {factor}, {schedule}, P={P}"]
                label = f"P = {P}, {schedule} rate {unit['rate']:g}"
                band(axis, at, unit["gap"], label, color=colour, linestyle=style)
        axis.set(title=f"A   minibatches: Adam, {factor}, from {FACTORS[factor]}")
    for axis in axes.flat:
        axis.set(xscale="log", yscale="log", xlabel="step", ylabel=_GAP)
        axis.legend(frameon=False, fontsize=8, loc="lower left")


def _draw_structures(settings: dict[str, Any], structures: list[str], results: Results, figure: Any) -> None:
    axes = figure.subplots(1, 3)
    palette = {"full": "tab:orange", "diagonal": "tab:purple"}
    blues = ["#9ecae1", "#6baed6", "#3182bd", "#08519c"]
    palette.update({f"block {size}": blues[i % 4] for i, size in enumerate(settings["blocks"])})
    axis = axes[0]
    for who, marker, aside in (("paper", "o", -0.15), ("ours", "D", 0.15)):
        for i, structure in enumerate(structures):
            gap = mean(results[f"B, C: {structure}, {who}"]["gap"])
            axis.plot(i + aside, gap, marker, color=palette[structure], markersize=8, markeredgecolor="black")
        name = "paper's estimator" if who == "paper" else "ours"
        axis.plot([], [], marker, color="white", markeredgecolor="black", markersize=8, label=name)
    limits = [mean(results[f"B, C: {structure}, ours"]["limit"]) for structure in structures]
    axis.plot(range(1, len(structures)), limits[1:], "k_", markersize=22, label="the structure's optimum")
    axis.set_xticks(range(len(structures)), structures, rotation=20)
    axis.set(yscale="log", ylabel="loss above the full optimum, relative", title="B   loss by structure of Q")
    axis.grid(alpha=0.3, axis="y")
    axis.legend(frameon=False, fontsize=9, loc="lower right")
    per = settings["per stage"] / settings["n"] * 100
    sparsity = [per * stage for stage in stages(settings["n"], settings["per stage"])]
    rivals = {
        "paper": {"M-FAC, sum": "tab:green", "exact, sum": "tab:red"},
        "ours": {"M-FAC, joint": "tab:green", "exact, joint": "tab:red"},
    }
    for axis, who in zip(axes[1:], ("paper", "ours"), strict=True):
        band(axis, sparsity, results["C: magnitude"]["mse"], "magnitude", color="black")
        for structure in structures:
            rows = results[f"B, C: {structure}, {who}"]["mse"]
            band(axis, sparsity, rows, structure, color=palette[structure])
        for name, colour in rivals[who].items():
            style = "--" if name.startswith("exact") else "-"
            band(axis, sparsity, results[f"C: {name}"]["mse"], name, color=colour, linestyle=style)
        how = "paper's estimator, sum of single updates" if who == "paper" else "ours, joint compensation"
        axis.set(yscale="log", ylim=(1e-5, 1), xlabel="sparsity, %", ylabel="test MSE", title=f"C   {how}")
        axis.legend(frameon=False, fontsize=8, ncols=2, loc="lower right")


def _draw_blocks(settings: dict[str, Any], results: Results, figure: Any) -> None:
    D, sizes = settings["D"], settings["blocks"]
    axes = figure.subplots(3, len(sizes), sharey="row", squeeze=False)
    at = list(stages(D["n"], D["per stage"]))
    per = D["per stage"] / D["n"] * 100
    styles: dict[str, dict[str, Any]] = {
        OBERT: {
            "color": "tab:blue",
            "linewidth": 4,
            "alpha": 0.45,
        },  # the line of ours covers it in two rows of three
        OBERT_MORE: {"color": "tab:cyan", "linewidth": 2.5, "alpha": 0.7},
        FLS: {"color": "tab:red"},
        FLS_NEAR: {"color": "tab:red", "linestyle": "--"},
        OURS: {"color": "tab:green", "linestyle": "--"},
        UNTRAINED: {"color": "grey", "linestyle": ":"},
    }
    looks = [per * (stage - 1) for stage in at if (stage - 1) % LOOK == 0]
    rows = (
        ("mse", "test MSE", [per * stage for stage in at]),
        ("distance to full", "distance to the full inverse", looks),
        ("distance to blocks", "distance to the block inverse", looks),
    )
    for i, (name, label, x) in enumerate(rows):
        for axis, size in zip(axes[i], sizes, strict=True):
            for arm, style in styles.items():
                band(axis, x, results[f"D: block {size}, {arm}"][name], arm, **style)
            axis.set(xlabel="sparsity, %", title=f"D   blocks of {size}" if i == 0 else "")
            if i == 0:
                axis.set(yscale="log", ylim=(1e-5, 0.1))
            elif name == "distance to blocks":
                axis.set(yscale="log", ylim=(0.03, 300))
        axes[i][0].set_ylabel(label)
    axes[0][0].legend(frameon=False, fontsize=8)


def _draw_time(settings: dict[str, Any], results: Results, figure: Any) -> None:
    axis, sizes = figure.subplots(), settings["blocks"]
    marks = {
        "oBERT, recursion": ("s", "tab:blue"),
        "oBERT, vectorised": ("s", "navy"),
        FLS: ("o", "tab:red"),
        FLS_80: ("*", "tab:red"),
        OURS: ("D", "tab:green"),
    }
    for i, size in enumerate(sizes):
        seconds = results[f"D: block {size}, time"]
        for name, (marker, colour) in marks.items():
            ratios = [a / b for a, b in zip(seconds[name], seconds["oBERT, recursion"], strict=True)]
            label = name if i == 0 else None
            axis.plot(i, statistics.median(ratios), marker, color=colour, markersize=8, label=label)
    axis.set_xticks(range(len(sizes)), [f"blocks of {size}" for size in sizes])
    axis.set(yscale="log", ylabel="time of an update\n/ oBERT's recursion", title="D   wall-clock")
    axis.grid(alpha=0.3, axis="y")
    axis.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
