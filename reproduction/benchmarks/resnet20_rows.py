"""Whole filters of a trained ResNet20: removed without labels and without training, and cut out.

55 CPU minutes, one seed. Each stage keeps 95 % of the rows. The rows are those of all convolutions (half of
these are added to a shortcut and cannot be cut out one by one), or those of the first convolution of each
block, which can be cut out. Accuracy is measured on all 10 000 test images. The speed is that of the smaller
model relative to the dense one: medians of turns in one process.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fishleg import shrink
from fishleg.pruning.schedules import plan_schedule
from reproduction.benchmarks.resnet20_oneshot import make_surgeon
from reproduction.harness import mean, run_benchmark
from reproduction.workloads.resnet20 import test_accuracy, trained_resnet20

TARGETS = (0.1, 0.2, 0.3, 0.4, 0.5)
INNER = [r"layer\d\.\d\.conv1"]
METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "magnitude": ("magnitude", "none", {}),
    "FLS, damping 0.1": ("fishleg", "joint", {"relative_damping": 0.1}),
    "FLS, damping 0.3": ("fishleg", "joint", {"relative_damping": 0.3}),
    "FLS, damping 1": ("fishleg", "joint", {"relative_damping": 1.0}),
}
UNITS: list[dict[str, Any]] = [
    {"method": method, "rows": rows, "seed": 0}
    for rows, methods in (("all", METHODS), ("first of each block", ("magnitude", "FLS, damping 0.3")))
    for method in methods
]


def run(unit: dict[str, Any]) -> dict[str, Any]:
    method, compensation, options = METHODS[unit["method"]]
    options = {"pattern": "rows", "include": () if unit["rows"] == "all" else INNER, **options}
    surgeon = make_surgeon(method, unit["seed"], compensation, **options)
    model, dense, batch = surgeon.model, trained_resnet20(), next(iter(surgeon.loader))
    total = sum(p.numel() for p in dense.parameters())
    found: list[dict[str, Any]] = []

    targets: list[float] = []
    for target in TARGETS:
        start = targets[-1] if targets else 0.0
        targets += plan_schedule(target, surgeon.pattern, "staged", None, "exponential", start=start)
    for target in targets:
        step = surgeon.prune(target)
        if round(target, 9) not in TARGETS:
            continue
        small = shrink(model, batch)
        found.append(
            {
                "sparsity": step.sparsity, "accuracy": test_accuracy(model),
                "predicted": step.predicted, "measured": step.measured,
                "parameters": sum(p.numel() for p in small.parameters()) / total,
                "speed": speed(dense, small, batch),
            }
        )  # fmt: skip
        print("  ", found[-1], flush=True)
    return {"results": found}


@torch.no_grad()
def speed(dense: nn.Module, small: nn.Module, batch: Tensor, rounds: int = 15) -> float:
    """How many times as fast the smaller model is."""
    times: dict[nn.Module, list[float]] = {dense: [], small: []}
    for _ in range(rounds):
        for model, seen in times.items():
            started = time.perf_counter()
            model(batch)
            seen.append(time.perf_counter() - started)
    slow, fast = (sorted(seen)[rounds // 2] for seen in times.values())
    return slow / fast


def table(results: list[dict[str, Any]]) -> str:
    head = "".join(f"{t:>8.0%}" for t in TARGETS)
    lines = [f"{'rows':<20} {'method':<20}{head}  parameters left when cut, speed"]
    for rows, method in dict.fromkeys((r["rows"], r["method"]) for r in results):
        seeds = [r["results"] for r in results if (r["rows"], r["method"]) == (rows, method)]
        cells = [mean([s[i]["accuracy"] for s in seeds]) for i in range(len(TARGETS))]
        left, fast = (mean([s[-1][key] for s in seeds]) for key in ("parameters", "speed"))
        shown = "".join(f"{c:>8.2f}" for c in cells)
        lines.append(f"{rows:<20} {method:<20}{shown}  {left:.0%}, {fast:.2f}")
    return "\n".join(lines)


def main(out: Path, again: bool = False) -> None:
    print(table(run_benchmark(out / "resnet20_rows.json", UNITS, run, again=again)))
