"""The README's tables of the pruning benchmarks, from their results: no number there is typed by hand.

`python benchmarks/tables.py README.md` fills what stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fishleg.checkpoint import write_atomically
from fishleg.paper.tables import markdown, renew

RESULTS = Path(__file__).parent / "results"
METHODS = {"fishleg": "FLS", "obert": "oBERT", "mfac": "M-FAC", "kfac": "KFAC", "ekfac": "EKFAC"}
PUBLISHED = {("obert", "sum"), ("mfac", "sum")}


def oneshot(results: list[dict[str, Any]]) -> str:
    """Accuracy by sparsity, mean over the seeds; time and memory are those of the largest seed."""
    found: dict[str, list[tuple[dict[str, Any], list[float]]]] = {}
    for r in results:
        for compensation, rows in r["runs"].items():
            published = " (published)" if (r["method"], compensation) in PUBLISHED else ""
            name = f"{METHODS.get(r['method'], r['method'])}, {compensation}{published}, {r['mode']}"
            found.setdefault(name, []).append((r, [row["accuracy"] for row in rows]))
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
    return markdown(head, table)


def gradual(results: list[dict[str, Any]]) -> str:
    """Accuracy after fine-tuning, by sparsity."""
    curves = {r["method"]: {row["sparsity"]: row["after"] for row in r["rows"]} for r in results}
    levels = [s for s, after in curves["FLS + FishLeg"].items() if after is not None]
    head = ["CIFAR-10 test accuracy, %", *(f"{100 * s:g} %" for s in levels), "CPU min"]
    rows = []
    for r in results:
        if levels[0] in curves[r["method"]]:
            cells = [f"{curves[r['method']][s]:.2f}" for s in levels]
            rows.append([r["method"], *cells, f"{r['cpu_seconds'] / 60:.0f}"])
    return markdown(head, rows)


def minilm(results: list[dict[str, Any]]) -> str:
    """Spearman's correlation by sparsity, and the KL to dense at 50 % (not staged); means over the seeds."""
    levels = sorted({row["sparsity"] for r in results for row in r["rows"]} - {0.3, 0.75, 0.85})
    table = []
    for method in dict.fromkeys(r["method"] for r in results):
        seeds = [r for r in results if r["method"] == method]
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
    return markdown(["STS-B test Spearman", *head], table)


def tables() -> dict[str, str]:
    """Every table by name, as Markdown."""
    makers = {"resnet20_oneshot": oneshot, "resnet20_gradual": gradual, "minilm_oneshot": minilm}
    return {
        name: make(json.loads((RESULTS / f"{name}.json").read_text("utf-8"))) for name, make in makers.items()
    }


def main() -> None:
    document = Path(sys.argv[1])
    write_atomically(document, renew(document.read_text("utf-8"), tables()).encode())


if __name__ == "__main__":
    main()
