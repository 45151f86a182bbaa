"""Is the lead of oBERT over FLS on MiniLM at 50 % more than chance? Spearman on all three splits of STS-B.

Prunes with both methods as the benchmark minilm-oneshot does (30 CPU minutes). The pruned models are kept in
a directory and are not made again. A row has the correlations, and the difference of the two methods with its
standard error from 500 resamples of the pairs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reproduction.benchmarks.minilm_oneshot import surgeon_for
from reproduction.harness import rank_correlation, run_benchmark
from reproduction.workloads.minilm import load_minilm, similarities

SPARSITY, SPLITS, RESAMPLES = 0.5, ("test", "dev", "train"), 500
METHODS = {"oBERT, joint": "oBERT", "FLS": "FLS"}  # and the Q of each


def pruned_state(method: str, folder: Path) -> dict[str, Tensor]:
    path = folder / f"{method}-{SPARSITY}.pt"
    if not path.exists():
        surgeon = surgeon_for(METHODS[method], seed=0)
        surgeon.prune(SPARSITY)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(surgeon.model.state_dict(), path)
    state: dict[str, Tensor] = torch.load(path, weights_only=True)
    return state


def run(unit: dict[str, Any], folder: Path) -> dict[str, Any]:
    split, model, found = unit["split"], load_minilm(), {}
    found["dense"], scores = similarities(model, split)
    for method in METHODS:
        model.load_state_dict(pruned_state(method, folder))
        found[method], _ = similarities(model, split)
    generator, differences = torch.Generator().manual_seed(0), []
    for _ in range(RESAMPLES):
        drawn = torch.randint(len(scores), (len(scores),), generator=generator)
        values = [rank_correlation(found[method][drawn], scores[drawn]) for method in METHODS]
        differences.append(values[0] - values[1])
    correlations = {name: rank_correlation(cosines, scores) for name, cosines in found.items()}
    ahead, behind = METHODS
    return {
        "pairs": len(scores),
        **correlations,
        "difference": correlations[ahead] - correlations[behind],
        "standard_error": float(torch.tensor(differences).std()),
    }


def main(out: Path, keep: Path, again: bool = False) -> None:
    units = [{"split": split} for split in SPLITS]
    for row in run_benchmark(out / "minilm_splits.json", units, run, keep, again=again):
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
