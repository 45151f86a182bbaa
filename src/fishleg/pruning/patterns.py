"""Sparsity patterns: a pattern turns scores into masks.

Unstructured and N:M patterns score single weights; blocks and rows score groups of weights. Every pattern
removes exactly the requested number of weights or groups, or raises an error that says why it cannot.
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
    """A rule that says which weights may be removed together. Masks are boolean, True = kept."""

    @property
    def group_size(self) -> int | None:
        """The number of consecutive inputs that are scored together; None: each weight is scored alone."""
        return None

    @property
    def whole_rows(self) -> bool:
        """Whether whole rows (output channels) are removed."""
        return False

    @property
    def within_layers(self) -> bool:
        """Whether each weight tensor gets the same sparsity, so that tensors are not compared."""
        return False

    @property
    def limit(self) -> float:
        """The largest sparsity that the pattern can reach."""
        return 1.0

    def unsuitable(self, shape: tuple[int, ...]) -> str | None:
        """Return why a weight of this shape cannot be pruned with this pattern.

        Args:
            shape: The shape of the weight, (n_out, n_in, ...).

        Returns:
            The reason, or None if the weight can be pruned.
        """
        return None

    @abstractmethod
    def select(self, scores: Mapping[str, Tensor], sparsity: float, floor: float = 0.0) -> Masks:
        """Return masks that remove the lowest scores.

        Args:
            scores: Scores by weight name, of the shape [n_out, n_in, ...] of the weight, or one score per
                group or row. The score −inf marks what is removed already and stays removed.
            sparsity: The fraction of all scores to remove.
            floor: The fraction of its own scores that each tensor keeps at least.

        Returns:
            Masks of the shapes of the scores, by weight name; True = kept.

        Raises:
            ValueError: Pattern and floor do not allow this sparsity.
        """


@dataclass(frozen=True)
class Unstructured(Pattern):
    """Single weights are removed.

    Args:
        per_layer: Whether each layer gets the same sparsity; otherwise weights are compared over the whole
            model.
    """

    per_layer: bool = False

    @property
    def within_layers(self) -> bool:
        """Whether each layer gets the same sparsity."""
        return self.per_layer

    def select(self, scores: Mapping[str, Tensor], sparsity: float, floor: float = 0.0) -> Masks:
        """Return masks that remove the lowest scores of the model, or of each layer."""
        if self.per_layer:
            return {name: _lowest({name: s}, sparsity, floor)[name] for name, s in scores.items()}
        return _lowest(scores, sparsity, floor)


@dataclass(frozen=True)
class NM(Pattern):
    """At most n of every m consecutive inputs are kept, separately at each kernel position of a convolution.

    At a sparsity of (m−n)/m the pattern holds in every group. A smaller sparsity removes the lowest scores
    of all groups first, m−n in each group at most. So the sparsity can rise in stages.

    Args:
        n: The number of weights that a group keeps at most.
        m: The number of consecutive inputs in a group.

    Raises:
        ValueError: 0 < n < m does not hold.
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        if not 0 < self.n < self.m:
            hint = f"; did you mean '{self.m}:{self.n}'?" if 0 < self.m < self.n else ""
            raise ValueError(f"an N:M pattern needs 0 < N < M, got {self.n}:{self.m}{hint}")

    @property
    def limit(self) -> float:
        """The sparsity (m−n)/m, at which the pattern holds in every group."""
        return (self.m - self.n) / self.m

    def unsuitable(self, shape: tuple[int, ...]) -> str | None:
        """Return why the inputs cannot be divided into groups of m, or None."""
        inputs = shape[1]
        return f"{inputs} inputs are not a multiple of {self.m}" if inputs % self.m else None

    def select(self, scores: Mapping[str, Tensor], sparsity: float, floor: float = 0.0) -> Masks:
        """Return masks that remove the lowest scores, at most m−n in each group."""
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
    """Groups of consecutive inputs of a row are removed together.

    Args:
        size: The number of weights in a group.

    Raises:
        ValueError: The size is below 2.
    """

    size: int

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ValueError(f"a block needs at least 2 weights, got {self.size}")

    @property
    def group_size(self) -> int:
        """The number of weights in a group."""
        return self.size

    def unsuitable(self, shape: tuple[int, ...]) -> str | None:
        """Return why the inputs cannot be divided into groups of this size, or None."""
        return f"{shape[1]} inputs are not a multiple of {self.size}" if shape[1] % self.size else None

    def select(self, scores: Mapping[str, Tensor], sparsity: float, floor: float = 0.0) -> Masks:
        """Return masks that remove the groups with the lowest scores."""
        return _lowest(scores, sparsity, floor)


@dataclass(frozen=True)
class Rows(Pattern):
    """Whole output channels are removed: rows of the weight matrix with their bias."""

    @property
    def whole_rows(self) -> bool:
        """Whole rows are removed."""
        return True

    def select(self, scores: Mapping[str, Tensor], sparsity: float, floor: float = 0.0) -> Masks:
        """Return masks that remove the rows with the lowest scores."""
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
    if name in PATTERNS:
        made: Pattern = PATTERNS.find(name)(argument)
        return made
    known = ", ".join(PATTERNS)
    raise ValueError(
        f"pattern must be N:M (such as 2:4) or one of {known} (block:SIZE), got {pattern!r}"
        + nearest(pattern, ("global", "layer", "rows", "block:4"))
    )


def register_pattern(name: str, make: Callable[[str], Pattern]) -> None:
    """Add a pattern, to be selected by `PruningOptions(pattern=name)`.

    Args:
        name: The name of the pattern, without a colon.
        make: Returns the pattern. Its argument is the text after the colon, or "" without a colon.

    Raises:
        ValueError: There is already a pattern of this name, or the name contains a colon.
    """
    if ":" in name:
        raise ValueError(f"the name of a pattern must not contain a colon, got {name!r}")
    PATTERNS.add(name, make)


def make_global(argument: str) -> Pattern:
    """Return the pattern `global`.

    Args:
        argument: The text after the colon; there must be none.

    Returns:
        Single weights, compared over the whole model.
    """
    return _without_argument(Unstructured(), argument)


def make_layer(argument: str) -> Pattern:
    """Return the pattern `layer`.

    Args:
        argument: The text after the colon; there must be none.

    Returns:
        Single weights, compared within each layer.
    """
    return _without_argument(Unstructured(per_layer=True), argument)


def make_rows(argument: str) -> Pattern:
    """Return the pattern `rows`.

    Args:
        argument: The text after the colon; there must be none.

    Returns:
        Whole rows.
    """
    return _without_argument(Rows(), argument)


def make_blocks(argument: str) -> Pattern:
    """Return the pattern `block:SIZE`.

    Args:
        argument: The size of the blocks as text.

    Returns:
        Blocks of neighbouring inputs.

    Raises:
        ValueError: The size is no whole number.
    """
    if not argument.isdigit():
        raise ValueError(f"pattern block:SIZE needs a whole number, got {argument!r}")
    return Blocks(int(argument))


def _without_argument(pattern: Pattern, argument: str) -> Pattern:
    if argument:
        raise ValueError(f"this pattern takes no argument after a colon, got {argument!r}")
    return pattern


def _lowest(scores: Mapping[str, Tensor], sparsity: float, floor: float) -> Masks:
    """Return masks that remove the round(sparsity · N) lowest of all N scores.

    Each tensor keeps its highest scores: the share `floor` of them, and at least one.

    Raises:
        ValueError: The sparsity is not in [0, 1), too much is protected, or more is removed already.
    """
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
            f"cannot remove {count} of {total}{where} (sparsity {sparsity:.4f}): pattern and floor allow "
            f"{available} to be removed, a sparsity of at most {available / total:.4f}"
        )
    before = int((flat == -math.inf).sum())
    if count < before:
        raise ValueError(
            f"cannot remove {count} of {total}{where} (sparsity {sparsity:.4f}): {before} are removed already"
        )
    removed = torch.zeros(total, dtype=torch.bool)
    removed[flat.argsort(stable=True)[:count]] = True
    masks = {}
    for (name, s), part in zip(
        scores.items(), removed.split([s.numel() for s in scores.values()]), strict=True
    ):
        masks[name] = ~part.view(s.shape).to(s.device)
    return masks
