"""TODO."""

from __future__ import annotations

import torch
from torch import Tensor

from fishleg.inverse.operators import Kronecker, Operator


def saliency(w: Tensor, q: Operator) -> Tensor:
    """ρ_i = w_i² / 2Q_ii, the loss increase of deleting weight i alone, optimally compensated."""
    return w.square() / (2 * q.diag())


def group_saliency(w: Tensor, q: Operator, groups: Tensor) -> Tensor:
    """½ w_Gᵀ (Q_GG)⁻¹ w_G for each row G of groups [count, size] of flat indices: [count]."""
    values = w.flatten()[groups]
    scores = []
    for index, part in zip(groups.split(8192), values.split(8192), strict=True):
        solved = torch.linalg.solve(q.blocks(index), part.unsqueeze(-1)).squeeze(-1)
        scores.append(0.5 * (part * solved).sum(-1))
    return torch.cat(scores)


def row_saliency(w: Tensor, q: Operator) -> Tensor:
    """½ w_oᵀ (Q_oo)⁻¹ w_o for each row o (output channel) of w [n_out, n_in]: [n_out].

    For Kronecker forms in closed form: Q_oo = D_o R diag(s_o) Rᵀ D_o with s = (L∘L)E², so the score is
    ½‖s_o^{-½} ∘ R⁻¹(w_o/d_o)‖².
    """
    n_out, n_in = w.shape
    if isinstance(q, Kronecker):
        scaled = w if q.log_d is None else w / q.log_d.exp()
        whitened = q.R.solve_matrix(scaled)
        e2 = torch.ones_like(w) if q.log_e is None else (2 * q.log_e).exp()
        scores: Tensor = 0.5 * (whitened.square() / q.L.left_squares(e2)).sum(-1)
        return scores
    return group_saliency(w, q, torch.arange(n_out * n_in, device=w.device).view(n_out, n_in))
