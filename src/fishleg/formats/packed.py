"""Packed state dicts of sparse models: one bit per weight for the mask, and the non-zero values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

_MASK, _VALUES, _SHAPE = ".$mask", ".$values", ".$shape"


def pack(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Store the sparse tensors of a state dict as a bit mask and their non-zero values.

    A floating-point tensor is packed if this makes it smaller; all others are copied.

    Args:
        state: A state dict.

    Returns:
        A flat dictionary of tensors, which safetensors can save. A packed tensor has three entries.

    Example:
        >>> weight = torch.zeros(64, 64)
        >>> weight[0] = 1
        >>> sum(tensor.nbytes for tensor in pack({"weight": weight}).values()), weight.nbytes
        (784, 16384)
        >>> torch.equal(unpack(pack({"weight": weight}))["weight"], weight)
        True
    """
    packed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        tensor = tensor.detach().cpu().contiguous()
        kept = tensor.flatten() != 0
        values = tensor.flatten()[kept]
        mask_bytes = (tensor.numel() + 7) // 8
        packed_bytes = mask_bytes + values.numel() * tensor.element_size()
        if not tensor.is_floating_point() or packed_bytes >= tensor.nbytes:
            packed[name] = tensor.clone()
            continue
        padded = torch.zeros(8 * mask_bytes, dtype=torch.uint8)
        padded[: tensor.numel()] = kept
        powers = 2 ** torch.arange(8, dtype=torch.uint8)
        packed[name + _MASK] = (padded.view(-1, 8) * powers).sum(1, dtype=torch.uint8)
        packed[name + _VALUES] = values
        packed[name + _SHAPE] = torch.tensor(tensor.shape)
    return packed


def unpack(packed: Mapping[str, Tensor] | str | Path) -> dict[str, Tensor]:
    """Restore the state dict that was packed by `pack`.

    Args:
        packed: The result of `pack`, or the path of a safetensors file that holds it. Tensors that were not
            packed are returned as they are.

    Returns:
        The state dict.
    """
    if isinstance(packed, (str, Path)):
        from safetensors.torch import load_file

        packed = load_file(packed)
    state: dict[str, Tensor] = {}
    for name, tensor in packed.items():
        if name.endswith(_MASK):
            name = name.removesuffix(_MASK)
            shape = torch.Size(packed[name + _SHAPE].tolist())
            bits = (tensor.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1
            values = packed[name + _VALUES]
            dense = torch.zeros(shape.numel(), dtype=values.dtype)
            dense[bits.flatten()[: shape.numel()].bool()] = values
            state[name] = dense.view(shape)
        elif not name.endswith((_VALUES, _SHAPE)):
            state[name] = tensor
    return state
