"""How far a model's outputs have moved: the loss increase of a pruning step, measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.curvature.likelihoods import Likelihood
from fishleg.runtime.batches import Forward, move_batch, targets_of
from fishleg.runtime.loaders import cycle
from fishleg.runtime.modes import evaluation_mode
from fishleg.runtime.random_state import seeded
from fishleg.runtime.tensors import at_least_float32

_SEED = 982_451_653  # no user's: with that of a run these would be the batches that Q learns from first


class OutputChange:
    """A few batches, the same all along, and the model's outputs on them."""

    def __init__(
        self, model: nn.Module, loader: Iterable[Any], likelihood: Likelihood, forward: Forward, count: int
    ) -> None:
        self.model, self.loader, self.likelihood, self.forward = model, loader, likelihood, forward
        # none where the likelihood cannot compare two outputs
        self.count = 0 if type(likelihood).divergence is Likelihood.divergence else count
        self.batches: list[Any] = []

    def choose(self) -> None:
        """Draw the batches, unless that is done already.

        With random numbers of their own: a run that goes on after a restart draws them once more, and must
        neither get others nor disturb what follows.
        """
        if len(self.batches) < self.count:
            device = next(self.model.parameters()).device
            with seeded(_SEED, self.loader):
                drawn = zip(range(self.count), cycle(self.loader), strict=False)
                self.batches = [move_batch(batch, device) for _, batch in drawn]

    @torch.no_grad()
    def outputs(self) -> list[Tensor]:
        """The model's outputs as it is now."""
        self.choose()
        with evaluation_mode(self.model):
            outputs = [at_least_float32(self.forward(self.model, batch)) for batch in self.batches]
        if not all(map(self.likelihood.finite, outputs)):
            raise ValueError("the model's outputs are not finite: NaN or Inf in the forward pass")
        return outputs

    def moved(self, before: list[Tensor]) -> float | None:
        """KL(before ‖ now), mean over the batches; None where there are none."""
        if not before:
            return None
        total = 0.0
        for batch, reference, f in zip(self.batches, before, self.outputs(), strict=True):
            valid = self.likelihood.valid(f, targets_of(batch))
            total += float(self.likelihood.divergence(f, reference, valid))
        return total / len(before)
