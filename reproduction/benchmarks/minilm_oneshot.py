"""A sentence encoder, pruned without labels and without training.

The model is all-MiniLM-L6-v2 (22.7 M parameters). The Linear weights of its encoder (10.6 M) are pruned, in
one shot or in stages. Q is learned from training sentences, without their scores, under a Gaussian likelihood
of the normalised embedding. The score is Spearman's correlation of cosine similarity with human judgement on
the 1379 test pairs of STS-B.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fishleg import AuxiliaryOptions, Gaussian, PruneStep, PruningOptions, Surgeon
from reproduction.benchmarks import shown
from reproduction.benchmarks.one_estimate import OneEstimate
from reproduction.harness import mean, run_benchmark, save_picture
from reproduction.workloads.minilm import Sentences, load_minilm, read_pairs, spearman

SPARSITIES = (0.5, 0.6, 0.7, 0.8)
STAGES = (0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9)
SEEDS = (0, 1)
MORE_DAMPING = {"relative_damping": 0.1}  # the default of all methods but FLS with mask search
# One Q for several rows of the table: the options of its surgeon, and what each row changes in them.
ROWS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "magnitude, per layer": (
        {"method": "magnitude", "compensation": "none", "pattern": "layer"},
        {"magnitude, per layer": {}},
    ),
    "magnitude": ({"method": "magnitude", "compensation": "none"}, {"magnitude, global": {}}),
    "diagonal": ({"method": "diagonal"}, {"diagonal": {}}),
    "oBERT": (
        {"method": "obert"},
        {"oBERT, sum (published)": {"compensation": "sum"}, "oBERT, joint": {}},
    ),
    "KFAC": ({"method": "kfac"}, {"KFAC": {}}),
    "FLS, more damping": (
        MORE_DAMPING,
        {"FLS, more damping, without mask search": {"mask_search_rounds": 0}, "FLS, more damping": {}},
    ),
    "FLS": ({}, {"FLS": {}}),
    "FLS, staged": (
        {**MORE_DAMPING, "mask_search_rounds": 0},
        {"FLS, more damping, without mask search, staged": {}},
    ),
}
# two seeds where methods are close at 50 %
UNITS: list[dict[str, Any]] = [
    {"q": q, "seed": seed}
    for q in ROWS
    for seed in (SEEDS if q in ("oBERT", "FLS, more damping", "FLS") else SEEDS[:1])
]
# The bases of 1536 × 1537 matrices are expensive to refine: each layer is refined at every eighth step.
LEARNING = AuxiliaryOptions(groups=4, warm_start=32, refine_every=8)


def calibration(seed: int, batch_size: int = 64) -> list[dict[str, Tensor]]:
    """Training sentences in shuffled batches, without their scores."""
    sentences = sorted({s for a, b, _ in read_pairs("train") for s in (a, b)})
    batches = Sentences(sentences, batch_size).batches
    random.Random(seed).shuffle(batches)
    return batches


def surgeon_for(q: str, seed: int) -> Surgeon:
    options = {"samples": 256, "auxiliary": LEARNING, **ROWS[q][0]}
    return Surgeon(
        load_minilm(),
        calibration(seed),
        likelihood=Gaussian(),
        options=PruningOptions(**options),
        generator=torch.Generator().manual_seed(seed),
    )


def run(unit: dict[str, Any]) -> dict[str, Any]:
    """The rows of one Q, with the CPU seconds of its estimate and of each pruning."""
    surgeon = surgeon_for(unit["q"], unit["seed"])
    changes = ROWS[unit["q"]][1]
    if unit["q"].endswith("staged"):
        rows = [_row(surgeon.prune(sparsity), surgeon) for sparsity in STAGES]
        return {"runs": dict.fromkeys(changes, rows), "threads": torch.get_num_threads()}
    started = time.process_time()
    estimate = OneEstimate(surgeon)
    seconds, runs = time.process_time() - started, {}
    for name, change in changes.items():
        runs[name] = []
        print(f"   {name}", flush=True)
        for sparsity in SPARSITIES:
            started = time.process_time()
            step = estimate.prune(sparsity, **change)
            spent = round(time.process_time() - started, 1)
            runs[name].append({**_row(step, surgeon), "pruning_cpu_seconds": spent})
    return {
        "runs": runs,
        "estimate_cpu_seconds": round(seconds, 1),
        "threads": torch.get_num_threads(),
    }


def _row(step: PruneStep, surgeon: Surgeon) -> dict[str, Any]:
    row = {"sparsity": step.target, "spearman": spearman(surgeon.model)}
    print(f"   {step.target:.0%}: {row['spearman']:.4f}", flush=True)
    return {**row, "predicted": step.predicted, "measured": step.measured}


def by_method(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The runs of each row of the table, one per seed: rows, CPU seconds and memory of all rows of its Q."""
    found: dict[str, list[dict[str, Any]]] = {}
    for r in results:
        known = {key: r[key] for key in ("seed", "cpu_seconds", "peak_mib")}
        for name, rows in r["runs"].items():
            found.setdefault(shown(name), []).append({"rows": rows, **known})
    return found


def table(results: list[dict[str, Any]], dense: float) -> str:
    grid = (*SPARSITIES, 0.9)
    lines = [
        f"dense {dense:.4f}",
        f"{'method':<46}" + "".join(f"{s:>9.0%}" for s in grid) + "    CPU s    MiB",
    ]
    for method, seeds in by_method(results).items():
        for r in seeds:
            found = {row["sparsity"]: row["spearman"] for row in r["rows"]}
            cells = "".join(f"{found[s]:>9.4f}" if s in found else f"{'-':>9}" for s in grid)
            name = f"{method}, {r['seed']}"
            lines.append(f"{name:<46}{cells}{r['cpu_seconds']:>9.0f}{r['peak_mib']:>7}")
    return "\n".join(lines)


def draw(results: list[dict[str, Any]], dense: float) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for method, seeds in by_method(results).items():
        points = [
            (100 * rows[0]["sparsity"], mean([row["spearman"] for row in rows]))
            for rows in zip(*(r["rows"] for r in seeds), strict=True)
        ]
        style = {"linewidth": 2.5} if method.startswith("FLS") else {"linestyle": "--"}
        axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=method, **style)
    axis.axhline(dense, color="grey", linewidth=0.8)
    axis.set(
        title="MiniLM, no training", xlabel="sparsity of encoder weights, %", ylabel="STS-B test Spearman"
    )
    axis.set_ylim(bottom=0.5)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8)
    return figure


def main(out: Path, again: bool = False) -> None:
    results = run_benchmark(out / "minilm_oneshot.json", UNITS, run, again=again)
    dense = spearman(load_minilm())
    print(table(results, dense))
    save_picture(draw(results, dense), out / "minilm_oneshot.png")
