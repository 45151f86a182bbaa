"""Inverse square roots of symmetric matrices."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_root(matrix: Tensor) -> Tensor:
    """Return matrix^(−½), symmetric, from the eigendecomposition in float64.

    A nearly singular matrix does not make it fail. Symmetry matters for a ragged last block: its padding
    stays apart from its weights.

    Args:
        matrix: Symmetric positive semi-definite, [..., n, n].

    Returns:
        The root, in the dtype of the matrix, [..., n, n].
    """
    values, vectors = torch.linalg.eigh(matrix.double())
    top = values[..., -1:].clamp(min=1e-300)
    root: Tensor = (vectors * values.clamp(min=top * 1e-14).rsqrt().unsqueeze(-2)) @ vectors.mT
    return root.to(matrix.dtype)
