"""OBS saliency: the loss increase that Q predicts for removing a weight, a group or a row.

Each score assumes that the kept weights of the layer compensate optimally. Paper: eq. (obs_score).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fishleg.inverse.operators import Diagonal, Identity, Kronecker, Operator

_GROUPS_AT_A_TIME = 8192
_ENTRIES_AT_A_TIME = 2**26  # of the blocks Q_GG: 256 MB in float32


def saliency(w: Tensor, q: Operator) -> Tensor:
    """Return the saliency of every single weight.

    ρ_i = w_i² / (2 Q_ii) is the loss increase if weight i alone is removed and the others compensate.
    Paper: eq. (obs_score).

    Args:
        w: The weights of a layer, [n_out, n_in].
        q: The layer's Q.

    Returns:
        The scores, [n_out, n_in].
    """
    return w.square() / (2 * q.diag())


def group_saliency(w: Tensor, q: Operator, groups: Tensor) -> Tensor:
    """Return the saliency of groups of weights.

    ρ_G = ½ w_Gᵀ (Q_GG)⁻¹ w_G is the loss increase if the weights G are removed and the others compensate. For
    a diagonal Q this is ½ Σ w²/q. For others the blocks Q_GG are formed, some at a time.

    Args:
        w: The weights of a layer, [n_out, n_in].
        q: The layer's Q.
        groups: Indices into the flattened w, [count, size].

    Returns:
        The scores, [count].
    """
    values = w.flatten()[groups]
    if isinstance(q, (Diagonal, Identity)):
        closed: Tensor = 0.5 * (values * (values / q.diag().flatten()[groups])).sum(-1)
        return closed
    count = max(1, min(_GROUPS_AT_A_TIME, _ENTRIES_AT_A_TIME // groups.shape[1] ** 2))
    scores = []
    for index, part in zip(groups.split(count), values.split(count), strict=True):
        solved = torch.linalg.solve(q.blocks(index), part.unsqueeze(-1)).squeeze(-1)
        scores.append(0.5 * (part * solved).sum(-1))
    return torch.cat(scores)


def row_saliency(w: Tensor, q: Operator) -> Tensor:
    """Return the saliency of every row (output channel).

    ρ_o = ½ w_oᵀ (Q_oo)⁻¹ w_o. A Kronecker form has a closed form: Q_oo = D_o R diag(s_o) Rᵀ D_o with
    s = (L∘L)E², so that ρ_o = ½‖s_o^{-½} ∘ R⁻¹(w_o/d_o)‖².

    Args:
        w: The weights of a layer, [n_out, n_in].
        q: The layer's Q.

    Returns:
        The scores, [n_out].
    """
    n_out, n_in = w.shape
    if isinstance(q, Kronecker):
        scaled = w if q.log_d is None else w / q.log_d.exp()
        whitened = q.R.solve_matrix(scaled)
        e2 = torch.ones_like(w) if q.log_e is None else (2 * q.log_e).exp()
        scores: Tensor = 0.5 * (whitened.square() / q.L.left_squares(e2)).sum(-1)
        return scores
    return group_saliency(w, q, torch.arange(n_out * n_in, device=w.device).view(n_out, n_in))
