"""What the panels share: their problems, their names, the search for a rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from fishleg.inverse.operators import Operator
from reproduction.paper.problems import Problem, exponential

# the factors that the figure on initialisation compares, each with the start that suits it
FACTORS = {"triangular": "I/γ", "square": "I n/Tr(F_γ)"}
SCHEDULES = ("constant", "decayed")
OBERT, OBERT_MORE = "oBERT, 512 gradients", "oBERT, as many gradients as FLS"
FLS, OURS, UNTRAINED = "FLS, paper", "FLS, ours", "Q = I/γ, not trained"
FLS_NEAR = "FLS, paper, rate by the distance to full"  # which prefers a Q that stays near I/γ
FLS_80 = "FLS, paper, at 80 % sparsity"  # of the clock alone
BLOCK_ARMS = (OBERT, OBERT_MORE, FLS, FLS_NEAR, OURS, UNTRAINED)
LOOK = 2  # stages between two looks at the distances, which cost more than the stages
Qs = list[Operator]


def problem_of(settings: dict[str, Any], seed: int, n: int | None = None) -> Problem:
    """The problem of one seed."""
    return Problem(exponential(n or settings["n"], settings["decay length"]), settings["gamma"], seed)


def problems_of(settings: dict[str, Any]) -> list[Problem]:
    """The problems of all seeds."""
    return [problem_of(settings, seed) for seed in range(settings["seeds"])]


def tried_rates(rates: Sequence[float], final: Callable[[float], float]) -> dict[float, float]:
    """What `final` says of each rate; infinite where it diverged."""
    found = {}
    for rate in rates:
        try:
            found[rate] = final(rate)
        except ValueError:  # the library refuses to go on with gradients that are not finite
            found[rate] = math.inf
    return found
