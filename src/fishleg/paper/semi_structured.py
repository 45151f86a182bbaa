"""The paper's 2:4 table: ResNet18, two weights of every four, pruned as the paper did it."""

from __future__ import annotations

from typing import Any

from fishleg.paper.config import Config
from fishleg.paper.harness import Results, mean_sem
from fishleg.paper.resnet18 import Experiment
from fishleg.paper.unstructured import COLOURS, by_arm

NAME = "semi_structured"


def summary(config: Config, results: Results) -> Results:
    """Accuracy at 2:4 by arm, right after the last pruning and after its training."""
    found: Results = {"dense": results["dense"]["curve"][-1]["accuracy"], "seeds": len(config.seeds)}
    for when in ("before", "after"):
        found[when] = {
            arm: mean_sem([seed["rows"][-1][when] for seed in seeds])
            for arm, seeds in by_arm(config, config.semi_structured_arms, results).items()
        }
    return found


def _draw(config: Config, record: Results) -> Any:
    from matplotlib.figure import Figure

    found = record["summary"]
    figure = Figure(figsize=(6.5, 3.4), layout="constrained")
    axis = figure.subplots()
    arms = [arm for arm, value in found["after"].items() if value["mean"] is not None]  # None: diverged
    for when, shade, shift in (("before", 0.35, -0.2), ("after", 1.0, 0.2)):
        values = [found[when][arm] for arm in arms]
        axis.barh(
            [i + shift for i in range(len(arms))], [v["mean"] for v in values],
            xerr=[v["sem"] for v in values], alpha=shade, color=[COLOURS[arm] for arm in arms], height=0.38,
        )  # fmt: skip
    axis.set_yticks(range(len(arms)), arms)
    axis.axvline(found["dense"], color="grey", linewidth=0.8)
    lowest = min([found["dense"], *(found["before"][arm]["mean"] for arm in arms)])
    axis.set_xlim(max(0, lowest - 5), None)
    axis.invert_yaxis()
    axis.set(xlabel="test accuracy, % (pale: before the last training; grey line: dense)")
    axis.set_title(f"2:4, ResNet18, width {config.width}, {config.dataset}, seeds: {len(config.seeds)}")
    return figure


run = Experiment(NAME, "2:4", "semi_structured", "semi_structured_arms", summary, _draw).run
