"""The sides of a Kronecker product: square matrices S that are cheap to apply, square and learn.

Conventions, said once: a factor acts on the *last* dimension of its argument, so `apply(X)` maps
every row x of X to S x. L is the output side and R the input side of a layer's weight matrix.

Each structure answers the same questions about S without forming it; `dense()` is the definition.
`moment(Y)` is the second moment Σ y yᵀ projected on the structure, the only statistic that the
natural step and the eigenbasis need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

Moment = tuple[Tensor, ...]


class Factor(nn.Module, ABC):
    """A learnable square matrix S of size `dim`."""

    dim: int

    @abstractmethod
    def dense(self) -> Tensor:
        """S as a [dim, dim] matrix."""

    @abstractmethod
    def apply_(self, X: Tensor, f: Callable[[Tensor], Tensor], transpose: bool) -> Tensor:
        """f(S) x (or f(S)ᵀ x) for each row x of X [..., dim]; f is elementwise."""

    @abstractmethod
    def moment(self, Y: Tensor) -> Moment:
        """Σ y yᵀ over the rows of Y [N, dim], projected on this structure."""

    @abstractmethod
    def noise_moment(self, variances: Tensor) -> Moment:
        """`moment` of independent noise in whitened coordinates, Sᵀ diag(variances) S: how damping enters."""

    @abstractmethod
    def eye_(self) -> None:
        """Set S = I."""

    @abstractmethod
    def scale_(self, factor: float) -> None:
        """Set S ← factor · S."""

    @abstractmethod
    def natural_step_(self, moment: Moment, eta: float) -> None:
        """S ← S (I − η/2 (M − I)), M the whitened second moment SᵀCS; clipped so that it stays invertible."""

    @abstractmethod
    def eigenbasis_(self, moment: Moment) -> Tensor:
        """Set S to the eigenvectors of the given (unwhitened) second moment; its eigenvalues, [dim]."""

    @abstractmethod
    def inverse_transpose(self) -> Factor:
        """S⁻ᵀ, the factor of (SSᵀ)⁻¹, in the same structure and without gradients."""

    def apply_matrix(self, X: Tensor) -> Tensor:
        """S x for each row x of X [..., dim]."""
        return self.apply_(X, _same, False)

    def apply_transpose(self, X: Tensor) -> Tensor:
        """Sᵀ x for each row x of X [..., dim]."""
        return self.apply_(X, _same, True)

    def apply_squares(self, X: Tensor) -> Tensor:
        """(S∘S) x for each row x of X [..., dim]; with x = 1 this is diag(SSᵀ)."""
        return self.apply_(X, torch.square, False)

    def solve_matrix(self, X: Tensor) -> Tensor:
        """S⁻¹ x for each row x of X [..., dim]."""
        return _solve_rows(self.dense(), X)

    def solve_transpose(self, X: Tensor) -> Tensor:
        """S⁻ᵀ x for each row x of X [..., dim]."""
        return _solve_rows(self.dense().mT, X)

    def left(self, X: Tensor) -> Tensor:
        """S X for X [..., dim, k]."""
        return self.apply_matrix(X.mT).mT

    def left_transpose(self, X: Tensor) -> Tensor:
        """Sᵀ X for X [..., dim, k]."""
        return self.apply_transpose(X.mT).mT

    def left_squares(self, X: Tensor) -> Tensor:
        """(S∘S) X for X [..., dim, k]."""
        return self.apply_squares(X.mT).mT

    def gram_diag(self) -> Tensor:
        """diag(SSᵀ), [dim]."""
        return self.apply_squares(self.ones())

    def column_norms(self) -> Tensor:
        """The squared lengths of the columns of S, [dim]."""
        return self.apply_(self.ones(), torch.square, True)

    def ones(self) -> Tensor:
        """A vector of ones on this factor's device and dtype, [dim]."""
        reference = next(self.parameters())
        return torch.ones(self.dim, dtype=reference.dtype, device=reference.device)


class FullFactor(Factor):
    """S is any square matrix; with `triangular`, the lower triangle of it."""

    def __init__(self, dim: int, *, triangular: bool = False) -> None:
        super().__init__()
        self.dim = dim
        self.triangular = triangular
        self.matrix = nn.Parameter(torch.eye(dim))

    def dense(self) -> Tensor:
        return self.matrix.tril() if self.triangular else self.matrix

    def apply_(self, X: Tensor, f: Callable[[Tensor], Tensor], transpose: bool) -> Tensor:
        S = f(self.dense())
        return X @ (S if transpose else S.mT)

    def left(self, X: Tensor) -> Tensor:
        return self.dense() @ X

    def left_transpose(self, X: Tensor) -> Tensor:
        return self.dense().mT @ X

    @torch.no_grad()
    def inverse_transpose(self) -> Factor:
        found = FullFactor(self.dim).to(self.matrix)
        found.matrix.copy_(_inverse(self.dense()).mT)
        return found.requires_grad_(False)

    def column_norms(self) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(self.dense(), dim=0)
        return norms.square()

    def moment(self, Y: Tensor) -> Moment:
        return (Y.mT @ Y,)

    def noise_moment(self, variances: Tensor) -> Moment:
        return (_congruence(self.dense(), variances),)

    def eye_(self) -> None:
        with torch.no_grad():
            self.matrix.zero_().fill_diagonal_(1.0)

    def scale_(self, factor: float) -> None:
        with torch.no_grad():
            self.matrix.mul_(factor)

    def natural_step_(self, moment: Moment, eta: float) -> None:
        with torch.no_grad():
            self.matrix.copy_(natural_matrix_step(self.dense(), moment[0], eta, triangular=self.triangular))

    def eigenbasis_(self, moment: Moment) -> Tensor:
        if self.triangular:  # a triangular S cannot be orthogonal: keep the identity
            self.eye_()
            return moment[0].diagonal()
        with torch.no_grad():
            values: Tensor
            values, basis = torch.linalg.eigh(moment[0].double())
            self.matrix.copy_(basis)
        return values.to(self.matrix.dtype)


class DiagonalFactor(Factor):
    """S = diag(exp(log_s)): the fallback for a side too large for anything richer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.log_s = nn.Parameter(torch.zeros(dim))

    def dense(self) -> Tensor:
        return torch.diag(self.log_s.exp())

    def apply_(self, X: Tensor, f: Callable[[Tensor], Tensor], transpose: bool) -> Tensor:
        return X * f(self.log_s.exp())

    def solve_matrix(self, X: Tensor) -> Tensor:
        return X * (-self.log_s).exp()

    def solve_transpose(self, X: Tensor) -> Tensor:
        return X * (-self.log_s).exp()

    @torch.no_grad()
    def inverse_transpose(self) -> Factor:
        found = DiagonalFactor(self.dim).to(self.log_s)
        found.log_s.copy_(-self.log_s)
        return found.requires_grad_(False)

    def moment(self, Y: Tensor) -> Moment:
        return (Y.square().sum(0),)

    def noise_moment(self, variances: Tensor) -> Moment:
        return (variances * (2 * self.log_s).exp(),)

    def eye_(self) -> None:
        with torch.no_grad():
            self.log_s.zero_()

    def scale_(self, factor: float) -> None:
        with torch.no_grad():
            self.log_s.add_(torch.tensor(factor, dtype=self.log_s.dtype).log())

    def natural_step_(self, moment: Moment, eta: float) -> None:
        with torch.no_grad():  # exact running average of the precision: 1/s² ← (1−η)/s² + η c
            self.log_s.sub_(0.5 * torch.log((1 - eta) + eta * moment[0]))

    def eigenbasis_(self, moment: Moment) -> Tensor:
        self.eye_()
        return moment[0]


class BlockFactor(Factor):
    """S block-diagonal with blocks of size `block`; the last block may be smaller (ragged)."""

    def __init__(self, dim: int, block: int) -> None:
        super().__init__()
        if block < 1:
            raise ValueError(f"block size must be >= 1, got {block}")
        self.dim = dim
        self.block = min(block, dim)
        self.count = -(-dim // self.block)
        self.matrix = nn.Parameter(torch.eye(self.block).repeat(self.count, 1, 1))

    @property
    def padding(self) -> int:
        return self.count * self.block - self.dim

    def _fold(self, X: Tensor) -> Tensor:
        padded = nn.functional.pad(X, (0, self.padding))
        return padded.reshape(*X.shape[:-1], self.count, self.block)

    def _matrix(self) -> Tensor:
        """The blocks, with whatever lies in the padding of the last one cut off from the rest."""
        if self.padding == 0:
            return self.matrix
        valid = torch.ones(self.count * self.block, dtype=self.matrix.dtype, device=self.matrix.device)
        valid[self.dim :] = 0
        valid = valid.view(self.count, self.block)
        return self.matrix * valid.unsqueeze(-1) * valid.unsqueeze(-2)

    def dense(self) -> Tensor:
        full: Tensor = torch.block_diag(*self.matrix.unbind(0))
        return full[: self.dim, : self.dim]

    def apply_(self, X: Tensor, f: Callable[[Tensor], Tensor], transpose: bool) -> Tensor:
        S = f(self._matrix())
        folded = self._fold(X)
        out: Tensor = torch.einsum("...ki,kij->...kj", folded, S if transpose else S.mT)
        return out.flatten(-2)[..., : self.dim]

    def solve_matrix(self, X: Tensor) -> Tensor:
        return self._solve(self._invertible(), X)

    def solve_transpose(self, X: Tensor) -> Tensor:
        return self._solve(self._invertible().mT, X)

    def _invertible(self) -> Tensor:
        """The blocks with ones on the diagonal of the padding, where `_matrix` has zeros."""
        padding = torch.zeros(self.count * self.block, dtype=self.matrix.dtype, device=self.matrix.device)
        padding[self.dim :] = 1
        return self._matrix() + torch.diag_embed(padding.view(self.count, self.block))

    def _solve(self, blocks: Tensor, X: Tensor) -> Tensor:
        """Block by block: the whole matrix would be dim × dim."""
        columns = self._fold(X).reshape(-1, self.count, self.block).permute(1, 2, 0)
        solved: Tensor = torch.linalg.solve(blocks, columns).permute(2, 0, 1)
        return solved.reshape(*X.shape[:-1], -1)[..., : self.dim]

    @torch.no_grad()
    def inverse_transpose(self) -> Factor:
        found = BlockFactor(self.dim, self.block).to(self.matrix)
        found.matrix.copy_(_inverse(self._invertible()).mT)
        return found.requires_grad_(False)

    def moment(self, Y: Tensor) -> Moment:
        folded = self._fold(Y).transpose(0, 1)  # [count, N, block]
        return (folded.mT @ folded,)

    def noise_moment(self, variances: Tensor) -> Moment:
        return (_congruence(self._matrix(), self._fold(variances)),)

    def eye_(self) -> None:
        with torch.no_grad():
            self.matrix.copy_(torch.eye(self.block).expand_as(self.matrix))

    def scale_(self, factor: float) -> None:
        with torch.no_grad():
            self.matrix.mul_(factor)

    def natural_step_(self, moment: Moment, eta: float) -> None:
        with torch.no_grad():
            M = moment[0].clone()
            if self.padding:  # nothing is known about the padding: leave it as it is
                keep = self.block - self.padding
                M[-1, keep:, keep:] = torch.eye(self.padding, dtype=M.dtype, device=M.device)
            self.matrix.copy_(natural_matrix_step(self.matrix, M, eta))

    def eigenbasis_(self, moment: Moment) -> Tensor:
        with torch.no_grad():
            C = moment[0].double()
            values: Tensor
            values, basis = torch.linalg.eigh(C)
            if self.padding:
                keep = self.block - self.padding
                basis[-1] = torch.eye(self.block, dtype=C.dtype, device=C.device)
                values[-1, :keep], basis[-1, :keep, :keep] = torch.linalg.eigh(C[-1, :keep, :keep])
            self.matrix.copy_(basis)
        return values.flatten()[: self.dim].to(self.matrix.dtype)


class SplitFactor(Factor):
    """S = (S_channel ⊗ S_kernel) ⊕ s_bias: the input side of a convolution, 3–8× cheaper than full."""

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
        main = torch.kron(self.channel.contiguous(), self.position.contiguous())
        matrix: Tensor = torch.block_diag(main, *self.log_bias.exp())
        return matrix

    def apply_(self, X: Tensor, f: Callable[[Tensor], Tensor], transpose: bool) -> Tensor:
        main, last = self._fold(X)
        C, K = f(self.channel), f(self.position)
        main = (C.mT if transpose else C) @ main @ (K if transpose else K.mT)
        return torch.cat([main.flatten(-2), last * f(self.log_bias.exp())], dim=-1)

    def solve_matrix(self, X: Tensor) -> Tensor:
        return self._solve(X, self.channel, self.position)

    def solve_transpose(self, X: Tensor) -> Tensor:
        return self._solve(X, self.channel.mT, self.position.mT)

    def _solve(self, X: Tensor, channel: Tensor, position: Tensor) -> Tensor:
        main, last = self._fold(X)
        half: Tensor = torch.linalg.solve(channel, main)
        whole: Tensor = torch.linalg.solve(position, half.mT).mT
        return torch.cat([whole.flatten(-2), last * (-self.log_bias).exp()], dim=-1)

    @torch.no_grad()
    def inverse_transpose(self) -> Factor:
        found = SplitFactor(self.channels, self.kernel, bias=self.bias).to(self.channel)
        found.channel.copy_(_inverse(self.channel).mT)
        found.position.copy_(_inverse(self.position).mT)
        found.log_bias.copy_(-self.log_bias)
        return found.requires_grad_(False)

    def moment(self, Y: Tensor) -> Moment:
        main, last = self._fold(Y)
        channel = torch.einsum("nak,nbk->ab", main, main) / self.kernel
        position = torch.einsum("nci,ncj->ij", main, main) / self.channels
        return channel, position, last.square().sum(0)

    def noise_moment(self, variances: Tensor) -> Moment:
        main, last = self._fold(variances)
        channel = main @ self.position.square().sum(-1) / self.kernel
        position = main.mT @ self.channel.square().sum(-1) / self.channels
        return (
            _congruence(self.channel, channel),
            _congruence(self.position, position),
            last * (2 * self.log_bias).exp(),
        )

    def eye_(self) -> None:
        with torch.no_grad():
            self.channel.zero_().fill_diagonal_(1.0)
            self.position.zero_().fill_diagonal_(1.0)
            self.log_bias.zero_()

    def scale_(self, factor: float) -> None:
        with torch.no_grad():
            self.channel.mul_(factor)
            self.log_bias.add_(torch.tensor(factor, dtype=self.log_bias.dtype).log())

    def natural_step_(self, moment: Moment, eta: float) -> None:
        with torch.no_grad():
            self.channel.copy_(natural_matrix_step(self.channel, moment[0], eta))
            self.position.copy_(natural_matrix_step(self.position, moment[1], eta))
            self.log_bias.sub_(0.5 * torch.log((1 - eta) + eta * moment[2]))

    def eigenbasis_(self, moment: Moment) -> Tensor:
        with torch.no_grad():
            channel, basis = torch.linalg.eigh(moment[0].double())
            self.channel.copy_(basis)
            position, basis = torch.linalg.eigh(moment[1].double())
            self.position.copy_(basis)
            self.log_bias.zero_()
        main = torch.outer(channel, position / position.mean().clamp(min=1e-300)).flatten()
        return torch.cat([main.to(self.channel.dtype), moment[2]])


def natural_matrix_step(S: Tensor, M: Tensor, eta: float, *, triangular: bool = False) -> Tensor:
    """S (I − η/2 (M − I)), the inverse-free natural step on log det; M = SᵀCS, [..., k, k].

    The step is clipped to η‖M − I‖_F ≤ 1, so that I − η/2 (M − I) has eigenvalues in [½, 3/2] and S
    stays invertible: "matrix not positive definite" cannot happen, whatever the data.
    """
    delta = M - torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    norm = torch.linalg.matrix_norm(delta)
    delta = delta * (eta / (eta * norm).clamp(min=1.0))[..., None, None]
    if triangular:  # S Δ' with Δ' lower and Δ' + Δ'ᵀ = Δ, so that to first order SSᵀ moves as before
        delta = delta.tril(-1) * 2 + torch.diag_embed(delta.diagonal(dim1=-2, dim2=-1))
    stepped: Tensor = S - 0.5 * (S @ delta)
    return stepped


def add_moments(a: Moment, b: Moment) -> Moment:
    """The sum of two moments of one factor."""
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _congruence(S: Tensor, variances: Tensor) -> Tensor:
    """Sᵀ diag(variances) S."""
    return (S.mT * variances.unsqueeze(-2)) @ S


def _solve_rows(S: Tensor, X: Tensor) -> Tensor:
    flat = X.reshape(-1, X.shape[-1])
    solved: Tensor = torch.linalg.solve(S, flat.mT).mT
    return solved.reshape(X.shape)


def _inverse(S: Tensor) -> Tensor:
    """S⁻¹; what is singular in floating point gives numbers that are not finite, and no error."""
    inverse: Tensor = torch.linalg.inv_ex(S).inverse
    return inverse


def _same(S: Tensor) -> Tensor:
    return S
