"""Tables of the pruning benchmarks; NAME-short has fewer rows and no costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reproduction.benchmarks import shown
from reproduction.benchmarks.minilm_oneshot import SPARSITIES, STAGES, by_method
from reproduction.benchmarks.resnet20_gradual import mean_curves
from reproduction.benchmarks.resnet20_ladder import ARMS
from reproduction.benchmarks.resnet20_oneshot import NAMES
from reproduction.harness import markdown

Table = tuple[list[str], list[list[str]]]
PUBLISHED = {("obert", "sum"), ("mfac", "sum")}
SHORT = {
    "magnitude, none, one-shot",
    "oBERT, sum (published), one-shot",
    "M-FAC, sum (published), one-shot",
    "EKFAC, joint, one-shot",
    "FLS, joint, one-shot",
    "FLS, joint, staged",
    "magnitude, global",
    "diagonal",
    "oBERT, sum (published)",
    "oBERT, joint",
    "KFAC",
    "FLS",
}
COSTS = {"seeds", "CPU s", "MiB", "CPU min"}


def oneshot(results: list[dict[str, Any]]) -> Table:
    """Accuracy by sparsity, mean over the seeds; time and memory are those of the largest seed."""
    found: dict[str, list[tuple[dict[str, Any], list[float]]]] = {}
    for r in results:
        for compensation, rows in r["runs"].items():
            published = " (published)" if (r["method"], compensation) in PUBLISHED else ""
            name = f"{NAMES.get(r['method'], r['method'])}, {compensation}{published}, {r['mode']}"
            found.setdefault(shown(name), []).append((r, [row["accuracy"] for row in rows]))
    first = next(iter(results[0]["runs"].values()))
    head = [
        "CIFAR-10 test accuracy, %",
        *(f"{row['sparsity']:.0%}" for row in first),
        "seeds",
        "CPU s",
        "MiB",
    ]
    table = []
    for name, seeds in found.items():
        columns = zip(*(values for _, values in seeds), strict=True)
        cost = max(r["pruning_cpu_seconds"] for r, _ in seeds), max(r["peak_mib"] for r, _ in seeds)
        cells = [f"{sum(column) / len(column):.1f}" for column in columns]
        table.append([name, *cells, str(len(seeds)), f"{cost[0]:.0f}", str(cost[1])])
    return head, table


def gradual(results: list[dict[str, Any]]) -> Table:
    """Accuracy after fine-tuning, by sparsity, mean over the seeds; the time is that of the longest."""
    curves = mean_curves(results)
    levels = list(curves["FLS + FishLeg"])
    head = ["CIFAR-10 test accuracy, %", *(f"{100 * s:g} %" for s in levels), "seeds", "CPU min"]
    rows = []
    for name, curve in curves.items():
        seconds = [r["cpu_seconds"] for r in results if r["method"] == name]
        cells = [f"{curve[s]:.2f}" for s in levels]
        rows.append([name, *cells, str(len(seconds)), f"{max(seconds) / 60:.0f}"])
    return head, rows


def minilm(results: list[dict[str, Any]]) -> Table:
    """Spearman's correlation by sparsity, and the KL to dense at 50 % (not staged); means over the seeds."""
    levels = [*SPARSITIES, STAGES[-1]]
    table = []
    for method, seeds in by_method(results).items():
        found = [{row["sparsity"]: row for row in r["rows"]} for r in seeds]
        kept = [s for s in levels if s in found[0]]
        means = {s: sum(rows[s]["spearman"] for rows in found) / len(found) for s in kept}
        divergence = sum(rows[0.5]["measured"] for rows in found) / len(found)
        cells = [f"{means[s]:.4f}" if s in means else "" for s in levels]
        cost = max(r["cpu_seconds"] for r in seeds), max(r["peak_mib"] for r in seeds)
        table.append(
            [
                method,
                *cells,
                "" if "staged" in method else f"{divergence:.3f}",
                str(len(seeds)),
                f"{cost[0]:.0f}",
                str(cost[1]),
            ]
        )
    head = [*(f"{s:.0%}" for s in levels), "KL at 50%", "seeds", "CPU s", "MiB"]
    return ["STS-B test Spearman", *head], table


def removed_rows(results: list[dict[str, Any]]) -> Table:
    """Accuracy by share of rows removed; what is left of the parameters in the end, and the speed."""
    head = [f"{result['sparsity']:.0%}" for result in results[0]["results"]]
    table = [
        [
            r["rows"],
            r["method"],
            *(f"{result['accuracy']:.1f}" for result in r["results"]),
            f"{r['results'][-1]['parameters']:.0%}",
            f"{r['results'][-1]['speed']:.2f}",
        ]
        for r in results
    ]
    return ["rows", "test accuracy, %", *head, "parameters when cut", "speed, times dense"], table


def ladder(results: list[dict[str, Any]]) -> Table:
    """Validation accuracy by sparsity of every arm, at the best of the dampings that it was tried with."""
    names = [arm for arm in ARMS if any(r["arm"] == arm for r in results)]
    table = []
    for name in names:
        trials = [r for r in results if r["arm"] == name]
        best = max(trials, key=lambda r: sum(r["accuracy"].values()))
        cells = [f"{value:.1f}" for value in best["accuracy"].values()]
        cost = f"{best['pruning_cpu_seconds']:.0f}"
        table.append([name, *cells, f"{best['damping']:g}", str(len(trials)), cost])
    head = [f"{float(s):.0%}" for s in results[0]["accuracy"]]
    return ["accuracy on validation images, %", *head, "damping", "trials", "CPU s"], table


def shortened(head: list[str], rows: list[list[str]]) -> Table:
    """The rows that are compared most, all of them if none has such a name; what it cost is left out."""
    shown = [row for row in rows if row[0] in SHORT] or rows
    columns = [i for i, name in enumerate(head) if name not in COSTS and any(row[i] for row in shown)]
    return [head[i] for i in columns], [[row[i] for i in columns] for row in shown]


def benchmark_tables(results: Path) -> dict[str, str]:
    """Every table by name, as Markdown."""
    makers = {
        "resnet20_oneshot": oneshot,
        "resnet20_gradual": gradual,
        "resnet20_ladder": ladder,
        "resnet20_rows": removed_rows,
        "minilm_oneshot": minilm,
    }
    found = {}
    for name, make in makers.items():
        head, rows = make(json.loads((results / f"{name}.json").read_text("utf-8")))
        found[name], found[f"{name}-short"] = markdown(head, rows), markdown(*shortened(head, rows))
    return found
