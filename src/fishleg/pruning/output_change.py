"""How far a model's outputs have moved: the loss increase of a pruning step, measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.curvature.likelihoods import Likelihood
from fishleg.inverse.estimators.problem import LOADER
from fishleg.runtime.batch_errors import naming_the_batch
from fishleg.runtime.batches import Forward, move_batch, targets_of
from fishleg.runtime.loaders import cycle
from fishleg.runtime.models import Fingerprint, fingerprint
from fishleg.runtime.modes import evaluation_mode
from fishleg.runtime.process_group import agreed_batches
from fishleg.runtime.random_state import seeded
from fishleg.runtime.tensors import at_least_float32

_SEED = 982_451_653  # not a likely seed of a run, whose first batches Q learns from


class OutputChange:
    """The model's outputs on a few batches that stay the same all along.

    Args:
        model: The model.
        loader: The batches are drawn from it once.
        likelihood: Its divergence compares two outputs; without one nothing is measured.
        forward: How the model is called on a batch.
        count: How many batches to draw.

    Attributes:
        batches: The batches, once they are drawn.
    """

    def __init__(
        self, model: nn.Module, loader: Iterable[Any], likelihood: Likelihood, forward: Forward, count: int
    ) -> None:
        self.model, self.loader, self.likelihood, self.forward = model, loader, likelihood, forward
        self.count = 0 if type(likelihood).divergence is Likelihood.divergence else count
        self.batches: list[Any] = []
        self._last: tuple[Fingerprint, list[Tensor]] | None = None

    def draw(self) -> None:
        """Draw the batches, unless that is done already.

        They have random numbers of their own: a run that goes on after a restart draws them once more, and
        must neither get others nor change what follows.
        """
        if len(self.batches) < self.count:
            device = next(self.model.parameters()).device
            with seeded(_SEED, self.loader):
                stream = agreed_batches(self.model, cycle(self.loader, LOADER), LOADER)
                drawn = zip(range(self.count), stream, strict=False)
                self.batches = [move_batch(batch, device) for _, batch in drawn]

    @torch.no_grad()
    def outputs(self) -> list[Tensor]:
        """Return the model's outputs as it is now; they are computed once for the same weights.

        Returns:
            The outputs on each batch.

        Raises:
            ValueError: An output is NaN or infinite.
        """
        self.draw()
        state = fingerprint([*self.model.parameters(), *self.model.buffers()]) if self.batches else ([], [])
        if self._last is not None and self._last[0] == state:
            return self._last[1]
        with evaluation_mode(self.model):
            outputs = [self._output(number, batch) for number, batch in enumerate(self.batches, 1)]
        self._last = state, outputs
        return outputs

    def _output(self, number: int, batch: Any) -> Tensor:
        with naming_the_batch(f"batch {number} of those on which the outputs are measured, of {LOADER}"):
            f = at_least_float32(self.forward(self.model, batch))
            if not self.likelihood.finite(f):
                raise ValueError("the model's outputs are not finite: NaN or Inf in the forward pass")
            return f

    def divergence_from(self, before: list[Tensor]) -> float | None:
        """Return KL(before ‖ now), the mean over the batches.

        Args:
            before: What `outputs` returned earlier.

        Returns:
            The divergence; None where there are no batches.
        """
        if not before:
            return None
        total = 0.0
        for batch, reference, f in zip(self.batches, before, self.outputs(), strict=True):
            valid = self.likelihood.valid(f, targets_of(batch))
            total += float(self.likelihood.divergence(f, reference, valid))
        return total / len(before)
