"""Classification: one class per unit, given by logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fishleg.curvature.likelihoods import base


class Categorical(base.Likelihood):
    """One class per unit, p(y|f) = softmax(f)_y, with logits f [..., classes].

    Targets are integer class labels, or soft labels (a probability for each class) of the shape of f.

    Args:
        class_dim: The dimension of f that holds the classes; 1 for segmentation outputs
            [batch, classes, ...].
        ignore_index: The label of positions that do not count.

    Example:
        >>> labels = torch.tensor([0, 1, -100])  # the last position is ignored
        >>> round(float(Categorical().nll(torch.zeros(3, 2), labels)), 4)  # log 2
        0.6931
    """

    has_logits = True

    def __init__(self, *, class_dim: int = -1, ignore_index: int = -100) -> None:
        self.class_dim = class_dim
        self.ignore_index = ignore_index

    def nll_floor(self, f: Tensor) -> float | None:
        """Return 0: the probability of a class is at most 1."""
        return 0.0

    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        logits = f.movedim(self.class_dim, -1).flatten(0, -2)
        if self._is_soft(f, y):
            base.check_probabilities(y, "Categorical's soft labels")  # torch accepts any numbers
            return functional.cross_entropy(logits, y.movedim(self.class_dim, -1).flatten(0, -2).to(f.dtype))
        if y.is_floating_point():  # torch would take a vector of floats for the probabilities of one example
            self.check(f, y)
        return functional.cross_entropy(logits, y.flatten().long(), ignore_index=self.ignore_index)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return a class label for each unit, drawn from softmax(f)."""
        p = f.movedim(self.class_dim, -1).softmax(-1)
        draws = torch.multinomial(p.flatten(0, -2), 1, generator=generator)
        return draws.view(p.shape[:-1])

    def cotangent(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return c = √p∘ε − p(√p·ε) with random signs ε: its covariance is exactly diag(p) − ppᵀ."""
        p = f.detach().movedim(self.class_dim, -1).softmax(-1)
        scaled = p.sqrt() * base.random_signs(p, generator)
        c = scaled - p * scaled.sum(-1, keepdim=True)
        return c.movedim(-1, self.class_dim)

    def output_fisher(self, f: Tensor, t: Tensor) -> Tensor:
        """Return Λt = p∘t − p(p·t)."""
        p = f.detach().softmax(self.class_dim)
        return p * (t - (p * t).sum(self.class_dim, keepdim=True))

    def divergence(self, f: Tensor, reference: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return Σ_y p(y|reference) (log p(y|reference) − log p(y|f)), the mean over units."""
        log_p = reference.log_softmax(self.class_dim)
        p = log_p.exp()
        # A class of probability 0 (a logit of −inf) adds nothing, whatever f is there.
        terms = torch.where(p > 0, p * (log_p - f.log_softmax(self.class_dim)), torch.zeros_like(p))
        return base.mean_over_units(terms.sum(self.class_dim), valid)

    def units(self, f: Tensor) -> int:
        """Return the number of positions."""
        return f.numel() // f.shape[self.class_dim]

    def valid(self, f: Tensor, y: Tensor | None) -> Tensor | None:
        """Return which labels are not `ignore_index`."""
        if (
            y is None
            or y.is_floating_point()
            or y.shape != self._units_shape(f)
            or self._wrong_labels(f, y).numel()
        ):
            return None
        counted = y.long() != self.ignore_index  # uint8 cannot represent −100
        return None if bool(counted.all()) else counted

    def finite(self, f: Tensor) -> bool:
        """Return whether all probabilities are finite; a logit of −inf is allowed, NaN and +inf are not."""
        return bool(f.softmax(self.class_dim).isfinite().all())

    def check(self, f: Tensor, y: Tensor | None) -> None:
        """Check that f has at least two classes, and that y holds labels or probabilities for it.

        Raises:
            ValueError: If not.
        """
        super().check(f, y)
        if f.shape[self.class_dim] < 2:
            raise ValueError(
                f"Categorical needs at least two classes, but the model's outputs {tuple(f.shape)} have one, "
                "whose probability is always 1: use likelihood='bernoulli' or, for regression, 'gaussian'"
            )
        if y is None:
            return
        if self._is_soft(f, y):
            base.check_probabilities(y, "Categorical's soft labels")
            return
        expected = self._units_shape(f)
        if y.is_floating_point() or y.shape != expected:
            raise ValueError(
                f"Categorical needs integer labels of shape {tuple(expected)} for logits "
                f"{tuple(f.shape)}, got {base.describe(y)}"
                + (" (soft labels have the shape of the logits)" if y.is_floating_point() else "")
                + (" (Categorical(class_dim=1) for outputs [batch, classes, ...])" if f.dim() > 2 else "")
            )
        classes, wrong = f.shape[self.class_dim], self._wrong_labels(f, y)
        if wrong.numel():
            raise ValueError(
                f"label {int(wrong[0])} is out of range: labels must be in 0..{classes - 1} "
                f"(the model has {classes} outputs) or ignore_index={self.ignore_index}"
            )

    def _is_soft(self, f: Tensor, y: Tensor) -> bool:
        """Return whether y holds a probability for each class, as mixup and label smoothing produce."""
        return y.is_floating_point() and y.shape == f.shape

    def _units_shape(self, f: Tensor) -> torch.Size:
        """Return the shape of integer labels for f."""
        return f.movedim(self.class_dim, -1).shape[:-1]

    def _wrong_labels(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the labels that are neither a class nor `ignore_index`."""
        labels = y.long()
        outside = (labels < 0) | (labels >= f.shape[self.class_dim])
        return labels[(labels != self.ignore_index) & outside]
