"""The abstract `Likelihood`, and the helpers that its subclasses share."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Likelihood(ABC):
    """A conditional distribution p(y|f) of targets y given model outputs f.

    Outputs have the shape [..., outputs]. A subclass defines `nll` and `sample`, which are sufficient for all
    sampled quantities. Closed forms of `cotangent` and `output_fisher` reduce the noise of h samples and
    enable exact products F·v; `divergence` enables distillation and the measured loss of a pruning step.

    Attributes:
        has_logits: Whether f are logits, so that f/T is the same distribution at temperature T.
    """

    has_logits = False

    @abstractmethod
    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        """Compute the training loss: the mean of −log p(y|f) over units.

        Args:
            f: Model outputs [..., outputs].
            y: Targets.

        Returns:
            A scalar that is differentiable with respect to f.
        """

    @abstractmethod
    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw targets y ~ p(y|f) from the model; the labels of the data are not used.

        Args:
            f: Model outputs [..., outputs].
            generator: The random generator; None for the global one.

        Returns:
            Targets that `nll` accepts.
        """

    def nll_floor(self, f: Tensor) -> float | None:
        """Return the smallest possible value of `nll` for outputs like f.

        Args:
            f: Model outputs [..., outputs].

        Returns:
            The lower bound, or None if there is none.
        """
        return None

    def cotangent(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw a random c with E[c cᵀ] = Λ(f), the Fisher matrix of p(y|f) with respect to f.

        Units are independent. The default is the score −∂ log p(y|f)/∂f of a sampled label y, which is
        correct for every likelihood. A closed form has less variance.

        Args:
            f: Model outputs [..., outputs].
            generator: The random generator; None for the global one.

        Returns:
            A tensor of the shape of f.
        """
        with torch.enable_grad():
            leaf = f.detach().requires_grad_()
            device = f.device if generator is None else generator.device  # a generator has a fixed device
            sampled = self.sample(f.detach().to(device), generator).to(f.device)
            loss = self.nll(leaf, sampled) * self.units(f)
            return torch.autograd.grad(loss, leaf)[0]

    def output_fisher(self, f: Tensor, t: Tensor) -> Tensor:
        """Compute Λ(f) t, where Λ(f) is the Fisher matrix of p(y|f) with respect to f, for each unit.

        Args:
            f: Model outputs [..., outputs].
            t: A tangent of the shape of f.

        Returns:
            A tensor of the shape of f.

        Raises:
            NotImplementedError: If the likelihood has no closed form.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no closed-form output Fisher; "
            "define output_fisher(f, t), or use sampled products (AuxiliaryOptions(exact_products=False))"
        )

    def divergence(self, f: Tensor, reference: Tensor, valid: Tensor | None = None) -> Tensor:
        """Compute KL(p(y|reference) ‖ p(y|f)), the mean over units.

        To second order in f − reference this is the quadratic form of the Fisher matrix. It is also the loss
        of distillation.

        Args:
            f: Model outputs [..., outputs].
            reference: Outputs of the reference model, of the shape of f.
            valid: Which units count, as a boolean tensor with one entry per unit; None for all.

        Returns:
            A scalar that is differentiable with respect to f.

        Raises:
            NotImplementedError: If the likelihood does not define it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no divergence; define divergence(f, reference, valid), "
            "which distillation and the measured loss of a pruning step need"
        )

    def units(self, f: Tensor) -> int:
        """Return the number of independent predictions in f.

        Args:
            f: Model outputs [..., outputs].

        Returns:
            The number of units, at least 1.
        """
        return max(f[..., 0].numel(), 1)

    def valid(self, f: Tensor, y: Tensor | None) -> Tensor | None:
        """Return which units count: all except those that the targets mark as ignored.

        The values of y are not used otherwise. If y cannot be the targets of f, for example because it is a
        second input, all units count.

        Args:
            f: Model outputs [..., outputs].
            y: Targets, or None.

        Returns:
            A boolean tensor with one entry per unit, or None if all count.
        """
        return None

    def finite(self, f: Tensor) -> bool:
        """Return whether p(y|f) is a proper distribution for every unit.

        Args:
            f: Model outputs [..., outputs].

        Returns:
            False if an output overflowed or is NaN.
        """
        return bool(torch.isfinite(f).all())

    def check(self, f: Tensor, y: Tensor | None) -> None:
        """Check the dtypes, shapes and values of outputs and targets.

        Args:
            f: Model outputs [..., outputs].
            y: Targets, or None to check the outputs only.

        Raises:
            ValueError: If f or y does not fit the likelihood.
        """
        if not torch.is_tensor(f) or not f.is_floating_point():
            raise ValueError(f"{type(self).__name__} needs a floating-point output tensor, got {describe(f)}")
        if f.dim() < 2 or f.numel() == 0:
            raise ValueError(
                f"{type(self).__name__} needs a non-empty output [batch, ..., outputs] "
                f"with at least 2 dimensions, got {describe(f)}"
            )


def mean_over_units(values: Tensor, valid: Tensor | None) -> Tensor:
    """Return the mean of one value per unit over the units that count.

    Args:
        values: One value per unit.
        valid: Which units count, of the same shape; None for all.

    Returns:
        A scalar.
    """
    if valid is None:
        return values.mean()
    return torch.where(valid, values, torch.zeros_like(values)).sum() / valid.sum().clamp(min=1)


def check_probabilities(y: Tensor, name: str) -> None:
    """Check that all values lie in [0, 1].

    Args:
        y: The values.
        name: Their name, for the error message.

    Raises:
        ValueError: If a value lies outside, or is NaN.
    """
    wrong = y[~((y >= 0) & (y <= 1))]
    if wrong.numel():
        raise ValueError(f"{name} must lie in [0, 1], got {float(wrong[0])}")


def random_signs(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw independent random signs ±1.

    Args:
        like: A tensor whose shape, dtype and device the result has.
        generator: The random generator; None for the global one.

    Returns:
        The signs.
    """
    device = like.device if generator is None else generator.device
    bits = torch.randint(0, 2, like.shape, generator=generator, device=device)
    return (2 * bits - 1).to(device=like.device, dtype=like.dtype)


def describe(value: object) -> str:
    """Describe a value for an error message.

    Args:
        value: A tensor or any other object.

    Returns:
        The dtype and shape of a tensor, otherwise the name of the type.
    """
    if torch.is_tensor(value):
        return f"{str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return type(value).__name__
