"""The picture of the four panels."""

from __future__ import annotations

import statistics
from typing import Any

from fishleg.paper.ablation.pruning import stages
from fishleg.paper.ablation.shared import FACTORS, FLS, LOOK, OBERT, OBERT_MORE, OURS, SCHEDULES, UNTRAINED
from fishleg.paper.harness import Results, band, mean, spaced


def draw(settings: dict[str, Any], structures: list[str], results: Results) -> Any:
    """All four panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(20, 19), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[1.9, 3])
    top, bottom = parts
    axes = top.subplots(2, 4)
    _draw_noise_free(settings, results, axes[0][:2])
    at = spaced(settings["A"]["steps"], 14)
    for axis, factor in zip(axes[0][2:], FACTORS, strict=True):
        for schedule, style in zip(SCHEDULES, ("-", "--"), strict=True):
            for P, colour in (("I", "black"), ("Q", "tab:orange")):
                unit = results.get(f"A: {factor}, {schedule}, P={P}")
                if unit is None:  # a record that is not complete can be drawn too
                    continue
                label = f"P = {P}, {schedule} rate {unit['rate']:g}"
                band(axis, at, unit["gap"], label, color=colour, linestyle=style)
        axis.set(xscale="log", yscale="log", xlabel="auxiliary step",
                 ylabel="loss above its minimum, relative",
                 title=f"A   minibatches, {factor} factor, $Q_0$ = I·{FACTORS[factor]}")  # fmt: skip
        if axis.lines:
            axis.legend(frameon=False, fontsize=9)
        else:
            axis.text(0.5, 0.5, "not run yet", transform=axis.transAxes, ha="center")
    palette = {"full": "tab:orange", "diagonal": "tab:purple"}
    blues = ["#9ecae1", "#6baed6", "#3182bd", "#08519c"]
    palette.update({f"block {size}": blues[i % 4] for i, size in enumerate(settings["blocks"])})
    axis = axes[1][0]
    for j, who in enumerate(("paper", "ours")):
        for i, structure in enumerate(structures):
            gaps = results[f"B, C: {structure}, {who}"]["gap"]
            axis.bar(i + 0.4 * j - 0.2, mean(gaps), width=0.38, color=palette[structure],
                     hatch="" if who == "paper" else "//", edgecolor="white")  # fmt: skip
    limits = [mean(results[f"B, C: {structure}, ours"]["limit"]) for structure in structures]
    axis.plot(range(1, len(structures)), limits[1:], "k_", markersize=22, label="the structure's optimum")
    axis.bar(0, 0, color="grey", label="paper's estimator")
    axis.bar(0, 0, color="grey", hatch="//", edgecolor="white", label="ours")
    axis.set_xticks(range(len(structures)), structures, rotation=20)
    axis.set(yscale="log", ylabel="loss above the full optimum, relative", title="B   loss by structure of Q",
             ylim=(1e-4, 100))  # fmt: skip
    axis.legend(frameon=False, fontsize=9, loc="upper right")
    per = settings["per stage"] / settings["n"] * 100
    sparsity = [per * stage for stage in stages(settings["n"], settings["per stage"])]
    rivals = {
        "paper": {"M-FAC, sum": "tab:green", "exact, sum": "tab:red"},
        "ours": {"M-FAC, joint": "tab:green", "exact, joint": "tab:red"},
    }
    for axis, who in zip(axes[1][1:3], ("paper", "ours"), strict=True):
        band(axis, sparsity, results["C: magnitude"]["mse"], "magnitude", color="black")
        for structure in structures:
            rows = results[f"B, C: {structure}, {who}"]["mse"]
            band(axis, sparsity, rows, structure, color=palette[structure])
        for name, colour in rivals[who].items():
            style = "--" if name.startswith("exact") else "-"
            band(axis, sparsity, results[f"C: {name}"]["mse"], name, color=colour, linestyle=style)
        how = "paper's estimator, sum of single updates" if who == "paper" else "ours, joint compensation"
        axis.set(yscale="log", ylim=(1e-5, 1), xlabel="sparsity, %", ylabel="test MSE", title=f"C   {how}")
        axis.legend(frameon=False, fontsize=8, ncols=2)
    axis = axes[1][3]
    for i, size in enumerate(settings["blocks"]):
        seconds = results[f"D: block {size}, time"]
        # the arms' colours in the panels below; the vectorised oBERT is the same estimate, made faster
        colours = {
            "oBERT, recursion": "tab:blue",
            "oBERT, vectorised": "navy",
            FLS: "tab:red",
            OURS: "tab:green",
        }
        for j, (name, values) in enumerate(seconds.items()):
            ratios = [a / b for a, b in zip(values, seconds["oBERT, recursion"], strict=True)]
            axis.bar(i + 0.2 * j - 0.3, statistics.median(ratios), width=0.18, color=colours[name],
                     label=f"{name}" if i == 0 else None)  # fmt: skip
    axis.set_xticks(range(len(settings["blocks"])), [f"block {size}" for size in settings["blocks"]])
    axis.set(yscale="log", ylabel="time of one update of Q / oBERT's recursion", title="D   wall-clock",
             ylim=(0.02, 10))  # fmt: skip
    axis.legend(frameon=False, fontsize=9, ncols=2, loc="upper center")
    _draw_blocks(settings, results, bottom)
    return figure


def _draw_noise_free(settings: dict[str, Any], results: Results, axes: Any) -> None:
    steps = settings["A"]["noise-free steps"]
    colours = {"I": "black", "Q": "tab:orange"}
    for start, style in (("I", "-"), ("I/γ", "--")):
        for P, colour in colours.items():
            unit = results["A: flow"][f"{start}, P={P}"]
            label = f"P = {P}, $Q_0$ = {start}, rate {unit['rate']:.2g}"
            band(axes[0], spaced(steps, 60), unit["gap"], label, color=colour, linestyle=style)
    axes[0].set(title="A   without noise: gradient descent on Q")
    for factor, style in zip(FACTORS, ("-", "--"), strict=True):
        for P, colour in colours.items():
            unit = results.get(f"A: {factor}, noise-free, P={P}")
            if unit is None:
                continue
            label = f"P = {P}, {factor}, rate {unit['rate']:g}"
            band(axes[1], spaced(steps, 14), unit["gap"], label, color=colour, linestyle=style)
    axes[1].set(title="A   without noise: Adam on the factor")
    for axis in axes:
        axis.set(xscale="log", yscale="log", xlabel="step", ylim=(1e-8, 100))
        axis.set_ylabel("loss above its minimum, relative")
        axis.legend(frameon=False, fontsize=9)


def _draw_blocks(settings: dict[str, Any], results: Results, figure: Any) -> None:
    D, sizes = settings["D"], settings["blocks"]
    axes = figure.subplots(3, len(sizes), sharey="row", squeeze=False)
    at = list(stages(D["n"], D["per stage"]))
    per = D["per stage"] / D["n"] * 100
    colours = {
        OBERT: "tab:blue",
        OBERT_MORE: "tab:cyan",
        FLS: "tab:red",
        OURS: "tab:green",
        UNTRAINED: "grey",
    }
    looks = [per * (stage - 1) for stage in at if (stage - 1) % LOOK == 0]
    rows = (
        ("mse", "test MSE", [per * stage for stage in at]),
        ("distance to full", "distance to the full inverse", looks),
        ("distance to blocks", "distance to the block inverse", looks),
    )
    for i, (name, label, x) in enumerate(rows):
        for axis, size in zip(axes[i], sizes, strict=True):
            for arm, colour in colours.items():
                style = {UNTRAINED: ":", OURS: "--"}.get(arm, "-")  # ours may cover oBERT's
                band(axis, x, results[f"D: block {size}, {arm}"][name], arm, color=colour, linestyle=style)
            axis.set(xlabel="sparsity, %", title=f"D   blocks of {size}" if i == 0 else "")
            if i == 0:
                axis.set(yscale="log", ylim=(1e-5, 0.1))
            elif name == "distance to blocks":
                axis.set(yscale="log", ylim=(0.03, 300))
        axes[i][0].set_ylabel(label)
        axes[i][0].legend(frameon=False, fontsize=8)
