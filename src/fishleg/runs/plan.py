"""The plan of a run: a fixed list of sparsities, or a search for the largest one within a drop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_MOST_TRIALS = 12  # a search ends after so many rejected sparsities


@dataclass
class Plan:
    """Says which sparsity comes next: from a fixed list, or with `max_drop` from a search.

    The search follows the list until a stage drops the metric by too much. The largest allowed sparsity
    lies between the last accepted and the rejected sparsity. Q's predicted losses say where, and that
    sparsity is tried next. This repeats until the interval is narrower than `precision`. Then the rejected
    sparsity is tried once more if stages were accepted since it was rejected, because a short step may
    succeed where a long one failed. If it does, the search follows the list again.

    Args:
        targets: The sparsity after each stage.
        max_drop: The largest drop of the metric; None: no search.
        precision: The width of the interval at which the search ends.
        done: The number of accepted stages.
        good: The last accepted sparsity.
        bad: The lowest rejected sparsity.
        tried_from: The last accepted sparsity when `bad` was tried.
        trials: The number of rejected sparsities.
        finished: Whether the search has ended.
        drops: Pairs (sparsity, drop) of all results.
    """

    targets: list[float]
    max_drop: float | None = None
    precision: float = 0.005
    done: int = 0
    good: float = 0.0
    bad: float | None = None
    tried_from: float = 0.0
    trials: int = 0
    finished: bool = False
    drops: list[tuple[float, float]] = field(default_factory=list)

    @property
    def stages(self) -> int | None:
        """The number of stages; None in a search, where it is unknown."""
        return len(self.targets) if self.max_drop is None else None

    @property
    def fraction(self) -> float:
        """The finished fraction of the run, roughly."""
        return self.done / max(len(self.targets), self.done + 1)

    def next(self, predict: Callable[[float], float]) -> float | None:
        """Return the sparsity of the next stage.

        Args:
            predict: Returns the loss increase that Q predicts for a sparsity. It starts from the present
                model, which is at the last accepted sparsity.

        Returns:
            The sparsity, or None if the plan is finished.
        """
        if self.finished:
            return None
        if self.bad is None:
            return next((target for target in self.targets if target > self.good), None)
        if self.bad - self.good > self.precision:
            return self._guess(predict)
        return self.bad if self.good > self.tried_from else None

    def _guess(self, predict: Callable[[float], float]) -> float:
        """Return the sparsity at which the drop reaches its limit if it is proportional to Q's prediction."""
        assert self.max_drop is not None
        assert self.bad is not None
        drops = dict(self.drops)
        start, end = drops.get(self.good, 0.0), drops[self.bad]
        share = (self.max_drop - start) / max(end - start, 1e-12)
        # the metric is noisy: keep the guess away from the ends of the interval
        wanted = min(max(share, 0.15), 0.85) * predict(self.bad)
        low, high = self.good, self.bad
        for _ in range(8):
            middle = (low + high) / 2
            low, high = (middle, high) if predict(middle) < wanted else (low, middle)
        edge = 0.1 * (self.bad - self.good)
        return min(max(low, self.good + edge), self.bad - edge)

    def result(self, sparsity: float, drop: float) -> bool:
        """Record the drop of a stage, and decide whether the stage is accepted.

        Args:
            sparsity: The sparsity of the stage.
            drop: The drop of the metric from the dense model.

        Returns:
            Whether the stage is accepted.
        """
        self.drops.append((sparsity, drop))
        if self.max_drop is not None and not drop <= self.max_drop + 1e-9:  # NaN is rejected
            last_chance = self.bad is not None and sparsity >= self.bad
            self.bad, self.tried_from, self.trials = sparsity, self.good, self.trials + 1
            self.finished = last_chance or self.trials >= _MOST_TRIALS
            return False
        if self.bad is not None and sparsity >= self.bad:
            self.bad = None
        self.good, self.done = sparsity, self.done + 1
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: The saved state.

        Raises:
            ValueError: It is not the state of a plan.
        """
        kinds: dict[str, type | tuple[type, ...]] = {
            "targets": list, "max_drop": (float, type(None)), "precision": float, "done": int, "good": float,
            "bad": (float, type(None)), "tried_from": float, "trials": int, "finished": bool, "drops": list,
        }  # fmt: skip
        if state.keys() != kinds.keys() or not all(isinstance(state[k], kinds[k]) for k in kinds):
            raise ValueError("the state is not that of a plan")
        for name, value in state.items():
            setattr(self, name, copy.deepcopy(value))
