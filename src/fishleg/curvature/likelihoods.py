"""p(y|f): what the model's outputs f mean, and therefore what its Fisher matrix is.

A *unit* is one independent prediction: an example, or one token of a sequence. Losses and Fisher
matrices are means over units. To add a likelihood of your own, subclass `Likelihood` and give `nll`
and `sample`; add `cotangent` and `output_fisher` where a closed form exists (less noise, exact F·v).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional


class Likelihood(ABC):
    """A conditional distribution p(y|f) of targets y given model outputs f [..., outputs]."""

    has_logits = False  # whether f is logits, so that f/T is the same distribution at a temperature T

    @abstractmethod
    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        """−log p(y|f), mean over units; what the model is trained on."""

    @abstractmethod
    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """y ~ p(y|f): labels from the model, never from the data."""

    def nll_floor(self, f: Tensor) -> float | None:
        """The least value that the nll can take for outputs like f, where there is one."""
        return None

    def cotangent(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A random c, independent over units, with E[c cᵀ] = the Fisher matrix of p(y|f) w.r.t. f.

        The default is the score of a sampled label, which is right for any likelihood.
        """
        with torch.enable_grad():
            leaf = f.detach().requires_grad_()
            device = f.device if generator is None else generator.device  # where it can draw
            sampled = self.sample(f.detach().to(device), generator).to(f.device)
            loss = self.nll(leaf, sampled) * self.units(f)
            return torch.autograd.grad(loss, leaf)[0]

    def output_fisher(self, f: Tensor, t: Tensor) -> Tensor:
        """Λ(f) t, the Fisher matrix of p(y|f) w.r.t. f times t, unit by unit."""
        raise NotImplementedError(
            f"{type(self).__name__} has no closed-form output Fisher; "
            "define output_fisher(f, t), or use sampled products (AuxiliaryOptions(exact_products=False))"
        )

    def divergence(self, f: Tensor, reference: Tensor, valid: Tensor | None = None) -> Tensor:
        """KL(p(y|reference) ‖ p(y|f)), mean over the units that count (`valid`, None = all).

        The distance that the Fisher matrix measures to second order, and the loss of distillation.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no divergence; define divergence(f, reference, valid), "
            "which distillation and the measured loss of a pruning step need"
        )

    def units(self, f: Tensor) -> int:
        """How many independent predictions f holds."""
        return max(f[..., 0].numel(), 1)

    def valid(self, f: Tensor, y: Tensor | None) -> Tensor | None:
        """Which units of f count (boolean), None for all. Reads where y is, never what it says.

        A y that cannot be the targets of f, a second input say, tells nothing: all count.
        """
        return None

    def finite(self, f: Tensor) -> bool:
        """Whether p(y|f) is a distribution for every unit: outputs that overflowed make none."""
        return bool(torch.isfinite(f).all())

    def check(self, f: Tensor, y: Tensor | None) -> None:
        """Raise a ValueError that names the value and the rule if f, or y where given, cannot be right."""
        if not torch.is_tensor(f) or not f.is_floating_point():
            raise ValueError(
                f"{type(self).__name__} needs a floating-point output tensor, got {_describe(f)}"
            )
        if f.dim() < 2 or f.numel() == 0:
            raise ValueError(
                f"{type(self).__name__} needs a non-empty output [batch, ..., outputs] "
                f"with at least 2 dimensions, got {_describe(f)}"
            )


class Categorical(Likelihood):
    """Classes with logits f [..., classes]; `ignore_index` marks positions of y that do not count.

    `class_dim` says where the classes are (1 for segmentation outputs [batch, classes, ...]).
    """

    has_logits = True

    def __init__(self, *, class_dim: int = -1, ignore_index: int = -100) -> None:
        self.class_dim = class_dim
        self.ignore_index = ignore_index

    def nll_floor(self, f: Tensor) -> float | None:
        return 0.0

    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        logits = f.movedim(self.class_dim, -1).flatten(0, -2)
        if self._soft(f, y):
            _check_probabilities(y, "Categorical's soft labels")  # torch takes any numbers for them
            return functional.cross_entropy(logits, y.movedim(self.class_dim, -1).flatten(0, -2).to(f.dtype))
        if y.is_floating_point():  # for torch a vector of floats is the probabilities of one example
            self.check(f, y)
        return functional.cross_entropy(logits, y.flatten().long(), ignore_index=self.ignore_index)

    def _soft(self, f: Tensor, y: Tensor) -> bool:
        """Whether y is a probability for each class, as mixup and label smoothing make them."""
        return y.is_floating_point() and y.shape == f.shape

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        p = f.movedim(self.class_dim, -1).softmax(-1)
        draws = torch.multinomial(p.flatten(0, -2), 1, generator=generator)
        return draws.view(p.shape[:-1])

    def cotangent(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """c = √p∘ε − p(√p·ε) with ε = ±1: covariance exactly diag(p) − ppᵀ, no label noise."""
        p = f.detach().movedim(self.class_dim, -1).softmax(-1)
        scaled = p.sqrt() * _signs(p, generator)
        c = scaled - p * scaled.sum(-1, keepdim=True)
        return c.movedim(-1, self.class_dim)

    def output_fisher(self, f: Tensor, t: Tensor) -> Tensor:
        p = f.detach().softmax(self.class_dim)
        return p * (t - (p * t).sum(self.class_dim, keepdim=True))

    def divergence(self, f: Tensor, reference: Tensor, valid: Tensor | None = None) -> Tensor:
        log_p = reference.log_softmax(self.class_dim)
        p = log_p.exp()
        # a class that cannot be (a logit of −inf) adds nothing, whatever f says of it
        terms = torch.where(p > 0, p * (log_p - f.log_softmax(self.class_dim)), torch.zeros_like(p))
        kl = terms.sum(self.class_dim)
        return _mean_over(kl, valid)

    def units(self, f: Tensor) -> int:
        return f.numel() // f.shape[self.class_dim]

    def valid(self, f: Tensor, y: Tensor | None) -> Tensor | None:
        if y is None or y.is_floating_point() or y.shape != self._units_shape(f) or self._wrong(f, y).numel():
            return None
        counts = y.long() != self.ignore_index  # a uint8 has no −100 to compare with
        return None if bool(counts.all()) else counts

    def finite(self, f: Tensor) -> bool:
        """A logit of −inf is a class that cannot be; NaN, +inf, or no class at all leave no probabilities."""
        return bool(f.softmax(self.class_dim).isfinite().all())

    def _units_shape(self, f: Tensor) -> torch.Size:
        return f.movedim(self.class_dim, -1).shape[:-1]

    def _wrong(self, f: Tensor, y: Tensor) -> Tensor:
        """The labels that are neither a class nor ignored."""
        labels = y.long()
        outside = (labels < 0) | (labels >= f.shape[self.class_dim])
        return labels[(labels != self.ignore_index) & outside]

    def check(self, f: Tensor, y: Tensor | None) -> None:
        super().check(f, y)
        if f.shape[self.class_dim] < 2:
            raise ValueError(
                f"Categorical needs two classes at least, and the model's outputs {tuple(f.shape)} have one, "
                "whose probability is always 1: likelihood='bernoulli' (yes or no) or 'gaussian' (a number)"
            )
        if y is None:
            return
        if self._soft(f, y):
            _check_probabilities(y, "Categorical's soft labels")
            return
        expected = self._units_shape(f)
        if y.is_floating_point() or y.shape != expected:
            raise ValueError(
                f"Categorical needs integer labels of shape {tuple(expected)} for logits "
                f"{tuple(f.shape)}, got {_describe(y)}"
                + (" (soft labels have the shape of the logits)" if y.is_floating_point() else "")
                + (" (Categorical(class_dim=1) for outputs [batch, classes, ...])" if f.dim() > 2 else "")
            )
        classes, wrong = f.shape[self.class_dim], self._wrong(f, y)
        if wrong.numel():
            raise ValueError(
                f"label {int(wrong[0])} is out of range: labels must be in 0..{classes - 1} "
                f"(the model has {classes} outputs) or ignore_index={self.ignore_index}"
            )


class Gaussian(Likelihood):
    """y ~ N(f, σ²I) for f [..., outputs]; units are vectors, the nll sums over outputs.

    Of a single number per example, outputs and targets may be [batch] as well as [batch, 1].
    σ is a number or tensor (a parameter that you learn with your own optimizer is fine). With
    `learned_sigma=True` the model predicts it: f holds the means, then as many log σ.
    """

    def __init__(self, sigma: float | Tensor = 1.0, *, learned_sigma: bool = False) -> None:
        if not bool((torch.as_tensor(sigma) > 0).all()):
            raise ValueError(f"sigma must be > 0, got {sigma}")
        self.sigma = sigma
        self.learned_sigma = learned_sigma

    def _mean_and_log_sigma(self, f: Tensor) -> tuple[Tensor, Tensor]:
        if self.learned_sigma:
            mean, log_sigma = f.chunk(2, dim=-1)
            return mean, log_sigma
        return f, torch.as_tensor(self.sigma, dtype=f.dtype, device=f.device).log().expand_as(f)

    def nll_floor(self, f: Tensor) -> float | None:
        """½ log 2π + log σ for every output, where σ is not the model's to choose."""
        if self.learned_sigma:
            return None
        log_sigma = self._mean_and_log_sigma(_columns(f.detach()))[1]
        return float((log_sigma + 0.5 * math.log(2 * math.pi)).sum(-1).mean())

    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        mean, log_sigma = self._mean_and_log_sigma(_columns(f))
        y = self._as_mean(mean, y)
        constant = 0.5 * torch.log(torch.tensor(2 * torch.pi, dtype=f.dtype, device=f.device))
        per_output = 0.5 * ((y - mean) * (-log_sigma).exp()).square() + log_sigma + constant
        return per_output.sum(-1).mean()

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        mean, log_sigma = self._mean_and_log_sigma(f.detach())
        noise = torch.randn(mean.shape, generator=generator, dtype=f.dtype, device=f.device)
        return mean + log_sigma.exp() * noise

    def cotangent(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """c = ε/σ for means; the Fisher information of log σ is 2, so c = √2 ε there."""
        return _signs(f, generator) * self._root_fisher(f)

    def output_fisher(self, f: Tensor, t: Tensor) -> Tensor:
        return self._root_fisher(f).square() * t

    def divergence(self, f: Tensor, reference: Tensor, valid: Tensor | None = None) -> Tensor:
        both = _columns(f), _columns(reference)
        (mean, log_sigma), (mean_0, log_sigma_0) = map(self._mean_and_log_sigma, both)
        scaled = ((mean - mean_0) * (-log_sigma).exp()).square()
        kl = log_sigma - log_sigma_0 + 0.5 * ((2 * (log_sigma_0 - log_sigma)).exp() + scaled - 1)
        return _mean_over(kl.sum(-1), valid)

    def _root_fisher(self, f: Tensor) -> Tensor:
        mean, log_sigma = self._mean_and_log_sigma(f.detach())
        precision = (-log_sigma.detach()).exp()
        return torch.cat([precision, torch.full_like(mean, 2**0.5)], -1) if self.learned_sigma else precision

    def units(self, f: Tensor) -> int:
        return super().units(_columns(f))

    def _as_mean(self, mean: Tensor, y: Tensor) -> Tensor:
        """y in the shape of the means; broadcasting would compare every output with every target."""
        if mean.shape[-1] == 1 and y.shape == mean.shape[:-1]:
            return y.unsqueeze(-1)
        if y.shape != mean.shape:
            raise ValueError(f"Gaussian needs targets of shape {tuple(mean.shape)}, got {_describe(y)}")
        return y

    def check(self, f: Tensor, y: Tensor | None) -> None:
        super().check(_columns(f), y)
        if self.learned_sigma and _columns(f).shape[-1] % 2:
            raise ValueError(
                "learned_sigma needs an even number of outputs (means, log sigmas), "
                f"got {_columns(f).shape[-1]}"
            )
        if y is not None:
            self._as_mean(self._mean_and_log_sigma(_columns(f))[0], y)


class Bernoulli(Likelihood):
    """Independent binary outputs with logits f [..., outputs]; the nll sums over outputs."""

    has_logits = True

    def nll_floor(self, f: Tensor) -> float | None:
        return 0.0

    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        loss = functional.binary_cross_entropy_with_logits(f, y.to(f.dtype), reduction="none")
        return loss.sum(-1).mean()

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.bernoulli(f.detach().sigmoid(), generator=generator)

    def cotangent(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        p = f.detach().sigmoid()
        return (p * (1 - p)).sqrt() * _signs(p, generator)

    def output_fisher(self, f: Tensor, t: Tensor) -> Tensor:
        p = f.detach().sigmoid()
        return p * (1 - p) * t

    def divergence(self, f: Tensor, reference: Tensor, valid: Tensor | None = None) -> Tensor:
        p = reference.sigmoid()
        log_ratio_1 = functional.logsigmoid(reference) - functional.logsigmoid(f)
        log_ratio_0 = functional.logsigmoid(-reference) - functional.logsigmoid(-f)
        return _mean_over((p * log_ratio_1 + (1 - p) * log_ratio_0).sum(-1), valid)

    def check(self, f: Tensor, y: Tensor | None) -> None:
        super().check(f, y)
        if y is None:
            return
        if y.shape != f.shape:
            raise ValueError(f"Bernoulli needs targets of shape {tuple(f.shape)}, got {_describe(y)}")
        _check_probabilities(y, "Bernoulli targets")


LIKELIHOODS: dict[str, type[Likelihood]] = {
    "categorical": Categorical,
    "gaussian": Gaussian,
    "bernoulli": Bernoulli,
}


def as_likelihood(likelihood: Likelihood | str) -> Likelihood:
    """A likelihood from its name or itself: `as_likelihood("categorical")`."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    if likelihood not in LIKELIHOODS:
        raise ValueError(
            f"likelihood must be a Likelihood or one of {sorted(LIKELIHOODS)}, got {likelihood!r}"
        )
    return LIKELIHOODS[likelihood]()


def _mean_over(values: Tensor, valid: Tensor | None) -> Tensor:
    if valid is None:
        return values.mean()
    return torch.where(valid, values, torch.zeros_like(values)).sum() / valid.sum().clamp(min=1)


def _columns(f: Tensor) -> Tensor:
    """Outputs [batch], of one number each, as [batch, 1]."""
    return f.unsqueeze(-1) if torch.is_tensor(f) and f.dim() == 1 else f


def _check_probabilities(y: Tensor, what: str) -> None:
    wrong = y[~((y >= 0) & (y <= 1))]
    if wrong.numel():
        raise ValueError(f"{what} must lie in [0, 1], got {float(wrong[0])}")


def _signs(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Independent ±1 of the given tensor's shape, dtype and device."""
    device = like.device if generator is None else generator.device
    bits = torch.randint(0, 2, like.shape, generator=generator, device=device)
    return (2 * bits - 1).to(device=like.device, dtype=like.dtype)


def _describe(value: object) -> str:
    if torch.is_tensor(value):
        return f"{str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return type(value).__name__
