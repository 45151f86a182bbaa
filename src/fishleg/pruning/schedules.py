"""How the sparsity rises from stage to stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from fishleg.options.declaration import as_share
from fishleg.options.names import SCHEDULES
from fishleg.pruning.masks import SPARSE
from fishleg.pruning.patterns import Pattern

_DEFAULT_SPARSITY = 0.9
# At least this fraction of the weights survives each stage, unless the number of stages is given. For whole
# rows without training it is larger: a quadratic model holds for few of them at a time.
_KEPT_PER_STAGE, _ROWS_KEPT_PER_STAGE = 0.75, 0.95


def schedule(kind: str, target: float, steps: int, *, start: float = 0.0) -> list[float]:
    """Return the sparsity after each of `steps` pruning steps, ending exactly at `target`.

    >>> [round(s, 3) for s in schedule("exponential", 0.875, 3)]
    [0.5, 0.75, 0.875]

    Args:
        kind: "exponential" (the paper's): the kept fraction shrinks by the same factor each step. "cubic":
            fast first, slow last (Zhu and Gupta). "linear". "one-shot": a single step.
        target: The last sparsity.
        steps: The number of pruning steps.
        start: The sparsity to begin with.

    Returns:
        Rising sparsities.

    Raises:
        ValueError: An argument is out of range or the kind is unknown.
    """
    start, target = as_number(start), as_number(target)
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
    raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, one-shot, got {kind!r}")


def default_sparsity(pattern: Pattern) -> float:
    """Return the sparsity that is meant where none is given.

    Args:
        pattern: What is removed together.

    Returns:
        All that an N:M pattern asks for, else 0.9.
    """
    return _DEFAULT_SPARSITY if pattern.limit == 1 else pattern.limit


def plan_schedule(
    sparsity: object,
    pattern: Pattern,
    mode: str,
    stages: int | None,
    kind: str = "exponential",
    *,
    start: float = 0.0,
) -> list[float]:
    """Return the sparsity after each stage, with the defaults of `prune`.

    Args:
        sparsity: A number, the whole list, or None for the default.
        pattern: What is removed together.
        mode: "staged", "one-shot" or "gradual".
        stages: The number of stages; None: enough that each keeps 75 % (95 % of rows without training).
        kind: The kind of schedule.
        start: The sparsity that the model has already.

    Returns:
        Rising sparsities.

    Raises:
        ValueError: The arguments contradict each other or are out of range.
    """
    sparsity = as_number(sparsity)
    if isinstance(sparsity, Sequence) and not isinstance(sparsity, str):
        if stages is not None or mode == "one-shot":
            raise ValueError("a list of sparsities is the schedule itself: leave out stages and one-shot")
        return check_sparsities(list(sparsity))
    target = as_sparsity(default_sparsity(pattern) if sparsity is None else sparsity)
    if not SPARSE < start < target:
        start = 0.0
    if mode == "one-shot":
        if stages not in (None, 1) or kind != "exponential":
            given = f"schedule={kind!r}" if stages in (None, 1) else f"stages={stages}"
            raise ValueError(f"mode='one-shot' is a single stage, got {given}")
        return schedule("one-shot", target, 1)
    if stages is None:
        kept = _ROWS_KEPT_PER_STAGE if pattern.whole_rows and mode == "staged" else _KEPT_PER_STAGE
        stages = max(1, math.ceil(math.log((1 - target) / (1 - start)) / math.log(kept) - 1e-9))
    return schedule(kind, target, stages, start=start)


def check_sparsities(values: Sequence[float]) -> list[float]:
    """Return an explicit list of sparsities as plain numbers.

    Args:
        values: Numbers in (0, 1) that rise.

    Returns:
        The same as Python floats.

    Raises:
        ValueError: The list is empty or does not rise within (0, 1).
    """
    if not values:
        raise ValueError("a schedule needs at least one sparsity, got an empty list")
    found = [as_sparsity(value) for value in values]
    for i, value in enumerate(found):
        if i and value <= found[i - 1]:
            raise ValueError(f"sparsities must rise, got {found[i - 1]} before {value}")
    return found


def as_sparsity(value: object) -> float:
    """Return a number in (0, 1) as a Python float.

    Args:
        value: A number of Python, NumPy or torch, or a percentage such as `90%`.

    Returns:
        The number.

    Raises:
        ValueError: It is no number in (0, 1).
    """
    number = as_share(as_number(value))
    if isinstance(number, bool) or not isinstance(number, Real) or not 0 < float(number) < 1:
        hint = ""
        if isinstance(number, Real) and 1 < float(number) < 100:
            hint = f"; for {float(number):g} % write {float(number) / 100:g} or '{float(number):g}%'"
        raise ValueError(f"sparsity must be in (0, 1), got {number!r}{hint}")
    return float(number)


def as_number(value: Any) -> Any:
    """Return Python's own numbers and lists in place of NumPy's and torch's.

    Args:
        value: Anything.

    Returns:
        The same, plain.
    """
    return value.tolist() if hasattr(value, "tolist") else value
