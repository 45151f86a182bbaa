"""Tables of the experiments with ResNet18: accuracies, and what they cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reproduction.figures.resnet18.config import ARMS, REPORTED
from reproduction.harness import Cell, markdown

Parts = tuple[str, float, list[float]]  # a dense model, its training, and what starts from it: CPU seconds


def cost(results: Path) -> str:
    """Core-hours of every experiment with ResNet18, and the hours of two cores for all of a dataset.

    A dense model from which several experiments start is counted once. Where the CPU seconds of a part were
    not recorded, its seconds by the clock are used, which are never less.
    """
    rows: list[list[Cell]] = []
    for dataset, experiments in REPORTED.items():
        known: list[Parts] = []
        total = 0.0
        for name, config in experiments:
            path = results / f"{name}-{config}.json"
            if not path.exists():
                continue
            units = json.loads(path.read_text("utf-8"))["units"]
            dense = units.pop("dense")
            training = sum(epoch.get("cpu_seconds", 0.0) for epoch in dense["curve"])
            spent = [unit.get("cpu_seconds", unit.get("seconds", 0.0)) for unit in units.values()]
            core = sum(spent) + (0.0 if dense["weights"] in {key for key, _, _ in known} else training)
            known.append((dense["weights"], training, spent))
            total += core
            rows.append([f"`{name} --config {config}`", str(len(units) + 1), _hours(core), ""])
        if known:
            rows.append([f"all of {dataset}", "", _hours(total), _hours(makespan(known))])
    return markdown(["experiment", "parts", "core-hours", "hours on two cores"], rows)


def makespan(experiments: Sequence[Parts]) -> float:
    """The time at which two processes are done that take parts from opposite ends (resnet18/all_runs.py).

    Each takes the next part of the first experiment, in its order, that has any left. The process that comes
    first trains the dense model of an experiment, and the other waits for it.
    """
    left, trained, clocks = [list(parts) for _, _, parts in experiments], dict[str, float](), [0.0, 0.0]
    while any(left):
        worker = clocks.index(min(clocks))
        order = range(len(left)) if worker == 0 else reversed(range(len(left)))
        chosen = next(i for i in order if left[i])
        dense, training, _ = experiments[chosen]
        if dense in trained:
            clocks[worker] = max(clocks[worker], trained[dense]) + left[chosen].pop(0)
        else:
            clocks[worker] += training
            trained[dense] = clocks[worker]
    return max(clocks)


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.2f}"


def relative_cost(results: Path) -> str:
    """CPU seconds of each arm, by those of magnitude + SGD on the same dataset."""
    found: dict[str, dict[str, float]] = {}
    for dataset in ("cifar10", "tiny-imagenet"):
        units = json.loads((results / f"unstructured-{dataset}.json").read_text("utf-8"))["units"]
        spent: dict[str, list[float]] = {}
        for key, unit in units.items():
            if "cpu_seconds" in unit:
                spent.setdefault(key.partition(", seed")[0], []).append(unit["cpu_seconds"])
        found[dataset] = {arm: sum(seconds) / len(seconds) for arm, seconds in spent.items()}
    rows: list[list[Cell]] = []
    for arm in ARMS:
        ratios = [by_arm.get(arm, 0.0) / by_arm.get(ARMS[0], 1.0) for by_arm in found.values()]
        rows.append([arm, *(f"{ratio:.1f}" if ratio else None for ratio in ratios)])
    return markdown(["CPU time / magnitude + SGD", *found], rows)


def resnet18_tables(results: Path) -> dict[str, str]:
    """The tables of every run with ResNet18 that is complete."""
    found: dict[str, str] = {}
    for path in sorted(results.glob("*structured-*.json")):
        record = json.loads(path.read_text("utf-8"))
        if "summary" in record and ".old" not in path.stem:
            make = _unstructured if path.stem.startswith("unstructured") else _semi_structured
            found.update(make(path.stem, record["summary"]))
    return found


def _unstructured(name: str, summary: dict[str, Any]) -> dict[str, str]:
    """Accuracy by arm; what scorer and optimizer bring."""
    levels = list(next(iter(summary["after"].values())))
    crossed = summary.get("crossed_seeds", summary["seeds"])
    fewer = f", of the arms that the paper has not: {crossed}" if crossed != summary["seeds"] else ""
    head = f"test accuracy, % (dense {summary['dense']:.2f}; seeds: {summary['seeds']}{fewer})"
    found = {}
    for key, when in ((name, "after"), (f"{name}-before", "before")):
        seeds = {arm: crossed if arm in ARMS[3:] else summary["seeds"] for arm in summary[when]}
        rows = [
            [arm, *(_points(values[level], seeds[arm] > 1) for level in levels)]
            for arm, values in summary[when].items()
        ]
        found[key] = markdown([head, *levels], rows)
    if "parts" in summary:
        rows = [[part, *(_points(summary["parts"][level][part], crossed > 1) for level in levels)]
                for part in summary["parts"][levels[0]]]  # fmt: skip
        found[f"{name}-parts"] = markdown(["points gained by", *levels], rows)
    return found


def _semi_structured(name: str, summary: dict[str, Any]) -> dict[str, str]:
    """Accuracy by arm on the way to 2:4."""
    levels = list(next(iter(summary["after"].values())))
    titles = {"before": "pruned", "after": "trained"}
    rows = [
        [
            arm,
            *(
                _points(summary[when][arm][level], summary["seeds"] > 1)
                for level in levels
                for when in titles
            ),
        ]
        for arm in summary["after"]
    ]
    head = f"test accuracy, % (dense {summary['dense']:.2f}; seeds: {summary['seeds']})"
    shown = [*levels[:-1], "2:4"]
    return {
        name: markdown([head, *(f"{level}, {title}" for level in shown for title in titles.values())], rows)
    }


def _points(value: dict[str, Any], several: bool) -> str:
    """Percentage points to two places; the error where there are several seeds."""
    if value["mean"] is None:
        return "diverged"
    return f"{value['mean']:.2f}" + (f" ± {value['sem']:.2f}" if several else "")
