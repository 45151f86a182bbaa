"""The loss of fine-tuning: that of the labels, or the divergence from the dense model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.curvature.likelihoods import Likelihood
from fishleg.options import FineTuningOptions
from fishleg.runtime.batches import Forward, targets_of
from fishleg.runtime.tensors import at_least_float32


@dataclass(frozen=True)
class LossResult:
    """The loss of a batch.

    Args:
        loss: The loss, with its graph.
        floor: The least value that it could have; None where that is not known.
        counts: False where every label of the batch is ignored.
    """

    loss: Tensor
    floor: float | None
    counts: bool

    @property
    def above_floor(self) -> float:
        """The loss above the least value that it could have."""
        return float(self.loss.detach()) - (self.floor or 0.0)


class TrainingLoss:
    """Computes the loss of fine-tuning.

    Args:
        model: The model that is trained.
        likelihood: The distribution of its outputs.
        forward: How the model is called on a batch.
        teacher: The dense model, for distillation; None: labels are used.
        options: The temperature of the distillation.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        forward: Forward,
        teacher: nn.Module | None,
        options: FineTuningOptions,
    ) -> None:
        self.model, self.likelihood, self.forward = model, likelihood, forward
        self.teacher, self.options = teacher, options

    def __call__(self, batch: Any) -> LossResult:
        """Return the loss of a batch.

        Args:
            batch: A batch on the model's device.

        Returns:
            The loss, its least possible value, and whether any label counts.

        Raises:
            ValueError: The batch has no targets and there is no teacher, or its targets do not fit.
            IndexError: A target is out of range; torch's own error.
            RuntimeError: The likelihood fails for another reason; torch's own error.
        """
        likelihood = self.likelihood
        f = at_least_float32(self.forward(self.model, batch))
        targets = targets_of(batch)
        valid = likelihood.valid(f, targets)
        counts = valid is None or bool(valid.any())
        if self.teacher is not None:
            return LossResult(self._distillation(f, batch, valid), 0.0, counts)
        if targets is None:
            raise ValueError("a training batch has no targets, others had: fine-tuning needs them")
        floor = likelihood.nll_floor(f)
        try:
            return LossResult(likelihood.nll(f, targets), floor, counts)
        except (IndexError, RuntimeError, ValueError):
            likelihood.check(f, targets)  # its message says what is wrong with the targets
            raise

    def _distillation(self, f: Tensor, batch: Any, valid: Tensor | None) -> Tensor:
        assert self.teacher is not None
        with torch.no_grad():
            reference = at_least_float32(self.forward(self.teacher, batch))
        # A confident teacher says little but the label at T = 1; T² keeps the size of the gradient.
        T = self.options.temperature if self.likelihood.has_logits else 1.0
        return T**2 * self.likelihood.divergence(f / T, reference / T, valid)

    def teacher_fingerprint(self) -> float | None:
        """Return a number that distinguishes one teacher from another; None without a teacher."""
        if self.teacher is None:
            return None
        return float(sum(p.detach().double().abs().sum().cpu() for p in self.teacher.parameters()))
