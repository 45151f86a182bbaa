"""Gradual pruning of a trained ResNet20 to 98 %: scorers and optimizers crossed, same data order for all.

20 to 35 CPU minutes per method. Ten pruning steps on a nearly exponential schedule, with half an epoch (196
steps of 128 images) after each; the learning rate falls to zero within each. The 2:4 pattern has one step and
two epochs of distillation. Accuracy is measured on all 10 000 test images.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from fishleg import FineTuningOptions, PruningOptions, PruningSession
from fishleg.pruning import Pruned, StageDone
from fishleg.workloads.digits import Batches
from reproduction.harness import run_benchmark, save_picture
from reproduction.workloads.datasets import cifar10
from reproduction.workloads.resnet20 import test_accuracy, trained_resnet20

SCHEDULE = (0.32, 0.54, 0.68, 0.79, 0.855, 0.9, 0.93, 0.95, 0.967, 0.98)
REPORTED = (0.79, 0.9, 0.95, 0.98)
STEPS = 196
# name → (options of the pruning, options of the fine-tuning)
# the accuracy at 98 % counts, so the training at lower sparsities is rough
FISHLEG: dict[str, Any] = {"optimizer": "fishleg", "regain": 0.4}
SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 0.05}
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "FLS + FishLeg": ({}, FISHLEG),
    "FLS + SGD": ({}, SGD),
    "magnitude + SGD": ({"method": "magnitude", "compensation": "none"}, SGD),
    "M-FAC + SGD": ({"method": "mfac", "compensation": "sum"}, SGD),
    "oBERT + SGD": ({"method": "obert", "compensation": "sum"}, SGD),
    "magnitude + FishLeg": ({"method": "magnitude", "compensation": "none"}, FISHLEG),
}
# right after pruning it is nearly as good as dense: the dense outputs then teach more than labels
DISTILLED: dict[str, Any] = {"optimizer": "sgd", "lr": 0.01, "distill": True, "epochs": 2}
TWO_OF_FOUR = "FLS + SGD, distilled, 2:4"
SHOWN_FROM = 0.79
SEEDS = (0,)


def run(unit: dict[str, Any]) -> dict[str, Any]:
    two_of_four = unit["method"] == TWO_OF_FOUR
    surgery, tuning = ({}, DISTILLED) if two_of_four else METHODS[unit["method"]]
    targets, pattern = ((0.5,), "2:4") if two_of_four else (SCHEDULE, "global")
    images, labels = cifar10("train")
    model = trained_resnet20()
    tuning = tuning if two_of_four else {"steps": STEPS, **tuning}
    session = PruningSession(
        model,
        Batches(images, labels, 128, seed=100 + unit["seed"], augmented=True),
        options=PruningOptions(**surgery, samples=192, pattern=pattern),
        fine_tuning=FineTuningOptions(**tuning),
        train_loader=Batches(images, labels, 128, seed=unit["seed"], augmented=True),
        generator=torch.Generator().manual_seed(unit["seed"]),
    )
    rows: list[dict[str, Any]] = []
    for event in session.run(targets):
        if isinstance(event, Pruned):
            step = event.step
            before = test_accuracy(model) if step.target in (*REPORTED, 0.5) else None
            rows.append({"sparsity": step.target, "before": before, "after": None})
            rows[-1] |= {"predicted": step.predicted, "measured": step.measured}
        elif isinstance(event, StageDone):
            if event.step.target >= SHOWN_FROM or event.step.target == 0.5:
                rows[-1]["after"] = test_accuracy(model)
            print(f"   {event.step.target:.1%}: {rows[-1]['before']} -> {rows[-1]['after']} %", flush=True)
    return {"rows": rows}


def units(names: Sequence[str]) -> list[dict[str, Any]]:
    return [{"method": name, "seed": seed} for name in names for seed in SEEDS]


def table(results: list[dict[str, Any]], dense: float) -> str:
    heads = "".join(f"{s:>18.0%}" for s in REPORTED)
    lines = [f"dense {dense:.2f} %; accuracy right after pruning -> after fine-tuning"]
    lines.append(f"{'method, seed':<38}{heads}{'CPU min':>9}")
    for r in results:
        rows = {row["sparsity"]: row for row in r["rows"]}
        cells = [f"{rows[s]['before']:.1f} -> {rows[s]['after']:.2f}" if s in rows else "" for s in REPORTED]
        name = f"{r['method']}, {r['seed']}"
        lines.append(f"{name:<38}{''.join(f'{c:>18}' for c in cells)}{r['cpu_seconds'] / 60:>9.0f}")
        if r["method"] == TWO_OF_FOUR:
            lines[-1] += f"   2:4: {r['rows'][-1]['before']:.1f} -> {r['rows'][-1]['after']:.2f}"
    return "\n".join(lines)


def mean_curves(results: list[dict[str, Any]]) -> dict[str, dict[float, float]]:
    """Accuracy after the training by method and sparsity, the mean over its seeds; without 2:4."""
    found: dict[str, dict[float, list[float]]] = {}
    for r in results:
        if r["method"] != TWO_OF_FOUR:
            curve = found.setdefault(r["method"], {})
            for row in r["rows"]:
                if row["after"] is not None:
                    curve.setdefault(row["sparsity"], []).append(row["after"])
    return {name: {s: fmean(values) for s, values in curve.items()} for name, curve in found.items()}


def draw(results: list[dict[str, Any]], dense: float) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axis = figure.subplots()
    for name, curve in mean_curves(results).items():
        style: dict[str, Any] = {"linestyle": "--"}
        if name.startswith("FLS + FishLeg"):
            style = {"linewidth": 2.5, "color": "tab:blue", "linestyle": "-"}
        at = [1 / (1 - s) for s in curve]
        axis.plot(at, list(curve.values()), marker="o", markersize=3, label=name, **style)
    axis.axhline(dense, color="grey", linewidth=0.8)
    axis.set_xscale("log")
    ticks = [s for s in SCHEDULE if s >= SHOWN_FROM]
    axis.set_xticks([1 / (1 - s) for s in ticks], [f"{100 * s:.1f}".removesuffix(".0") for s in ticks])
    axis.minorticks_off()
    axis.set(xlabel="sparsity, % (log scale of 1/kept)", ylabel="CIFAR-10 test accuracy, %")
    axis.set_title(f"ResNet20, gradual pruning, {STEPS} steps (half an epoch) after each pruning")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8)
    return figure


def main(out: Path, again: bool = False, only: str | None = None) -> None:
    names = [only] if only else [*METHODS, TWO_OF_FOUR]
    results = run_benchmark(out / "resnet20_gradual.json", units(names), run, again=again)
    dense = test_accuracy(trained_resnet20())
    print(table(results, dense))
    if not only:
        save_picture(draw(results, dense), out / "resnet20_gradual.png")
