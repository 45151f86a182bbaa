"""Which weights go: sparsity patterns.

A pattern turns scores into masks. Scores are per weight for unstructured and N:M patterns and per group for
blocks and rows; every pattern removes exactly the count it was asked for, or says why it cannot.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fishleg.options.declaration import nearest
from fishleg.options.names import PATTERNS

Masks = dict[str, Tensor]


class Pattern(ABC):
    """A rule for what may be removed together; masks are boolean, True = kept."""

    @property
    def group_size(self) -> int | None:
        """Weights per group where runs of inputs are scored together; None where each is scored alone."""
        return None

    @property
    def whole_rows(self) -> bool:
        """Whether the groups are rows (output channels)."""
        return False

    @property
    def within_layers(self) -> bool:
        """Whether each weight tensor keeps a share of its own, whatever the scores of the others are."""
        return False

    @property
    def limit(self) -> float:
        """The largest sparsity that the pattern can reach."""
        return 1.0

    def unsuitable(self, shape: tuple[int, ...]) -> str | None:
        """Why a weight of this shape cannot be pruned with this pattern, or None."""
        return None

    @abstractmethod
    def select(self, scores: Mapping[str, Tensor], sparsity: float, floor: float = 0.0) -> Masks:
        """Masks with the given sparsity over all scores; each tensor keeps at least `floor` of its own.

        Weights that are already removed carry the score −inf and stay removed.
        """


@dataclass(frozen=True)
class Unstructured(Pattern):
    """Single weights, compared over the whole model, or within each layer (`per_layer`)."""

    per_layer: bool = False

    @property
    def within_layers(self) -> bool:
        return self.per_layer

    def select(self, scores: Mapping[str, Tensor], sparsity: float, floor: float = 0.0) -> Masks:
        if self.per_layer:
            return {name: _lowest({name: s}, sparsity, floor)[name] for name, s in scores.items()}
        return _lowest(scores, sparsity, floor)


@dataclass(frozen=True)
class NM(Pattern):
    """At most n of every m consecutive inputs are kept (for each kernel position of a convolution).

    Below its full sparsity, the least important candidates of all groups go first, so that gradual
    schedules work; at (m−n)/m the pattern holds in every group exactly.
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        if not 0 < self.n < self.m:
            raise ValueError(f"an N:M pattern needs 0 < N < M, got {self.n}:{self.m}")

    @property
    def limit(self) -> float:
        return (self.m - self.n) / self.m

    def unsuitable(self, shape: tuple[int, ...]) -> str | None:
        inputs = shape[1]
        return f"{inputs} inputs are not a multiple of {self.m}" if inputs % self.m else None

    def select(self, scores: Mapping[str, Tensor], sparsity: float, floor: float = 0.0) -> Masks:
        candidates = {}
        for name, s in scores.items():
            grouped = s.movedim(1, -1)
            folded = grouped.reshape(-1, self.m)
            rank = folded.argsort(dim=-1, stable=True).argsort(dim=-1)
            allowed = torch.where(rank < self.m - self.n, folded, torch.full_like(folded, math.inf))
            candidates[name] = allowed.reshape(grouped.shape).movedim(-1, 1)
        return _lowest(candidates, sparsity, floor)


@dataclass(frozen=True)
class Blocks(Pattern):
    """Runs of `size` consecutive inputs of a row, removed together."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ValueError(f"a block needs at least 2 weights, got {self.size}")

    @property
    def group_size(self) -> int:
        return self.size

    def unsuitable(self, shape: tuple[int, ...]) -> str | None:
        return f"{shape[1]} inputs are not a multiple of {self.size}" if shape[1] % self.size else None

    def select(self, scores: Mapping[str, Tensor], sparsity: float, floor: float = 0.0) -> Masks:
        return _lowest(scores, sparsity, floor)


@dataclass(frozen=True)
class Rows(Pattern):
    """Whole output channels (rows of the weight matrix, with their bias)."""

    @property
    def whole_rows(self) -> bool:
        return True

    def select(self, scores: Mapping[str, Tensor], sparsity: float, floor: float = 0.0) -> Masks:
        return _lowest(scores, sparsity, floor)


def as_pattern(pattern: Pattern | str) -> Pattern:
    """Return a pattern from its name.

    >>> as_pattern("2:4")
    NM(n=2, m=4)

    Args:
        pattern: A pattern, or "global", "layer", "N:M" (for instance "2:4"), "block:SIZE", "rows", or a name
            that was registered, with an argument after a colon if it takes one.

    Returns:
        The pattern.

    Raises:
        ValueError: The name is unknown, or its argument is wrong.
    """
    if isinstance(pattern, Pattern):
        return pattern
    if match := re.fullmatch(r"(\d+):(\d+)", pattern):
        return NM(int(match[1]), int(match[2]))
    name, _, argument = pattern.partition(":")
    if name in _MAKERS:
        return _MAKERS[name](argument)
    known = ", ".join(PATTERNS)
    raise ValueError(
        f"pattern must be one of {known} (N:M such as 2:4), got {pattern!r}{_pattern_hint(pattern)}"
    )


def register_pattern(name: str, make: Callable[[str], Pattern]) -> None:
    """Add a pattern, to be selected by `PruningOptions(pattern=name)`.

    Args:
        name: The name of the pattern, without a colon.
        make: Returns the pattern from the text after the colon, which is empty where there is none.

    Raises:
        ValueError: There is a pattern of that name already, or the name has a colon.
    """
    if ":" in name:
        raise ValueError(f"the name of a pattern must not have a colon, got {name!r}")
    PATTERNS.add(name)
    _MAKERS[name] = make


def _pattern_hint(pattern: str) -> str:
    swapped = ":".join(reversed(pattern.split(":")))
    if re.fullmatch(r"[1-9]\d*:[1-9]\d*", swapped) and swapped != pattern:
        return f"; did you mean {swapped!r}?"
    return nearest(pattern, ("global", "layer", "rows", "block:4"))


def _make_block(argument: str) -> Pattern:
    if not argument.isdigit():
        raise ValueError(f"pattern block:SIZE needs a whole number, got {argument!r}")
    return Blocks(int(argument))


def _without_argument(pattern: Pattern) -> Callable[[str], Pattern]:
    def make(argument: str) -> Pattern:
        if argument:
            raise ValueError(f"this pattern takes nothing after a colon, got {argument!r}")
        return pattern

    return make


_MAKERS: dict[str, Callable[[str], Pattern]] = {
    "global": _without_argument(Unstructured()),
    "unstructured": _without_argument(Unstructured()),
    "layer": _without_argument(Unstructured(per_layer=True)),
    "rows": _without_argument(Rows()),
    "block": _make_block,
}


def _lowest(scores: Mapping[str, Tensor], sparsity: float, floor: float) -> Masks:
    """Masks that remove exactly round(sparsity · N) entries: the lowest, but `floor` of each tensor stays."""
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity must be in [0, 1), got {sparsity}")
    total = sum(s.numel() for s in scores.values())
    count = round(sparsity * total)
    where = f" in {next(iter(scores))!r}" if len(scores) == 1 else ""
    protected = {}
    for name, s in scores.items():
        keep = min(s.numel(), max(1, math.ceil(floor * s.numel())))
        best = s.flatten().topk(keep).indices
        guarded = s.flatten().clone()
        guarded[best] = math.inf
        protected[name] = torch.where(s.flatten() == -math.inf, -math.inf, guarded)
    flat = torch.cat([s.double().cpu() for s in protected.values()])
    available = int((flat < math.inf).sum())
    if count > available:
        raise ValueError(
            f"cannot remove {count} of {total}{where} (sparsity {sparsity:.4f}): the pattern and the floor "
            f"leave {available} that may go, so at most {available / total:.4f} is possible"
        )
    gone = int((flat == -math.inf).sum())
    if count < gone:
        raise ValueError(
            f"cannot remove {count} of {total}{where} (sparsity {sparsity:.4f}): {gone} are removed already"
        )
    removed = torch.zeros(total, dtype=torch.bool)
    removed[flat.argsort(stable=True)[:count]] = True
    masks = {}
    for (name, s), part in zip(
        scores.items(), removed.split([s.numel() for s in scores.values()]), strict=True
    ):
        masks[name] = ~part.view(s.shape).to(s.device)
    return masks
