"""TODO."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fishleg.runtime.batches import map_tensors

Tensors = dict[str, Tensor]


def tensor_bytes(tensor: torch.Tensor) -> bytes | memoryview:
    """The values of a tensor of any dtype, in row-major order."""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    try:
        return memoryview(flat.numpy())
    except RuntimeError:  # without NumPy
        return bytes(flat.tolist())


def digest(batch: Any) -> str:
    """A short hash of all tensors in a batch."""
    found = hashlib.sha256()

    def add(tensor: torch.Tensor) -> torch.Tensor:
        found.update(tensor_bytes(tensor))
        return tensor

    map_tensors(batch, add)
    return found.hexdigest()[:16]


def at_least_float32(tensor: Tensor) -> Tensor:
    """In float32 at least: sums of squares, their inverses and KLs need more than half precision has."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def first_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with a NaN or Inf, or None; one fused pass over all of them."""
    if not tensors:
        return None
    norms = torch._foreach_norm([tensor.detach() for tensor in tensors.values()])
    for name, finite in zip(tensors, torch.stack(list(norms)).isfinite().tolist(), strict=True):
        if not finite:
            return name
    return None
