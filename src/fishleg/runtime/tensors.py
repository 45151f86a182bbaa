"""Helpers for single tensors and dictionaries of tensors: bytes, hashes, precision, finiteness."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fishleg.runtime.batches import map_tensors

Tensors = dict[str, Tensor]
"""Tensors by parameter name: the form in which parameters, gradients and products with F or Q are passed."""


def tensor_bytes(tensor: Tensor) -> bytes | memoryview:
    """Return the values of a tensor as bytes, in row-major order.

    Args:
        tensor: A tensor of any dtype, shape and device.

    Returns:
        The bytes; a view without a copy if NumPy is installed.
    """
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    try:
        return memoryview(flat.numpy())
    except RuntimeError:  # NumPy is not installed
        return bytes(flat.tolist())


def digest(batch: Any) -> str:
    """Return a short hash of the values of all tensors in a batch.

    Args:
        batch: A batch of any format.

    Returns:
        16 hexadecimal digits of SHA-256.
    """
    sha256 = hashlib.sha256()

    def add(tensor: Tensor) -> Tensor:
        sha256.update(tensor_bytes(tensor))
        return tensor

    map_tensors(batch, add)
    return sha256.hexdigest()[:16]


def at_least_float32(tensor: Tensor) -> Tensor:
    """Convert a tensor of lower precision to float32.

    Sums of squares, their inverses and KL divergences are not accurate enough in half precision.

    Args:
        tensor: A tensor of any dtype.

    Returns:
        The tensor itself if it is float32 or float64, otherwise its float32 copy.
    """
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def first_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Find the first tensor that holds NaN or infinity, in one fused pass over all of them.

    Args:
        tensors: Floating-point tensors by name.

    Returns:
        The name of that tensor, or None if all values are finite.
    """
    if not tensors:
        return None
    norms = torch._foreach_norm([tensor.detach() for tensor in tensors.values()])
    for name, finite in zip(tensors, torch.stack(list(norms)).isfinite().tolist(), strict=True):
        if not finite and not bool(tensors[name].isfinite().all()):  # the norm of finite values may overflow
            return name
    return None


NOT_FINITE = "holds NaN or Inf"
"""The reason that `loading_problem` gives for such values."""


def loading_problem(value: Any, own: Any) -> str | None:
    """Tell why a tensor of a file must not be loaded in the place of a model's own one.

    Floating-point tensors may replace each other if all values stay finite. Others must keep their values.
    Shapes are not compared.

    Args:
        value: The tensor of the file.
        own: The parameter or buffer of the model.

    Returns:
        The reason, for example `is int8, the model has float32`; None: there is none.
    """
    if not isinstance(value, Tensor) or not isinstance(own, Tensor):
        return f"is a {type(value).__name__}, the model has a {type(own).__name__}"
    kinds = [(t.is_floating_point(), t.is_complex()) for t in (value, own)]
    names = [str(t.dtype).removeprefix("torch.") for t in (value, own)]
    if kinds[0] != kinds[1]:
        return f"is {names[0]}, the model has {names[1]}"
    converted = value.detach().to(own.dtype)
    if not any(kinds[0]):
        same = torch.equal(converted.to(value.dtype), value)
        return None if same else f"is {names[0]} with values that do not fit {names[1]} of the model"
    if _is_finite(converted):
        return None
    return f"has values beyond the range of {names[1]}" if _is_finite(value) else NOT_FINITE


def _is_finite(tensor: Tensor) -> bool:
    wide = tensor.float() if tensor.element_size() == 1 else tensor  # torch cannot judge 8-bit numbers
    return bool(wide.isfinite().all())
