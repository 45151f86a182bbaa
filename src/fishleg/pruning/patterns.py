"""Which weights go: sparsity patterns and schedules.

A pattern turns scores into masks. Scores are per weight for unstructured and N:M patterns and per group for
blocks and rows; every pattern removes exactly the count it was asked for, or says why it cannot.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """A pattern from its name: "global", "layer", "2:4" (any N:M), "block:4" (any size), "rows"."""
    if isinstance(pattern, Pattern):
        return pattern
    if pattern in ("global", "unstructured"):
        return Unstructured()
    if pattern == "layer":
        return Unstructured(per_layer=True)
    if pattern == "rows":
        return Rows()
    if match := re.fullmatch(r"(\d+):(\d+)", pattern):
        return NM(int(match[1]), int(match[2]))
    if match := re.fullmatch(r"block:(\d+)", pattern):
        return Blocks(int(match[1]))
    raise ValueError(f"pattern must be global, layer, N:M (such as 2:4), block:SIZE or rows, got {pattern!r}")


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
