"""A trained ResNet20, pruned without labels and training: every method in one shot, FLS also in stages.

35 CPU minutes. All convolutional and linear weights, global scores, BatchNorm statistics refreshed on
training images, accuracy on all 10 000 test images, two seeds of the Fisher samples. Damping and options are
the defaults of the library. Times do not include the evaluation on the test images.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from fishleg import PruneStep, PruningOptions, Surgeon
from fishleg.workloads.digits import Batches
from reproduction.benchmarks import shown
from reproduction.benchmarks.one_estimate import OneEstimate
from reproduction.harness import mean, run_benchmark, save_picture
from reproduction.workloads.datasets import cifar10
from reproduction.workloads.resnet20 import test_accuracy, trained_resnet20

SPARSITIES = (0.7, 0.8, 0.9, 0.95)
# steps shrink as the quadratic model gets worse
STAGES = (0.5, 0.7, 0.8, 0.86, 0.9, 0.92, 0.936, 0.95)
SEEDS = (0, 1)
NAMES = {"fishleg": "FLS", "obert": "oBERT", "mfac": "M-FAC", "kfac": "KFAC", "ekfac": "EKFAC"}
NO_MASK_SEARCH = "joint without mask search"
# method → compensations, one Q for all of them; `sum` is the published update of oBERT and M-FAC
ONE_SHOT = {
    "magnitude": ("none",),
    "diagonal": ("joint",),
    "obert": ("sum", "joint"),
    "mfac": ("sum", "joint"),
    "kfac": ("joint",),
    "ekfac": ("joint",),
    "fishleg": ("none", "independent", NO_MASK_SEARCH, "joint"),
}
STAGED = {"fishleg": "joint"}


class Watch:
    """Wall and CPU seconds of the pruning alone."""

    def __init__(self) -> None:
        self.seconds = self.cpu_seconds = 0.0

    def __enter__(self) -> None:
        self.started = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self.started[0]
        self.cpu_seconds += time.process_time() - self.started[1]


def make_surgeon(method: str, seed: int, compensation: str, **options: Any) -> Surgeon:
    images, labels = cifar10("train")
    loader = Batches(images, labels, 128, seed=100 + seed, augmented=True)
    batches = [x for _, (x, _) in zip(range(100), loader, strict=False)]  # inputs only
    generator = torch.Generator().manual_seed(seed)
    chosen = {"method": method, "compensation": compensation, **options}
    return Surgeon(trained_resnet20(), batches, options=PruningOptions(**chosen), generator=generator)


def run(unit: dict[str, Any]) -> dict[str, Any]:
    """Accuracy, predicted and measured loss at each sparsity, for each compensation."""
    watch, runs = Watch(), {}
    if unit["mode"] == "staged":
        surgeon = make_surgeon(unit["method"], unit["seed"], STAGED[unit["method"]])
        rows = []
        for sparsity in STAGES:
            with watch:
                step = surgeon.prune(sparsity)
            if sparsity in SPARSITIES:
                rows.append(_row(step, surgeon))
        runs[STAGED[unit["method"]]] = rows
    else:
        surgeon = make_surgeon(unit["method"], unit["seed"], ONE_SHOT[unit["method"]][-1])
        with watch:
            estimate = OneEstimate(surgeon)
        for name in ONE_SHOT[unit["method"]]:
            changes: dict[str, Any] = {"compensation": name}
            if name == NO_MASK_SEARCH:
                changes = {"compensation": "joint", "mask_search_rounds": 0}
            rows = []
            for sparsity in SPARSITIES:
                with watch:
                    step = estimate.prune(sparsity, **changes)
                rows.append(_row(step, surgeon))
            runs[name] = rows
    return {
        "runs": runs,
        "pruning_seconds": round(watch.seconds, 1),
        "pruning_cpu_seconds": round(watch.cpu_seconds, 1),
        "threads": torch.get_num_threads(),
    }


def _row(step: PruneStep, surgeon: Surgeon) -> dict[str, Any]:
    row = {"sparsity": step.target, "accuracy": test_accuracy(surgeon.model)}
    print(f"   {step.target:.0%}: {row['accuracy']:.2f} %", flush=True)
    return {**row, "predicted": step.predicted, "measured": step.measured}


def curves(results: list[dict[str, Any]]) -> dict[str, dict[float, list[float]]]:
    """{name: {sparsity: accuracies over the seeds}}"""
    found: dict[str, dict[float, list[float]]] = {}
    for r in results:
        for compensation, rows in r["runs"].items():
            name = shown(f"{NAMES.get(r['method'], r['method'])}, {compensation}, {r['mode']}")
            for row in rows:
                found.setdefault(name, {}).setdefault(row["sparsity"], []).append(row["accuracy"])
    return found


def table(results: list[dict[str, Any]], dense: float) -> str:
    lines = [f"dense {dense:.2f} %; mean over seeds (largest distance between two seeds)"]
    lines.append(f"{'method, compensation, mode':<42}" + "".join(f"{s:>14.0%}" for s in SPARSITIES))
    for name, curve in curves(results).items():
        cells = "".join(f"{mean(v):>8.2f} ({max(v) - min(v):.1f})" for v in curve.values())
        lines.append(f"{name:<42}{cells}")
    lines.append("\nCPU seconds of pruning and peak memory in MiB:")
    for r in results:
        name = f"{NAMES.get(r['method'], r['method'])}, {r['mode']}, seed {r['seed']}"
        lines.append(f"{name:<42}{r['pruning_cpu_seconds']:>8.0f}{r['peak_mib']:>8}")
    lines.append(f"\npredicted loss increase of FLS (seed 0): {', '.join(ONE_SHOT['fishleg'])}")
    for r in results:
        if r["method"] == "fishleg" and r["mode"] == "one-shot" and r["seed"] == 0:
            for rows in zip(*r["runs"].values(), strict=True):
                values = "  ".join(f"{row['predicted']:.4g}" for row in rows)
                lines.append(
                    f"   {rows[0]['sparsity']:.0%}: {values}   (joint, measured: {rows[-1]['measured']:.4g})"
                )
    return "\n".join(lines)


def draw(results: list[dict[str, Any]], dense: float) -> Any:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    axis.set_prop_cycle(color=[colormaps["tab20"](i) for i in range(20)])  # more lines than default colours
    for name, curve in curves(results).items():
        style = {"linewidth": 2.5} if name.startswith("FLS, joint") else {"linestyle": "--"}
        values = [mean(v) for v in curve.values()]
        axis.plot([100 * s for s in curve], values, marker="o", markersize=3, label=name, **style)
    axis.axhline(dense, color="grey", linewidth=0.8)
    axis.set(title="ResNet20 pruned without labels or training", xlabel="sparsity, %")
    axis.set_ylabel("CIFAR-10 test accuracy, %")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=7, loc="lower left")
    return figure


def main(out: Path, again: bool = False) -> None:
    modes = [("staged", "fishleg"), *(("one-shot", method) for method in ONE_SHOT)]
    units = [{"mode": mode, "method": method, "seed": seed} for seed in SEEDS for mode, method in modes]
    results = run_benchmark(out / "resnet20_oneshot.json", units, run, again=again)
    dense = test_accuracy(trained_resnet20())
    print(table(results, dense))
    save_picture(draw(results, dense), out / "resnet20_oneshot.png")
