"""Pruning a real sentence encoder without labels and without training.

`FISHLEG_STSB=DIR python benchmarks/minilm_oneshot.py` (DIR holds stsb-en-train.csv and stsb-en-test.csv). The
model is all-MiniLM-L6-v2 (22.7 M parameters); minilm.py says what to install. Pruned are the Linear weights
of its encoder (10.6 M), one shot or in stages; Q is learned from training sentences, without their scores,
under a Gaussian likelihood on the normalised embedding. The score is Spearman's correlation between cosine
similarity and human judgement on the 1379 test pairs.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from harness import RESULTS, Unit, mean, run_units
from minilm import Sentences, load_minilm, read_pairs, spearman
from torch import Tensor

from fishleg import AuxiliaryOptions, Gaussian, PruneStep, Surgeon

SPARSITIES = (0.5, 0.6, 0.7, 0.8)
STAGES = (0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9)
SEEDS = (0, 1)
METHODS: dict[str, dict[str, Any]] = {
    "magnitude, per layer": {"method": "magnitude", "compensation": "none", "pattern": "layer"},
    "magnitude, global": {"method": "magnitude", "compensation": "none"},
    "diagonal": {"method": "diagonal"},
    "oBERT, sum (published)": {"method": "obert", "compensation": "sum"},
    "oBERT, joint": {"method": "obert"},
    "KFAC": {"method": "kfac"},
    "FLS, more damping, without exchanges": {"relative_damping": 0.1, "exchanges": 0},
    "FLS, more damping": {"relative_damping": 0.1},
    "FLS": {},
}
STAGED: dict[str, dict[str, Any]] = {
    "FLS, more damping, without exchanges, staged": {"relative_damping": 0.1, "exchanges": 0}
}
# two seeds where it is close at 50 %
UNITS: list[Unit] = [
    {"method": method, "seed": seed}
    for method in (*METHODS, *STAGED)
    for seed in (SEEDS if method in ("oBERT, joint", "FLS, more damping") else SEEDS[:1])
]
# The bases of 1536 × 1537 matrices are dear to refine: each layer takes its turn at every eighth step.
LEARNING = AuxiliaryOptions(groups=4, warm_start=32, refine_every=8)


def calibration(seed: int, batch_size: int = 64) -> list[dict[str, Tensor]]:
    """Training sentences in shuffled batches, without their scores."""
    sentences = sorted({s for a, b, _ in read_pairs("train") for s in (a, b)})
    batches = Sentences(sentences, batch_size).batches
    random.Random(seed).shuffle(batches)
    return batches


def surgeon_for(method: str, seed: int) -> Surgeon:
    options = {"samples": 256, "auxiliary": LEARNING, **METHODS.get(method, {}), **STAGED.get(method, {})}
    return Surgeon(
        load_minilm(), calibration(seed), Gaussian(), generator=torch.Generator().manual_seed(seed), **options
    )


def run(unit: Unit) -> dict[str, Any]:
    surgeon = surgeon_for(unit["method"], unit["seed"])
    rows = []
    if unit["method"] in STAGED:

        def stage_done(step: PruneStep) -> None:
            rows.append(_row(step, surgeon))

        surgeon.staged(STAGES, stage_done)
        return {"rows": rows}
    dense = {name: value.clone() for name, value in surgeon.model.state_dict().items()}
    inverse = surgeon.estimate()
    for sparsity in SPARSITIES:
        surgeon.model.load_state_dict(dense)
        surgeon.masks = {}
        step = surgeon.prune(sparsity, inverse=inverse)
        rows.append(_row(step, surgeon))
    return {"rows": rows}


def _row(step: PruneStep, surgeon: Surgeon) -> dict[str, Any]:
    row = {"sparsity": step.target, "spearman": spearman(surgeon.model)}
    print(f"   {step.target:.0%}: {row['spearman']:.4f}", flush=True)
    return {**row, "predicted": step.predicted, "measured": step.measured}


def table(results: list[dict[str, Any]], dense: float) -> str:
    grid = (*SPARSITIES, 0.9)
    lines = [
        f"dense {dense:.4f}",
        f"{'method':<46}" + "".join(f"{s:>9.0%}" for s in grid) + "    CPU s    MiB",
    ]
    for r in results:
        found = {row["sparsity"]: row["spearman"] for row in r["rows"]}
        cells = "".join(f"{found[s]:>9.4f}" if s in found else f"{'-':>9}" for s in grid)
        lines.append(
            f"{r['method'] + ', ' + str(r['seed']):<46}{cells}{r['cpu_seconds']:>9.0f}{r['peak_mib']:>7}"
        )
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], dense: float) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for method in dict.fromkeys(r["method"] for r in results):
        seeds = [r["rows"] for r in results if r["method"] == method]
        points = [
            (100 * rows[0]["sparsity"], mean([row["spearman"] for row in rows]))
            for rows in zip(*seeds, strict=True)
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
    figure.savefig(RESULTS / "minilm_oneshot.png", dpi=130)


def main() -> None:
    results = run_units("minilm_oneshot", UNITS, run)
    dense = spearman(load_minilm())
    print(table(results, dense))
    plot(results, dense)


if __name__ == "__main__":
    sys.exit(main())
