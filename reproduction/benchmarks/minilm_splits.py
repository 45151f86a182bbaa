"""Is oBERT's lead over FLS on MiniLM at 50 % more than chance? Spearman on all three splits of STS-B.

`FISHLEG_STSB=DIR python benchmarks/minilm_splits.py KEEP` prunes with both as minilm_oneshot.py does
(30 CPU minutes; the pruned models stay in the directory KEEP, and are not made again), and writes
results/minilm_splits.json: the correlations, and the difference of the two with its standard error, from
500 resamples of the pairs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS
from minilm import load_minilm, rank_correlation, similarities
from minilm_oneshot import surgeon_for
from torch import Tensor

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


def compare(split: str, folder: Path) -> dict[str, Any]:
    model, found = load_minilm(), {}
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
        "split": split,
        "pairs": len(scores),
        **correlations,
        "difference": correlations[ahead] - correlations[behind],
        "standard_error": float(torch.tensor(differences).std()),
    }


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    results = []
    for split in SPLITS:
        results.append(compare(split, Path(sys.argv[1])))
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in results[-1].items()}, flush=True)
    (RESULTS / "minilm_splits.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
