"""Small problems of optimal brain surgery, and their brute-force solution."""

import torch
from hypothesis import strategies as st
from operator_makers import MAKERS, Dims, make
from torch import Tensor

from fishleg.inverse.operators import Operator

STRUCTURES = [
    "dense-only",
    "identity",
    "diagonal",
    "gram-full",
    "gram-triangular",
    "gram-block",
    "low-rank",
    "kronecker-(full*full)",
    "kronecker-D(full*full)",
    "kronecker-(full*full)E",
    "kronecker-D(full*full)E",
    "kronecker-D(block*triangular)E",
    "kronecker-D(diagonal*split+bias)E",
]


KRONECKER = [name for name in MAKERS if name.startswith("kronecker")]


small = st.builds(
    Dims, st.integers(1, 3), st.integers(1, 2), st.just(1), st.integers(1, 4), st.integers(0, 999)
)


def problem(name: str, d: Dims, fraction: float = 0.5) -> tuple[Tensor, Operator, Tensor]:
    """Random weights, a random Q, and a random non-empty set of removed weights."""
    q = make(name, d).requires_grad_(False)
    generator = torch.Generator().manual_seed(d.seed + 1)
    w = torch.randn(q.shape, generator=generator)
    removed = torch.rand(q.shape, generator=generator) < fraction
    removed.view(-1)[int(torch.randint(q.n, (1,), generator=generator))] = True
    return w, q, removed


def brute_force(
    w: Tensor, Q: Tensor, removed: Tensor, gradient: Tensor | None = None
) -> tuple[Tensor, float]:
    """argmin and min of gᵀδ + ½ δᵀQ⁻¹δ subject to δ_P = −w_P, by its KKT system."""
    n, P = len(Q), removed.flatten().nonzero().flatten()
    H, E = torch.linalg.inv(Q), torch.eye(n)[:, P]
    g = torch.zeros(n) if gradient is None else gradient.flatten()
    system = torch.cat([torch.cat([H, E], 1), torch.cat([E.T, torch.zeros(len(P), len(P))], 1)])
    delta = torch.linalg.solve(system, torch.cat([-g, -w.flatten()[P]]))[:n]
    return delta.view(w.shape), float(g @ delta + 0.5 * delta @ H @ delta)
