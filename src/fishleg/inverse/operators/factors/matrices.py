"""Functions of dense matrices that several factor families share."""

from __future__ import annotations

import torch
from torch import Tensor


def natural_matrix_step(S: Tensor, M: Tensor, eta: float, *, triangular: bool = False) -> Tensor:
    """Compute S (I − η/2 (M − I)), the inverse-free natural step of a matrix factor.

    The step is clipped to η‖M − I‖_F ≤ 1. Then I − η/2 (M − I) has eigenvalues in [½, 3/2], and S stays
    invertible for any data.

    Args:
        S: The factor, [..., k, k].
        M: The whitened second moment SᵀCS, [..., k, k].
        eta: The step size η.
        triangular: Whether S is lower triangular and has to stay so.

    Returns:
        The factor after the step, [..., k, k].
    """
    delta = M - torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    norm = torch.linalg.matrix_norm(delta)
    delta = delta * (eta / (eta * norm).clamp(min=1.0))[..., None, None]
    if triangular:  # S Δ' with Δ' lower and Δ' + Δ'ᵀ = 2Δ, so that SSᵀ changes equally to first order
        delta = delta.tril(-1) * 2 + torch.diag_embed(delta.diagonal(dim1=-2, dim2=-1))
    stepped: Tensor = S - 0.5 * (S @ delta)
    return stepped


def congruence(S: Tensor, variances: Tensor) -> Tensor:
    """Compute Sᵀ diag(variances) S.

    Args:
        S: Matrices, [..., k, k].
        variances: Diagonals, [..., k].

    Returns:
        The products, [..., k, k].
    """
    return (S.mT * variances.unsqueeze(-2)) @ S


def inverse(S: Tensor) -> Tensor:
    """Compute S⁻¹. A matrix that is singular in floating point gives non-finite entries and no error.

    Args:
        S: Matrices, [..., k, k].

    Returns:
        The inverses, [..., k, k].
    """
    found: Tensor = torch.linalg.inv_ex(S).inverse
    return found
