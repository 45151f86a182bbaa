"""The paper's 2:4 table: ResNet18, two weights of every four, the same arms as in `unstructured`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from fishleg.paper import config as configs
from fishleg.paper.config import Config
from fishleg.paper.harness import (
    Progress,
    Results,
    finish,
    mean_sem,
    need_matplotlib,
    run_units,
    save_picture,
)
from fishleg.paper.resnet18 import Dense, check_device, load_data, units
from fishleg.paper.unstructured import COLOURS, by_arm

NAME = "semi_structured"


def run(
    out: Path,
    *,
    smoke: bool = False,
    progress: Progress = print,
    config: str = "cifar10",
    data: Path | None = None,
    download: bool = False,
    device: str | None = None,
) -> Results:
    """Run what is missing of one configuration; writes `semi_structured-CONFIG.json` and `.png` to `out`."""
    need_matplotlib()
    config = "smoke" if smoke else config
    name, chosen = Path(config).stem, configs.load(config, **({"device": device} if device else {}))
    check_device(chosen)

    @cache
    def dense() -> Dense:
        return Dense(chosen, load_data(chosen, data, progress, download=download), out, progress)

    path = out / f"{NAME}-{name}.json"
    settings = chosen.settings("semi_structured")
    work = units(chosen, dense, chosen.semi_structured_arms, pattern="2:4", sparsities=chosen.semi_structured)
    results = run_units(path, settings, work, progress, needs=dense)
    record = finish(path, settings, results, summary(chosen, results))
    save_picture(_draw(chosen, record["summary"]), path.with_suffix(".png"), smoke=smoke)
    return record


def summary(config: Config, results: Results) -> Results:
    """Accuracy at 2:4 by arm, right after the last pruning and after its training."""
    found: Results = {"dense": results["dense"]["curve"][-1]["accuracy"], "seeds": len(config.seeds)}
    for when in ("before", "after"):
        found[when] = {
            arm: mean_sem([seed["rows"][-1][when] for seed in seeds])
            for arm, seeds in by_arm(config, config.semi_structured_arms, results).items()
        }
    return found


def _draw(config: Config, found: Results) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 3.4), layout="constrained")
    axis = figure.subplots()
    arms = list(found["after"])
    for when, shade in (("after", 1.0), ("before", 0.35)):
        values = [found[when][arm] for arm in arms]
        axis.barh(
            arms, [v["mean"] for v in values], xerr=[v["sem"] for v in values], alpha=shade,
            color=[COLOURS[arm] for arm in arms], height=0.7 if when == "after" else 0.35,
            label=f"{when} the last training",
        )  # fmt: skip
    axis.axvline(found["dense"], color="grey", linewidth=0.8)
    lowest = min(found["before"][arm]["mean"] for arm in arms)
    axis.set_xlim(max(0, min(lowest, found["dense"]) - 5), None)
    axis.invert_yaxis()
    axis.set(xlabel="test accuracy, % (narrow bars: before the last training; grey: dense)")
    axis.set_title(f"2:4, ResNet18, width {config.width}, {config.dataset}, seeds: {len(config.seeds)}")
    return figure
