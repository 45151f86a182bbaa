"""The operators under test: one line in MAKERS adds one to every test; `definition` says what it must be."""

from collections.abc import Callable
from functools import singledispatch
from itertools import product
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from oracles import randomise_
from torch import Tensor, nn

from fishleg.inverse.operators import (
    BlockFactor,
    Diagonal,
    DiagonalFactor,
    Factor,
    FullFactor,
    Gram,
    Identity,
    Kronecker,
    LowRank,
    Masked,
    Operator,
    SplitFactor,
)


class Dims(NamedTuple):
    """Drawn sizes: a weight [rows, channels·kernel] and a block size that may exceed it."""

    rows: int
    channels: int
    kernel: int
    block: int
    seed: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.channels * self.kernel

    @property
    def n(self) -> int:
        return self.rows * self.channels * self.kernel

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


dims = st.builds(
    Dims, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 7), st.integers(0, 2**31)
)


class DenseOnly(Operator):
    """What a user writes: dense() and nothing else. It tests the methods of the base class."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape = shape
        self.matrix = nn.Parameter(torch.eye(self.n))

    def dense(self) -> Tensor:
        return self.matrix @ self.matrix.T


# --- one line adds an operator to every test ----------------------------------------------------------------

LEFT: dict[str, Callable[[Dims], Factor]] = {
    "full": lambda d: FullFactor(d.rows),
    "triangular": lambda d: FullFactor(d.rows, triangular=True),
    "block": lambda d: BlockFactor(d.rows, d.block),
    "diagonal": lambda d: DiagonalFactor(d.rows),
}
RIGHT: dict[str, Callable[[Dims], Factor]] = {
    "full": lambda d: FullFactor(d.shape[1]),
    "triangular": lambda d: FullFactor(d.shape[1], triangular=True),
    "block": lambda d: BlockFactor(d.shape[1], d.block),
    "diagonal": lambda d: DiagonalFactor(d.shape[1]),
    "split": lambda d: SplitFactor(d.channels, d.kernel),
    "split+bias": lambda d: SplitFactor(d.channels, d.kernel, bias=True),
}
MAKERS: dict[str, Callable[[Dims], Operator]] = {
    "dense-only": lambda d: DenseOnly(d.shape),
    "identity": lambda d: Identity(d.shape, 2.5),
    "diagonal": lambda d: Diagonal(d.shape),
    "gram-full": lambda d: Gram(d.shape, FullFactor(d.n)),
    "gram-triangular": lambda d: Gram(d.shape, FullFactor(d.n, triangular=True)),
    "gram-block": lambda d: Gram(d.shape, BlockFactor(d.n, d.block)),
    "gram-diagonal": lambda d: Gram((d.n,), DiagonalFactor(d.n)),
    "gram-split": lambda d: Gram((d.channels, d.kernel), SplitFactor(d.channels, d.kernel)),
    "gram-split+bias": lambda d: Gram(
        (d.channels * d.kernel + 1,), SplitFactor(d.channels, d.kernel, bias=True)
    ),
    "low-rank": lambda d: LowRank(d.shape, torch.zeros(d.block, *d.shape), 0.3),
}
# Every pair of factors without diagonals and with both; one diagonal alone for two pairs.
ONE_DIAGONAL = [("full", "full"), ("diagonal", "diagonal")]
for (left, right), outer, inner in product(product(LEFT, RIGHT), (False, True), (False, True)):
    if outer != inner and (left, right) not in ONE_DIAGONAL:
        continue
    MAKERS[f"kronecker-{'D' * outer}({left}*{right}){'E' * inner}"] = (
        lambda d, left=left, right=right, outer=outer, inner=inner: Kronecker(
            LEFT[left](d), RIGHT[right](d), outer=outer, inner=inner
        )
    )


def masked(maker: Callable[[Dims], Operator]) -> Callable[[Dims], Operator]:
    def make(d: Dims) -> Operator:
        inner = maker(d)
        return Masked(inner, torch.rand(inner.shape, generator=d.generator()) < 0.6)

    return make


for key in ("identity", "diagonal", "gram-full", "gram-block", "low-rank", "kronecker-D(full*split+bias)E"):
    MAKERS[f"masked-{key}"] = masked(MAKERS[key])


def make(name: str, d: Dims) -> Operator:
    return randomise_(MAKERS[name](d), d.generator())


# --- the definitions, written from the raw parameters -------------------------------------------------------


@singledispatch
def definition(operator: Operator) -> Tensor:
    raise NotImplementedError(f"write down the definition of {type(operator).__name__}")


@definition.register
def _(q: DenseOnly) -> Tensor:
    return torch.einsum("ik,jk->ij", q.matrix, q.matrix)


@definition.register
def _(q: Identity) -> Tensor:
    return torch.diag(torch.full((q.n,), 2.5))


@definition.register
def _(q: Diagonal) -> Tensor:
    return torch.eye(q.n) * q.log_q.exp().reshape(1, -1)


@definition.register
def _(q: Gram) -> Tensor:
    return torch.einsum("ik,jk->ij", factor_definition(q.factor), factor_definition(q.factor))


@definition.register
def _(q: Kronecker) -> Tensor:
    L, R = factor_definition(q.L), factor_definition(q.R)
    one = torch.ones(q.shape)
    d = one if q.log_d is None else q.log_d.exp()
    e = one if q.log_e is None else q.log_e.exp()
    return torch.einsum("oi,oa,ib,ab,pa,jb,pj->oipj", d, L, R, e**2, L, R, d).reshape(q.n, q.n)


@definition.register
def _(q: LowRank) -> Tensor:
    F = sum(torch.outer(g, g) for g in q.samples) / len(q.samples)
    return torch.linalg.solve(F + 0.3 * torch.eye(q.n), torch.eye(q.n))


@definition.register
def _(q: Masked) -> Tensor:
    M = torch.diag(q.mask.flatten().double())
    return M @ definition(q.inner) @ M


def factor_definition(S: Factor) -> Tensor:
    if isinstance(S, DiagonalFactor):
        return torch.eye(S.dim) * S.log_s.exp()
    if isinstance(S, SplitFactor):
        main = torch.einsum("ab,kl->akbl", S.channel, S.position).reshape(S.channels * S.kernel, -1)
        return torch.block_diag(main, S.log_bias.exp().reshape(1, 1)) if S.bias else main
    entry = {
        FullFactor: lambda i, j: S.matrix[i, j] * (not S.triangular or j <= i),
        BlockFactor: lambda i, j: (
            S.matrix[i // S.block, i % S.block, j % S.block] * (i // S.block == j // S.block)
        ),
    }[type(S)]
    return torch.stack([torch.stack([entry(i, j) for j in range(S.dim)]) for i in range(S.dim)])
