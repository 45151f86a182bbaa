"""Regression: a real vector per unit, with a fixed or a predicted standard deviation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fishleg.curvature.likelihoods import base


class Gaussian(base.Likelihood):
    """Regression, y ~ N(f, σ²I), with means f [..., outputs].

    A unit is one vector; the nll sums over its outputs. If there is one output per example, outputs and
    targets may have the shape [batch] instead of [batch, 1].

    Args:
        sigma: σ, a number or a tensor that broadcasts to f. It may be a parameter that the user trains.
        learned_sigma: Whether the model predicts σ. Then f holds the means, followed by as many log σ, and
            `sigma` is not used.

    Raises:
        ValueError: If `sigma` is not positive.
    """

    def __init__(self, sigma: float | Tensor = 1.0, *, learned_sigma: bool = False) -> None:
        if not bool((torch.as_tensor(sigma) > 0).all()):
            raise ValueError(f"sigma must be > 0, got {sigma}")
        self.sigma = sigma
        self.learned_sigma = learned_sigma

    def nll_floor(self, f: Tensor) -> float | None:
        """Return Σ (½ log 2π + log σ) over outputs if σ is fixed; a predicted σ has no bound."""
        if self.learned_sigma:
            return None
        log_sigma = self._mean_and_log_sigma(_as_columns(f.detach()))[1]
        return float((log_sigma + 0.5 * math.log(2 * math.pi)).sum(-1).mean())

    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        """Return Σ (½((y − mean)/σ)² + log σ + ½ log 2π) over outputs, the mean over units."""
        mean, log_sigma = self._mean_and_log_sigma(_as_columns(f))
        y = self._in_shape_of_mean(mean, y)
        constant = 0.5 * torch.log(torch.tensor(2 * torch.pi, dtype=f.dtype, device=f.device))
        per_output = 0.5 * ((y - mean) * (-log_sigma).exp()).square() + log_sigma + constant
        return per_output.sum(-1).mean()

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return y = mean + σε with standard normal ε."""
        mean, log_sigma = self._mean_and_log_sigma(f.detach())
        noise = torch.randn(mean.shape, generator=generator, dtype=f.dtype, device=f.device)
        return mean + log_sigma.exp() * noise

    def cotangent(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return c = ε/σ for means and √2 ε for log σ (its Fisher information is 2), with random signs ε."""
        return base.random_signs(f, generator) * self._root_fisher(f)

    def output_fisher(self, f: Tensor, t: Tensor) -> Tensor:
        """Return Λt = t/σ² for means and 2t for log σ."""
        return self._root_fisher(f).square() * t

    def divergence(self, f: Tensor, reference: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return Σ (log(σ/σ₀) + ½(σ₀² + (mean − mean₀)²)/σ² − ½) over outputs, the mean over units."""
        both = _as_columns(f), _as_columns(reference)
        (mean, log_sigma), (mean_0, log_sigma_0) = map(self._mean_and_log_sigma, both)
        scaled = ((mean - mean_0) * (-log_sigma).exp()).square()
        kl = log_sigma - log_sigma_0 + 0.5 * ((2 * (log_sigma_0 - log_sigma)).exp() + scaled - 1)
        return base.mean_over_units(kl.sum(-1), valid)

    def units(self, f: Tensor) -> int:
        """Return the number of vectors."""
        return super().units(_as_columns(f))

    def check(self, f: Tensor, y: Tensor | None) -> None:
        """Check that y has the shape of the means, and that the outputs are even in number if σ is predicted.

        Raises:
            ValueError: If not.
        """
        super().check(_as_columns(f), y)
        if self.learned_sigma and _as_columns(f).shape[-1] % 2:
            raise ValueError(
                "learned_sigma needs an even number of outputs (means, log sigmas), "
                f"got {_as_columns(f).shape[-1]}"
            )
        if y is not None:
            self._in_shape_of_mean(self._mean_and_log_sigma(_as_columns(f))[0], y)

    def _mean_and_log_sigma(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means and log σ, both of the shape of the means."""
        if self.learned_sigma:
            mean, log_sigma = f.chunk(2, dim=-1)
            return mean, log_sigma
        return f, torch.as_tensor(self.sigma, dtype=f.dtype, device=f.device).log().expand_as(f)

    def _root_fisher(self, f: Tensor) -> Tensor:
        """Return the square root of the diagonal of Λ(f)."""
        mean, log_sigma = self._mean_and_log_sigma(f.detach())
        precision = (-log_sigma.detach()).exp()
        return torch.cat([precision, torch.full_like(mean, 2**0.5)], -1) if self.learned_sigma else precision

    def _in_shape_of_mean(self, mean: Tensor, y: Tensor) -> Tensor:
        """Return y in the shape of the means.

        Broadcasting is not used: it would compare every output with every target.

        Raises:
            ValueError: If the shape of y does not fit.
        """
        if mean.shape[-1] == 1 and y.shape == mean.shape[:-1]:
            return y.unsqueeze(-1)
        if y.shape != mean.shape:
            raise ValueError(f"Gaussian needs targets of shape {tuple(mean.shape)}, got {base.describe(y)}")
        return y


def _as_columns(f: Tensor) -> Tensor:
    """Return outputs [batch] as [batch, 1], and all others as they are."""
    return f.unsqueeze(-1) if torch.is_tensor(f) and f.dim() == 1 else f
