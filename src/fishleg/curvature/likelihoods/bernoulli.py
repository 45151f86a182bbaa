"""Multi-label classification: independent binary outputs, given by logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fishleg.curvature.likelihoods import base


class Bernoulli(base.Likelihood):
    """Independent binary outputs, p(y=1|f) = sigmoid(f), with logits f [..., outputs].

    A unit is one vector of outputs; the nll sums over them. Targets are probabilities of the shape of f.
    """

    has_logits = True

    def nll_floor(self, f: Tensor) -> float | None:
        """Return 0: a probability is at most 1."""
        return 0.0

    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the binary cross-entropy, summed over outputs, the mean over units."""
        loss = functional.binary_cross_entropy_with_logits(f, y.to(f.dtype), reduction="none")
        return loss.sum(-1).mean()

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return 0 or 1 for each output, drawn from sigmoid(f)."""
        return torch.bernoulli(f.detach().sigmoid(), generator=generator)

    def cotangent(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return c = √(p(1 − p)) ε with random signs ε."""
        p = f.detach().sigmoid()
        return (p * (1 - p)).sqrt() * base.random_signs(p, generator)

    def output_fisher(self, f: Tensor, t: Tensor) -> Tensor:
        """Return Λt = p(1 − p) t."""
        p = f.detach().sigmoid()
        return p * (1 - p) * t

    def divergence(self, f: Tensor, reference: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the KL divergence of the binary distributions, summed over outputs, the mean over units."""
        p = reference.sigmoid()
        log_ratio_1 = functional.logsigmoid(reference) - functional.logsigmoid(f)
        log_ratio_0 = functional.logsigmoid(-reference) - functional.logsigmoid(-f)
        return base.mean_over_units((p * log_ratio_1 + (1 - p) * log_ratio_0).sum(-1), valid)

    def check(self, f: Tensor, y: Tensor | None) -> None:
        """Check that y has the shape of f and holds probabilities.

        Raises:
            ValueError: If not.
        """
        super().check(f, y)
        if y is None:
            return
        if y.shape != f.shape:
            raise ValueError(f"Bernoulli needs targets of shape {tuple(f.shape)}, got {base.describe(y)}")
        base.check_probabilities(y, "Bernoulli targets")
