"""Which sparsity comes next: a fixed schedule, or a search for the largest sparsity within a drop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_MOST_TRIALS = 12  # rejected sparsities of a search


@dataclass
class Plan:
    """Which sparsity comes next. A fixed list, or for `max_drop` a search that learns from each result.

    Search: stages go up the usual schedule until one drops too much. Between the last good sparsity and that
    one, Q's predicted losses say where the limit should be; that sparsity is tried and the interval shrinks
    until it is narrower than `precision`. What a long step could not reach, a short one may: the rejected
    sparsity is then tried once more from there, and if it is good now, stages go up again.
    """

    targets: list[float]
    max_drop: float | None = None
    precision: float = 0.005
    done: int = 0  # stages that were accepted
    good: float = 0.0  # the last accepted sparsity
    bad: float | None = None  # the least one that was rejected
    trials: int = 0
    finished: bool = False
    drops: list[tuple[float, float]] = field(default_factory=list)  # (sparsity, drop) of every result

    @property
    def stages(self) -> int | None:
        """How many there will be; nobody knows in a search."""
        return len(self.targets) if self.max_drop is None else None

    @property
    def fraction(self) -> float:
        """How much is done, roughly."""
        return self.done / max(len(self.targets), self.done + 1)

    def next(self, predict: Callable[[float], float]) -> float | None:
        """The sparsity to go to from the last accepted one; None when all is done.

        `predict(sparsity)` is Q's loss increase from the model as it is now, at the last accepted sparsity.
        """
        if self.finished:
            return None
        if self.bad is None:
            return next((target for target in self.targets if target > self.good), None)
        return self.bad if self.bad - self.good <= self.precision else self._guess(predict)

    def _guess(self, predict: Callable[[float], float]) -> float:
        """Where the drop should reach the limit if it grows in step with Q's predicted loss."""
        assert self.max_drop is not None
        assert self.bad is not None
        drops = dict(self.drops)
        start, end = drops.get(self.good, 0.0), drops[self.bad]
        share = (self.max_drop - start) / max(end - start, 1e-12)
        # the metric is noisy: never trust the guess to the very end of the interval
        wanted = min(max(share, 0.15), 0.85) * predict(self.bad)
        low, high = self.good, self.bad
        for _ in range(8):
            middle = (low + high) / 2
            low, high = (middle, high) if predict(middle) < wanted else (low, middle)
        edge = 0.1 * (self.bad - self.good)
        return min(max(low, self.good + edge), self.bad - edge)

    def result(self, sparsity: float, drop: float) -> bool:
        """Take note of what a stage cost; whether it is accepted."""
        self.drops.append((sparsity, drop))
        if self.max_drop is not None and not drop <= self.max_drop + 1e-9:  # NaN is no success
            last_chance = self.bad is not None and sparsity >= self.bad
            self.bad, self.trials = sparsity, self.trials + 1
            self.finished = last_chance or self.trials >= _MOST_TRIALS
            return False
        if self.bad is not None and sparsity >= self.bad:
            self.bad = None
        self.good, self.done = sparsity, self.done + 1
        return True

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name, value in state.items():
            setattr(self, name, copy.deepcopy(value))
