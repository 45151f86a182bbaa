"""The picture: panel A and panels B to D."""

from __future__ import annotations

from typing import Any

from reproduction.figures.estimation.arms import (
    AIMED,
    BASELINE,
    ISOTROPIC,
    OURS,
    OURS_AIMED,
    PANELS,
    PAPER,
    PAPER_BEST,
)
from reproduction.harness import Results, band, mean, spaced


def draw(settings: dict[str, Any], results: Results) -> Any:
    """The figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9), layout="constrained")
    axes = figure.subplots(2, 2).flatten()
    at = spaced(settings["full steps"], 14)
    labels = {
        PAPER: "paper's estimator, triangular, $Q_0$ = I/γ",
        PAPER_BEST: "paper's estimator, square, $Q_0$ = I n/Tr($F_γ$)",
        "ours": "ours (natural steps)",
        "average of inverses": "average of inverses (biased)",
        "inverse of the average": "inverse of the average",
    }
    colours = ["tab:red", "tab:orange", "tab:green", "grey", "black"]
    for (key, label), colour in zip(labels.items(), colours, strict=True):
        style = "--" if key == "inverse of the average" else "-"
        band(axes[0], at, results[f"A: {key}"]["distance"], label, color=colour, linestyle=style)
    axes[0].set(xscale="log", yscale="log", xlabel="minibatches",
                ylabel="Riemannian distance to $F_γ^{-1}$", title="A   full Q")  # fmt: skip
    axes[0].legend(frameon=False, fontsize=8)
    at = spaced(settings["structured steps"], 14)
    arms = {
        BASELINE: ("approximate, average, invert", "black", "-"),
        ISOTROPIC: ("paper's estimator, isotropic u", "tab:orange", "-"),
        AIMED: ("paper's estimator, u ~ N(0, F$^{-1}$)", "tab:red", "-"),
        OURS: ("ours, isotropic", "tab:green", "--"),
        OURS_AIMED: ("ours, then u ~ N(0, F$^{-1}$)", "tab:blue", "-"),
    }
    left, right = settings["kronecker"]
    titles = {
        "diagonal": "B   diagonal",
        "block": f"C   {settings['n'] // settings['block size']} blocks",
        "kronecker": f"D   Kronecker, {left}×{left} ⊗ {right}×{right}",
    }
    for axis, structure in zip(axes[1:], PANELS, strict=True):
        for arm, (label, colour, style) in arms.items():
            rows = results[f"{structure}: {arm}"]["aimed error"]
            band(axis, at, rows, label, color=colour, linestyle=style)
        limits = results[f"{structure}: limits"]["aimed optimum"]["aimed error"]
        axis.axhline(mean(row[0] for row in limits), color="tab:blue", linestyle=":", linewidth=1,
                     label="optimum of the structure, u ~ N(0, F$^{-1}$)")  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel="minibatches", title=titles[structure],
                 ylabel="error of Qu, u ~ N(0, F$^{-1}$), relative", ylim=(0.15, 30))  # fmt: skip
        axis.legend(frameon=False, fontsize=8)
    return figure
