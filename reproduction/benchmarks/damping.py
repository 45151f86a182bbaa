"""The best damping of each method: one-shot pruning of a trained ResNet20, measured on training images.

Accuracy on 5000 training images at 80 and 90 % (15 CPU minutes). γ is a multiple of the mean diagonal of F.
The default dampings of the library follow from it. The test images are kept for the other benchmarks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reproduction.benchmarks.one_estimate import OneEstimate
from reproduction.benchmarks.resnet20_oneshot import NAMES, make_surgeon
from reproduction.harness import run_benchmark
from reproduction.workloads.datasets import accuracy, cifar10

SPARSITIES = (0.8, 0.9)
DAMPINGS = (0.01, 0.1, 1.0)
COMPENSATION = {"fishleg": "joint", "obert": "sum", "kfac": "joint", "ekfac": "joint"}  # oBERT's as published


def run(unit: dict[str, Any]) -> dict[str, Any]:
    images, labels = (part[40_000:45_000] for part in cifar10("train"))
    method, compensation = unit["method"], COMPENSATION[unit["method"]]
    surgeon = make_surgeon(method, unit["seed"], compensation, relative_damping=unit["damping"])
    estimate, rows = OneEstimate(surgeon), []
    for sparsity in SPARSITIES:
        step = estimate.prune(sparsity)
        rows.append({"sparsity": sparsity, "accuracy": accuracy(surgeon.model, images, labels)})
        rows[-1] |= {"predicted": step.predicted, "measured": step.measured}
    return {"rows": rows}


def main(out: Path, again: bool = False) -> None:
    units = [
        {"method": method, "damping": damping, "seed": 0} for method in COMPENSATION for damping in DAMPINGS
    ]
    results = run_benchmark(out / "damping.json", units, run, again=again)
    print(f"{'training accuracy, %':<24}" + "".join(f"{s:>9.0%}" for s in SPARSITIES))
    for r in results:
        name = f"{NAMES.get(r['method'], r['method'])}, {r['damping']:g}"
        print(f"{name:<24}" + "".join(f"{row['accuracy']:>9.1f}" for row in r["rows"]))
