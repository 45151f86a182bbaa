"""The paper's 2:4 table: ResNet18, two weights of every four, pruned as the paper did it."""

from __future__ import annotations

from typing import Any

from reproduction.figures.resnet18.config import Config
from reproduction.figures.resnet18.experiment import Experiment
from reproduction.figures.unstructured import COLOURS, accuracies, by_arm, particulars
from reproduction.harness import Results

NAME = "semi_structured"


def summary(config: Config, results: Results) -> Results:
    """Accuracies by arm on the way to 2:4, which is the last."""
    runs = by_arm(config, config.semi_structured_arms, results)
    return accuracies(config, runs, config.semi_structured, results)


def _draw(config: Config, record: Results) -> Any:
    from matplotlib.figure import Figure

    found = record["summary"]
    figure = Figure(figsize=(6.5, 3.4), layout="constrained")
    axis = figure.subplots()
    last = f"{100 * config.semi_structured[-1]:.1f} %"
    arms = [arm for arm, value in found["after"].items() if value[last]["mean"] is not None]  # None: diverged
    for place, arm in enumerate(arms):
        before, after = found["before"][arm][last], found["after"][arm][last]
        axis.plot([before["mean"], after["mean"]], [place, place], color=COLOURS[arm], linewidth=0.8)
        # the open marker is larger, so that it is visible where the two coincide
        for value, face, size in ((before, "white", 10), (after, COLOURS[arm], 6)):
            axis.errorbar(value["mean"], place, xerr=value["sem"], marker="o", color=COLOURS[arm],
                          markerfacecolor=face, markersize=size)  # fmt: skip
    axis.set_yticks(range(len(arms)), arms)
    axis.axvline(found["dense"], color="grey", linewidth=0.8)
    axis.invert_yaxis()
    axis.margins(y=0.25)
    axis.grid(alpha=0.3, axis="x")
    axis.set(xlabel="test accuracy, % (open: before the last training; grey line: dense)")
    what = f"{config.dataset}{particulars(config)}"
    axis.set_title(f"2:4, ResNet18, width {config.width}, {what}, seeds: {len(config.seeds)}", fontsize=10)
    return figure


run = Experiment(NAME, "2:4", "semi_structured", "semi_structured_arms", summary, _draw).run
