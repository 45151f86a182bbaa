"""Small files for sparse models: a bit per weight says whether it is kept, and the kept ones follow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

_MASK, _VALUES, _SHAPE = ".$mask", ".$values", ".$shape"


def pack(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict in which every floating-point tensor that shrinks by it is stored as bits and values."""
    packed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        tensor = tensor.detach().cpu().contiguous()
        kept = tensor.flatten() != 0
        values = tensor.flatten()[kept]
        bits = (tensor.numel() + 7) // 8
        if not tensor.is_floating_point() or bits + values.numel() * tensor.element_size() >= tensor.nbytes:
            packed[name] = tensor.clone()
            continue
        padded = torch.zeros(8 * bits, dtype=torch.uint8)
        padded[: tensor.numel()] = kept
        weights = 2 ** torch.arange(8, dtype=torch.uint8)
        packed[name + _MASK] = (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
        packed[name + _VALUES] = values
        packed[name + _SHAPE] = torch.tensor(tensor.shape)
    return packed


def unpack(packed: Mapping[str, Tensor] | str | Path) -> dict[str, Tensor]:
    """The plain state dict of a packed one, or of its file; one that was never packed stays as it is."""
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
