"""The paper's main figure: ResNet18, test accuracy against sparsity, scorers crossed with optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reproduction.figures.resnet18.config import CONTROL, Config
from reproduction.figures.resnet18.experiment import Experiment
from reproduction.harness import Results, band, mean_sem

NAME = "unstructured"
AS_THE_PAPER = ("magnitude + SGD", "OBS + SGD", "FLS + FishLeg")
CROSSED = ("magnitude + SGD", "magnitude + FishLeg", "FLS + SGD", "FLS + FishLeg")
COLOURS = {
    "magnitude + SGD": "tab:blue",
    "OBS + SGD": "tab:orange",
    "FLS + FishLeg": "tab:green",
    "FLS + SGD": "tab:olive",
    "magnitude + FishLeg": "tab:cyan",
    CONTROL: "black",
}


def by_arm(config: Config, arms: Sequence[str], results: Results) -> dict[str, list[Results]]:
    """The runs of each arm, one per seed."""
    return {arm: [results[f"{arm}, seed {seed}"] for seed in config.seeds_of(arm)] for arm in arms}


def accuracies(
    config: Config, runs: dict[str, list[Results]], sparsities: Sequence[float], results: Results
) -> Results:
    """Accuracies of the dense model, and of each arm at each sparsity after pruning and after training."""
    found: Results = {"dense": results["dense"]["curve"][-1]["accuracy"], "seeds": len(config.seeds)}
    for when in ("before", "after"):
        found[when] = {
            arm: {
                f"{100 * s:.1f} %": mean_sem([seed["rows"][i][when] for seed in seeds])
                for i, s in enumerate(sparsities)
            }
            for arm, seeds in runs.items()
        }
    return found


def summary(config: Config, results: Results) -> Results:
    """Accuracies by arm and sparsity; the contributions of scorer and optimizer, if all four exist."""
    runs = by_arm(config, config.arms, results)
    found = accuracies(config, runs, config.sparsities, results)
    found["seconds"] = {arm: mean_sem([seed["seconds"] for seed in seeds]) for arm, seeds in runs.items()}
    if set(CROSSED) <= set(runs):
        common = set.intersection(*(set(config.seeds_of(arm)) for arm in CROSSED))
        found["crossed_seeds"] = len(common)
        found["parts"] = {
            f"{100 * s:.1f} %": _parts(
                {
                    arm: [results[f"{arm}, seed {seed}"]["rows"][i]["after"] for seed in sorted(common)]
                    for arm in CROSSED
                }
            )
            for i, s in enumerate(config.sparsities)
        }
    return found


def _parts(after: dict[str, list[float | None]]) -> Results:
    """The gain of FLS + FishLeg over magnitude + SGD, and the average contribution of each of the two."""
    rows = list(zip(*(after[arm] for arm in CROSSED), strict=True))
    rows = [row for row in rows if None not in row]
    return {
        "scorer and compensation": mean_sem([(fs - ms + ff - mf) / 2 for ms, mf, fs, ff in rows]),
        "optimizer": mean_sem([(mf - ms + ff - fs) / 2 for ms, mf, fs, ff in rows]),
        "both": mean_sem([ff - ms for ms, _, _, ff in rows]),
    }


def _draw(config: Config, record: Results) -> Any:
    from matplotlib.figure import Figure

    results = record["units"]
    runs = by_arm(config, config.arms, results)
    paper = AS_THE_PAPER if set(AS_THE_PAPER) <= set(runs) else tuple(runs)
    panels = [("right after each pruning", "before", paper), ("after the training", "after", paper)]
    if set(CROSSED) <= set(runs):
        panels.append(("after the training, scorer × optimizer", "after", CROSSED))
    figure = Figure(figsize=(5.4 * len(panels), 4.6), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    x = [1 / (1 - s) for s in config.sparsities]
    for axis, (title, when, arms) in zip(axes, panels, strict=True):
        for arm in (arm for arm in arms if arm in runs):
            rows = [[row[when] for row in seed["rows"]] for seed in runs[arm]]
            label = f"{arm}, nothing removed" if arm == CONTROL else arm
            band(axis, x, rows, label, color=COLOURS[arm], marker="o", markersize=3)
        axis.axhline(results["dense"]["curve"][-1]["accuracy"], color="grey", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_xticks(x, [f"{100 * s:.1f}" for s in config.sparsities])
        axis.minorticks_off()
        axis.set(title=title, xlabel="sparsity, % (log scale of 1/kept)", ylabel="test accuracy, %")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    seeds = f"{len(config.seeds)} seed{'s' * (len(config.seeds) > 1)}"
    fewer = {arm: len(found) for arm, found in runs.items() if len(found) != len(config.seeds)}
    seeds += "".join(f", {arm}: {count}" for arm, count in fewer.items())
    figure.suptitle(
        f"ResNet18, width {config.width}, {config.dataset}{particulars(config)}, {seeds}; grey: dense"
    )
    return figure


def particulars(config: Config) -> str:
    """The differences of a configuration from the usual one, for a title."""
    usual = Config(dataset=config.dataset)
    found = [
        "the paper's hyperparameters" * (config.preset == "paper"),
        f"OBS from {config.obs_samples} gradients" * (config.obs_samples < usual.obs_samples),
        "dense model stopped early" * (config.dense_rate == "constant"),
    ]
    return "".join(f", {words}" for words in found if words)


run = Experiment(NAME, "global", "sparsities", "arms", summary, _draw).run
