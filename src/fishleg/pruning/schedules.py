"""TODO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from fishleg.pruning.masks import SPARSE
from fishleg.pruning.patterns import Pattern


def schedule(kind: str, target: float, steps: int, *, start: float = 0.0) -> list[float]:
    """The sparsity after each of `steps` pruning steps, ending exactly at `target`.

    exponential (the paper's): the kept fraction shrinks by the same factor each step; cubic: fast first,
    slow last (Zhu and Gupta); linear; one-shot: a single step.
    """
    start, target = plain(start), plain(target)
    if not 0 <= start < target < 1:
        raise ValueError(f"sparsities must satisfy 0 <= start < target < 1, got {start} and {target}")
    if steps < 1:
        raise ValueError(f"a schedule needs at least 1 step, got {steps}")
    fractions = [(i + 1) / steps for i in range(steps)]
    if kind == "one-shot":
        return [target]
    if kind == "exponential":
        return [*(1 - (1 - start) * ((1 - target) / (1 - start)) ** f for f in fractions[:-1]), target]
    if kind == "cubic":
        return [*(target + (start - target) * (1 - f) ** 3 for f in fractions[:-1]), target]
    if kind == "linear":
        return [*(start + (target - start) * f for f in fractions[:-1]), target]
    raise ValueError(f"schedule must be exponential, cubic, linear or one-shot, got {kind!r}")


def check_sparsities(values: list[float]) -> list[float]:
    """An explicit list of sparsities, which must rise strictly within (0, 1)."""
    if not values:
        raise ValueError("a schedule needs at least one sparsity, got an empty list")
    found = [as_sparsity(value) for value in values]
    for i, value in enumerate(found):
        if i and value <= found[i - 1]:
            raise ValueError(f"sparsities must rise, got {found[i - 1]} before {value}")
    return found


def as_sparsity(value: object) -> float:
    """A number in (0, 1), whoever has made it; anything else is an error."""
    number = plain(value)
    if isinstance(number, bool) or not isinstance(number, Real) or not 0 < float(number) < 1:
        raise ValueError(f"sparsity must be in (0, 1), got {number!r}")
    return float(number)


def plain(value: Any) -> Any:
    """Python's own numbers and lists in place of NumPy's and torch's."""
    return value.tolist() if hasattr(value, "tolist") else value


# At least this fraction of the weights survives each stage, unless stages are given; and of whole rows, where
# nothing is trained in between: a quadratic model holds for few of them at a time.
_SHRINK, _SHRINK_ROWS = 0.75, 0.95


def plan_schedule(
    sparsity: object, pattern: Pattern, mode: str, stages: int | None, kind: str, *, start: float = 0.0
) -> list[float]:
    """The sparsity after each stage, with the defaults of `prune`, for a model that is `start` sparse."""
    sparsity = plain(sparsity)
    if isinstance(sparsity, Sequence) and not isinstance(sparsity, str):
        if stages is not None or mode == "one-shot":
            raise ValueError("a list of sparsities is the schedule itself: leave out stages and one-shot")
        return check_sparsities(list(sparsity))
    if sparsity is None:
        sparsity = 0.9 if pattern.limit == 1 else pattern.limit
    sparsity = as_sparsity(sparsity)
    if not SPARSE < start < sparsity:
        start = 0.0
    if mode == "one-shot":
        if stages not in (None, 1) or kind not in ("exponential", "one-shot"):
            given = f"kind={kind!r}" if stages in (None, 1) else f"stages={stages}"
            raise ValueError(f"mode='one-shot' is a single stage, got {given}")
        return schedule("one-shot", sparsity, 1)
    if stages is None:
        kept = _SHRINK_ROWS if pattern.whole_rows and mode == "staged" else _SHRINK
        stages = max(1, math.ceil(math.log((1 - sparsity) / (1 - start)) / math.log(kept) - 1e-9))
    return schedule(kind, sparsity, stages, start=start)
