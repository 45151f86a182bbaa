"""A factor that is a Kronecker product over channels and kernel positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fishleg.inverse.operators.factors.base import Factor, Moment
from fishleg.inverse.operators.factors.matrices import congruence, inverse, natural_matrix_step


class SplitFactor(Factor):
    """S = (S_channel ⊗ S_kernel) ⊕ s_bias, for the input side of a convolution.

    It is 3 to 8 times cheaper than a full factor. `moment` has three parts: the moment of the channels,
    averaged over kernel positions, [channels, channels]; that of the kernel positions, averaged over
    channels, [kernel, kernel]; and Σ y² of the bias, [1] or [0].

    Args:
        channels: The number of input channels.
        kernel: The number of kernel positions.
        bias: Whether the last coordinate is a bias.
    """

    def __init__(self, channels: int, kernel: int, *, bias: bool = False) -> None:
        super().__init__()
        self.channels, self.kernel, self.bias = channels, kernel, bias
        self.dim = channels * kernel + int(bias)
        self.channel = nn.Parameter(torch.eye(channels))
        self.position = nn.Parameter(torch.eye(kernel))
        self.log_bias = nn.Parameter(torch.zeros(int(bias)))

    def _fold(self, X: Tensor) -> tuple[Tensor, Tensor]:
        main = X[..., : self.channels * self.kernel].unflatten(-1, (self.channels, self.kernel))
        return main, X[..., self.channels * self.kernel :]

    def dense(self) -> Tensor:
        """Return S, [dim, dim]."""
        main = torch.kron(self.channel.contiguous(), self.position.contiguous())
        matrix: Tensor = torch.block_diag(main, *self.log_bias.exp())
        return matrix

    def apply_function(self, X: Tensor, function: Callable[[Tensor], Tensor], transpose: bool) -> Tensor:
        """Return f(S) x or f(S)ᵀ x for each row x of X [..., dim]."""
        main, last = self._fold(X)
        C, K = function(self.channel), function(self.position)
        main = (C.mT if transpose else C) @ main @ (K if transpose else K.mT)
        return torch.cat([main.flatten(-2), last * function(self.log_bias.exp())], dim=-1)

    def solve_matrix(self, X: Tensor) -> Tensor:
        """Return S⁻¹ x for each row x of X [..., dim]."""
        return self._solve(X, self.channel, self.position)

    def solve_transpose(self, X: Tensor) -> Tensor:
        """Return S⁻ᵀ x for each row x of X [..., dim]."""
        return self._solve(X, self.channel.mT, self.position.mT)

    def _solve(self, X: Tensor, channel: Tensor, position: Tensor) -> Tensor:
        main, last = self._fold(X)
        by_channel: Tensor = torch.linalg.solve(channel, main)
        solved: Tensor = torch.linalg.solve(position, by_channel.mT).mT
        return torch.cat([solved.flatten(-2), last * (-self.log_bias).exp()], dim=-1)

    @torch.no_grad()
    def inverse_transpose(self) -> Factor:
        """Return S⁻ᵀ in the same structure, without gradients."""
        result = SplitFactor(self.channels, self.kernel, bias=self.bias).to(self.channel)
        result.channel.copy_(inverse(self.channel).mT)
        result.position.copy_(inverse(self.position).mT)
        result.log_bias.copy_(-self.log_bias)
        return result.requires_grad_(False)

    def moment(self, Y: Tensor) -> Moment:
        """Return the projected second moment of the rows of Y [N, dim]."""
        main, last = self._fold(Y)
        channel = torch.einsum("nak,nbk->ab", main, main) / self.kernel
        position = torch.einsum("nci,ncj->ij", main, main) / self.channels
        return channel, position, last.square().sum(0)

    def noise_moment(self, variances: Tensor) -> Moment:
        """Return the projection of Sᵀ diag(variances) S."""
        main, last = self._fold(variances)
        channel = main @ self.position.square().sum(-1) / self.kernel
        position = main.mT @ self.channel.square().sum(-1) / self.channels
        return (
            congruence(self.channel, channel),
            congruence(self.position, position),
            last * (2 * self.log_bias).exp(),
        )

    def eye_(self) -> None:
        """Set S = I."""
        with torch.no_grad():
            self.channel.zero_().fill_diagonal_(1.0)
            self.position.zero_().fill_diagonal_(1.0)
            self.log_bias.zero_()

    def scale_(self, factor: float) -> None:
        """Set S ← factor · S."""
        with torch.no_grad():
            self.channel.mul_(factor)
            self.log_bias.add_(torch.tensor(factor, dtype=self.log_bias.dtype).log())

    def natural_step_(self, moment: Moment, eta: float) -> None:
        """Take the natural step of the channel matrix, of the kernel matrix and of the bias."""
        with torch.no_grad():
            self.channel.copy_(natural_matrix_step(self.channel, moment[0], eta))
            self.position.copy_(natural_matrix_step(self.position, moment[1], eta))
            self.log_bias.sub_(0.5 * torch.log((1 - eta) + eta * moment[2]))

    def eigenbasis_(self, moment: Moment) -> Tensor:
        """Return the eigenvalues, [dim], after setting S to the eigenvectors."""
        with torch.no_grad():
            channel, basis = torch.linalg.eigh(moment[0].double())
            self.channel.copy_(basis)
            position, basis = torch.linalg.eigh(moment[1].double())
            self.position.copy_(basis)
            self.log_bias.zero_()
        main = torch.outer(channel, position / position.mean().clamp(min=1e-300)).flatten()
        return torch.cat([main.to(self.channel.dtype), moment[2]])
