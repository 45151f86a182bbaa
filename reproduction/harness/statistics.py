"""Means, errors and ranks, and numbers in the form that result files and messages have them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def plain(value: Any) -> Any:
    """The value as JSON: six significant digits, None for what is not finite, strings as keys."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def duration(seconds: float) -> str:
    """Seconds in a form for people: 12 s, 3 min."""
    return f"{seconds:.3g} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def mean(values: Iterable[float | None]) -> float:
    """The mean. It is infinite if there is no value, or if one is None because its run diverged."""
    found = list(values)
    return statistics.fmean(v for v in found if v is not None) if found and None not in found else math.inf


def sem(values: Iterable[float | None]) -> float:
    """The standard error of the mean; 0 for a single value."""
    found = [v for v in values if v is not None]
    return statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0


def mean_sem(values: Iterable[float | None]) -> dict[str, float]:
    """Mean and standard error, for a summary."""
    found = list(values)
    return {"mean": mean(found), "sem": sem(found)}


def columns(rows: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
    """Transpose: from one row per seed to one column per checkpoint."""
    return [list(column) for column in zip(*rows, strict=True)]


def spaced(last: int, count: int) -> list[int]:
    """About `count` whole numbers from 1 to `last`, evenly spaced on a logarithmic scale."""
    return sorted({round(last ** (i / (count - 1))) for i in range(count)})


def steps_to(goal: float, gaps: Sequence[float | None], at: Sequence[int] | None = None) -> float:
    """The first step from which on the gap is at most `goal`; `at` are the steps at which it was measured."""
    places = list(at or range(1, len(gaps) + 1))
    found = math.inf
    for t, gap in zip(reversed(places), reversed(gaps), strict=True):
        if gap is None or not gap <= goal:
            break
        found = float(t)
    return found


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's rank correlation; 0 if all values of one side are equal."""
    ranks = torch.stack([_ranks(x), _ranks(y)])
    if bool((ranks == ranks[:, :1]).all(1).any()):
        return 0.0
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: Tensor) -> Tensor:
    """Ranks; equal values share the average of theirs."""
    _, inverse, counts = values.double().unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0).double() - (counts - 1) / 2)[inverse]
