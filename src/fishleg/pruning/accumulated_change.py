"""All pruning steps together: how far the outputs have moved, and how far Q had predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fishleg.pruning import diagnostics
from fishleg.pruning.events import PruneStep
from fishleg.pruning.output_change import OutputChange
from fishleg.runtime.process_group import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class TotalChange:
    """What several pruning steps did together.

    Args:
        predicted: The sum of the predicted loss increases; None where Q does not predict, or where the model
            is trained between the steps.
        measured: The KL divergence of the outputs from those before the first of these steps; None if it was
            not measured.
        steps: How many steps these are.
        verdict: The text of the warning that this gives rise to; None: there is none.
    """

    predicted: float | None
    measured: float | None
    steps: int
    verdict: str | None


class AccumulatedChange:
    """Judges all pruning steps together: many small steps, each as predicted, may add up to a large change.

    Training between two steps changes the outputs, too. A model that is trained in between is therefore not
    judged here: only each step by itself is. If someone changes the model between two steps unannounced,
    judging begins anew.

    Args:
        output_change: Measures the outputs.
        judged: Whether the steps are judged: Q predicts, and the model is not trained in between.
        at_end: Whether they are judged by `total` at the end alone, and not after each step.
    """

    def __init__(self, output_change: OutputChange, judged: bool, *, at_end: bool = False) -> None:
        self.output_change, self.judged, self.at_end = output_change, judged, at_end
        self._reference: list[Tensor] | None = None  # the outputs before the first of these steps
        self._last: list[Tensor] | None = None  # those after the last one
        self._first = 0  # the place of the first of these steps in the history
        self._told = False
        self._refresh_harmed = False

    def start(self) -> None:
        """Take the outputs of the model before the first step."""
        if self.judged and self._reference is None:
            self._reference = self.output_change.outputs()

    def before_step(self, before: list[Tensor], done: int) -> None:
        """Begin anew if the model was changed since the last step.

        Args:
            before: The outputs before the step.
            done: The number of steps in the history.
        """
        if not self.judged:
            return
        last = self._last
        changed = last is not None and last is not before and not _equal(last, before)
        if self._reference is None or changed:
            self._reference, self._first = before, done
            self._told = self._refresh_harmed = False

    def after_step(self, history: Sequence[PruneStep], sparsity: float, *, refresh_harmed: bool) -> None:
        """Remember the outputs after a step. Unless it is done at the end, judge all steps, and warn once.

        Args:
            history: All steps, with the one that was just done.
            sparsity: The sparsity now.
            refresh_harmed: Whether the refresh of BatchNorm has made the outputs much worse.
        """
        if not self.judged:
            return
        self._last = self.output_change.outputs()
        self._refresh_harmed |= refresh_harmed
        if not self.at_end:
            self.warn(self.total(history, sparsity))

    def warn(self, total: TotalChange) -> None:
        """Log the verdict on several steps, if there is one and it was not logged before.

        One step alone was judged when it was done.

        Args:
            total: What `total` returned.
        """
        if total.verdict is not None and total.steps > 1 and not self._told:
            logger.warning("%s", total.verdict)
            self._told = True

    def total(self, history: Sequence[PruneStep], sparsity: float) -> TotalChange:
        """Return what all steps did together.

        Args:
            history: All steps.
            sparsity: The sparsity now.

        Returns:
            Predicted and measured change, and the verdict.
        """
        steps = history[self._first :]
        if not self.judged:
            return TotalChange(None, None, len(steps), None)
        predicted = [step.predicted for step in steps]
        measured = self.output_change.divergence_from(self._reference or [])
        verdict = diagnostics.judge_total(sparsity, predicted, measured, refresh_harmed=self._refresh_harmed)
        return TotalChange(sum(predicted), measured, len(steps), verdict)

    def state_dict(self) -> dict[str, Any]:
        """Return which steps are judged, and what was told; the outputs are those of the dense model."""
        return {"first": self._first, "told": self._told, "refresh_harmed": self._refresh_harmed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: The saved state.
        """
        if state["first"] != self._first:
            self._reference = None  # the outputs that judging began with are not known
        self._first, self._told = state["first"], state["told"]
        self._refresh_harmed, self._last = state["refresh_harmed"], None


def _equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
