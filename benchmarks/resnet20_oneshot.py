"""Pruning a trained ResNet20 without labels and without training: every method, one shot and in stages.

`FISHLEG_DATA=DIR FISHLEG_RESNET20=FILE python benchmarks/resnet20_oneshot.py` (about 50 minutes on 2 cores; a
stopped run goes on where it was, `--again` starts over). All conv and linear weights, global scores,
BatchNorm statistics refreshed on training images, accuracy on all 10 000 test images, two seeds of the Fisher
samples. Damping and options were chosen on training images only.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from harness import RESULTS, Unit, mean, run_units, test_accuracy, trained_resnet20

from fishleg import Surgeon
from fishleg.workloads.data import Batches, cifar10

SPARSITIES = (0.7, 0.8, 0.9, 0.95)
STAGES = (0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.84, 0.87, 0.9, 0.925, 0.95)
SEEDS = (0, 1)
# name → options of the Surgeon; one shot from the dense model to each sparsity
ONE_SHOT: dict[str, dict[str, Any]] = {
    "magnitude": {"method": "magnitude", "compensation": "none"},
    "diagonal": {"method": "diagonal"},
    "oBERT, sum of updates (as published)": {"method": "obert", "compensation": "sum"},
    "oBERT": {"method": "obert"},
    "M-FAC, sum of updates (as published)": {"method": "mfac", "compensation": "sum"},
    "M-FAC": {"method": "mfac"},
    "KFAC": {"method": "kfac"},
    "EKFAC": {"method": "ekfac"},
    "FLS, no compensation": {"compensation": "none"},
    "FLS, independent": {"compensation": "independent"},
    "FLS": {},
}
STAGED: dict[str, dict[str, Any]] = {
    "magnitude, staged": {"method": "magnitude", "compensation": "none"},
    "oBERT, staged": {"method": "obert", "samples": 192},
    "M-FAC, staged": {"method": "mfac", "samples": 192},
    "FLS, staged": {"samples": 192},
}


def surgeon_for(method: str, seed: int) -> Surgeon:
    images, labels = cifar10("train")
    loader = Batches(images, labels, 128, seed=100 + seed, augmented=True)
    options = {"samples": 512, **ONE_SHOT.get(method, {}), **STAGED.get(method, {})}
    generator = torch.Generator().manual_seed(seed)
    return Surgeon(trained_resnet20(), [x for x, _ in _some(loader, 100)], generator=generator, **options)


def _some(loader: Batches, count: int) -> list[Any]:
    return [batch for _, batch in zip(range(count), loader, strict=False)]


def run(unit: Unit) -> dict[str, Any]:
    """Accuracy, predicted and measured loss at each sparsity."""
    surgeon = surgeon_for(unit["method"], unit["seed"])
    if unit["method"] in STAGED:
        rows = []
        for sparsity in STAGES:
            step = surgeon.prune(sparsity)
            rows.append(_row(step, test_accuracy(surgeon.model)))
            print(f"   {sparsity:.1%}: {rows[-1]['accuracy']:.2f} %", flush=True)
        return {"rows": rows}
    dense = {name: value.clone() for name, value in surgeon.model.state_dict().items()}
    inverse = surgeon.estimate()
    rows = []
    for sparsity in SPARSITIES:
        surgeon.model.load_state_dict(dense)
        surgeon.masks = {}
        step = surgeon.prune(sparsity, inverse=inverse)
        rows.append(_row(step, test_accuracy(surgeon.model)))
        print(f"   {sparsity:.1%}: {rows[-1]['accuracy']:.2f} %", flush=True)
    return {"rows": rows}


def _row(step: Any, accuracy: float) -> dict[str, float]:
    return {
        "sparsity": step.target,
        "accuracy": accuracy,
        "predicted": step.predicted,
        "measured": step.measured,
    }


def table(results: list[dict[str, Any]], dense: float) -> str:
    heads = "".join(f"{s:>9.0%}" for s in SPARSITIES)
    lines = [f"dense {dense:.2f} %", f"{'method':<40}{heads}{'CPU s':>9}{'MiB':>7}"]
    for method in [*ONE_SHOT, *STAGED]:
        own = [r for r in results if r["method"] == method]
        if own:
            cells = "".join(f"{mean(_at(own, s)):>9.2f}" for s in SPARSITIES)
            cpu, peak = mean([r["cpu_seconds"] for r in own]), max(r["peak_mib"] for r in own)
            lines.append(f"{method:<40}{cells}{cpu:>9.0f}{peak:>7}")
    return "\n".join(lines)


def _at(results: list[dict[str, Any]], sparsity: float) -> list[float]:
    return [row["accuracy"] for r in results for row in r["rows"] if row["sparsity"] == sparsity]


def plot(results: list[dict[str, Any]], dense: float) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, methods, title in (
        (axes[0], ONE_SHOT, "one shot"),
        (axes[1], STAGED, "in stages"),
    ):
        for method in methods:
            own = [r for r in results if r["method"] == method]
            if own:
                grid = [row["sparsity"] for row in own[0]["rows"]]
                style = {"linewidth": 2.5, "color": "tab:red"} if method in ("FLS", "FLS, staged") else {}
                values = [mean(_at(own, s)) for s in grid]
                axis.plot([100 * s for s in grid], values, marker="o", markersize=3, label=method, **style)
        axis.axhline(dense, color="grey", linewidth=0.8, linestyle="--")
        axis.set(title=f"ResNet20, {title}, no training", xlabel="sparsity, %")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=7, loc="lower left")
    axes[0].set_ylabel("CIFAR-10 test accuracy, %")
    figure.savefig(RESULTS / "resnet20_oneshot.png", dpi=130)


def main() -> None:
    units = [{"method": m, "seed": seed} for seed in SEEDS for m in [*STAGED, *ONE_SHOT]]
    results = run_units("resnet20_oneshot", units, run)
    dense = test_accuracy(trained_resnet20())
    print(table(results, dense))
    plot(results, dense)


if __name__ == "__main__":
    sys.exit(main())
