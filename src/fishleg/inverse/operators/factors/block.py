"""A block-diagonal factor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fishleg.inverse.operators.factors.base import Factor, Moment
from fishleg.inverse.operators.factors.matrices import congruence, inverse, natural_matrix_step


class BlockFactor(Factor):
    """S is block-diagonal with blocks of one size; the last block may be smaller.

    The parameter stores all blocks in the full size. The part of the last block that lies beyond `dim` is
    padding. `moment` has one part: Σ y yᵀ within each block, [count, block, block].

    Args:
        dim: The number of rows and columns of S.
        block: The size of a block, ≥ 1.

    Raises:
        ValueError: `block` is less than 1.
    """

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
        """The number of rows and columns of the last block that lie beyond `dim`."""
        return self.count * self.block - self.dim

    def _fold(self, X: Tensor) -> Tensor:
        padded = nn.functional.pad(X, (0, self.padding))
        return padded.reshape(*X.shape[:-1], self.count, self.block)

    def blocks(self) -> Tensor:
        """Return the blocks with zeros in the rows and columns of the padding, [count, block, block]."""
        if self.padding == 0:
            return self.matrix
        valid = torch.ones(self.count * self.block, dtype=self.matrix.dtype, device=self.matrix.device)
        valid[self.dim :] = 0
        valid = valid.view(self.count, self.block)
        return self.matrix * valid.unsqueeze(-1) * valid.unsqueeze(-2)

    def dense(self) -> Tensor:
        """Return S, [dim, dim]."""
        full: Tensor = torch.block_diag(*self.matrix.unbind(0))
        return full[: self.dim, : self.dim]

    def gram_blocks(self) -> Tensor:
        """Return the blocks of S Sᵀ, [count, block, block]; zero in the padding."""
        S = self.blocks()
        return S @ S.mT

    def apply_function(self, X: Tensor, function: Callable[[Tensor], Tensor], transpose: bool) -> Tensor:
        """Return f(S) x or f(S)ᵀ x for each row x of X [..., dim]."""
        S = function(self.blocks())
        folded = self._fold(X)
        out: Tensor = torch.einsum("...ki,kij->...kj", folded, S if transpose else S.mT)
        return out.flatten(-2)[..., : self.dim]

    def solve_matrix(self, X: Tensor) -> Tensor:
        """Return S⁻¹ x for each row x of X [..., dim]."""
        return self._solve(self._invertible(), X)

    def solve_transpose(self, X: Tensor) -> Tensor:
        """Return S⁻ᵀ x for each row x of X [..., dim]."""
        return self._solve(self._invertible().mT, X)

    def _invertible(self) -> Tensor:
        """Return the blocks with the identity in the padding, where `_matrix` has zeros."""
        padding = torch.zeros(self.count * self.block, dtype=self.matrix.dtype, device=self.matrix.device)
        padding[self.dim :] = 1
        return self.blocks() + torch.diag_embed(padding.view(self.count, self.block))

    def _solve(self, blocks: Tensor, X: Tensor) -> Tensor:
        """Return the solutions, block by block: the whole matrix would be dim × dim."""
        columns = self._fold(X).reshape(-1, self.count, self.block).permute(1, 2, 0)
        solved: Tensor = torch.linalg.solve(blocks, columns).permute(2, 0, 1)
        return solved.reshape(*X.shape[:-1], -1)[..., : self.dim]

    @torch.no_grad()
    def inverse_transpose(self) -> Factor:
        """Return S⁻ᵀ in the same structure, without gradients."""
        result = BlockFactor(self.dim, self.block).to(self.matrix)
        result.matrix.copy_(inverse(self._invertible()).mT)
        return result.requires_grad_(False)

    def moment(self, Y: Tensor) -> Moment:
        """Return the projected second moment of the rows of Y [N, dim]."""
        folded = self._fold(Y).transpose(0, 1)  # [count, N, block]
        return (folded.mT @ folded,)

    def noise_moment(self, variances: Tensor) -> Moment:
        """Return the projection of Sᵀ diag(variances) S."""
        return (congruence(self.blocks(), self._fold(variances)),)

    def eye_(self) -> None:
        """Set S = I."""
        with torch.no_grad():
            self.matrix.copy_(torch.eye(self.block).expand_as(self.matrix))

    def scale_(self, factor: float) -> None:
        """Set S ← factor · S."""
        with torch.no_grad():
            self.matrix.mul_(factor)

    def natural_step_(self, moment: Moment, eta: float) -> None:
        """Set S ← S (I − η/2 (M − I)), clipped."""
        with torch.no_grad():
            M = moment[0].clone()
            if self.padding:  # M = I leaves the padding as it is
                keep = self.block - self.padding
                M[-1, keep:, keep:] = torch.eye(self.padding, dtype=M.dtype, device=M.device)
            self.matrix.copy_(natural_matrix_step(self.matrix, M, eta))

    def eigenbasis_(self, moment: Moment) -> Tensor:
        """Return the eigenvalues, [dim], after setting S to the eigenvectors."""
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
