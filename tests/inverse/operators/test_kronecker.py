"""The eigenbasis of Kronecker operators."""

import pytest
import torch
from hypothesis import given
from operator_makers import RIGHT, Dims, dims, factor_definition

from fishleg.inverse.operators import BlockFactor


@pytest.mark.parametrize("name", RIGHT)
@given(dims)
def test_eigenbasis_diagonalises_the_moment(name: str, d: Dims) -> None:
    S = RIGHT[name](d)
    spread = torch.randn(30, S.dim, generator=d.generator()) * torch.linspace(1, 2, S.dim)
    moment = S.moment(spread)
    values = S.eigenbasis_(moment)
    basis = factor_definition(S)
    torch.testing.assert_close(basis @ basis.T, torch.eye(S.dim))
    if name in ("full", "block"):
        C = basis.T @ (spread.T @ spread) @ basis
        block = S.block if isinstance(S, BlockFactor) else S.dim
        same = torch.block_diag(*[torch.ones(block, block)] * S.dim)[: S.dim, : S.dim]
        torch.testing.assert_close(C * same, torch.diag(values))
    if name == "split":
        for part, factor in zip(moment, (S.channel, S.position), strict=False):
            rotated = factor.T @ part @ factor
            torch.testing.assert_close(rotated, torch.diag(rotated.diagonal()))
