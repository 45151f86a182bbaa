"""Packed state dicts of sparse models: one bit per weight for the mask, and the non-zero values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from fishleg.formats.tensor_files import read_tensors
from fishleg.options.text import printable

_ENTRIES = _MASK, _VALUES, _SHAPE = ".$mask", ".$values", ".$shape"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DIMENSIONS = 64  # the most that torch allows


def pack(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Store the sparse tensors of a state dict as a bit mask and their non-zero values.

    A floating-point tensor of 16 bits or more is packed if this makes it smaller; all others are copied.

    Args:
        state: A state dict.

    Returns:
        A flat dictionary of tensors, which safetensors can save. A packed tensor has three entries.

    Raises:
        ValueError: If a tensor has a name that would be taken for an entry of a packed one.

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
        if name.endswith(_ENTRIES):
            raise ValueError(f"{name} cannot be packed: names that end in {', '.join(_ENTRIES)} are reserved")
        tensor = tensor.detach().cpu().contiguous()
        if tensor.dtype not in _FLOATS:
            packed[name] = tensor.clone()
            continue
        kept = tensor.flatten() != 0
        values = tensor.flatten()[kept]
        mask_bytes = (tensor.numel() + 7) // 8
        packed_bytes = mask_bytes + values.numel() * tensor.element_size()
        if packed_bytes >= tensor.nbytes:
            packed[name] = tensor.clone()
            continue
        padded = torch.zeros(8 * mask_bytes, dtype=torch.uint8)
        padded[: tensor.numel()] = kept
        powers = 2 ** torch.arange(8, dtype=torch.uint8)
        packed[name + _MASK] = (padded.view(-1, 8) * powers).sum(1, dtype=torch.uint8)
        packed[name + _VALUES] = values
        packed[name + _SHAPE] = torch.tensor(tensor.shape, dtype=torch.int64)
    return packed


def unpack(packed: Mapping[str, Tensor] | str | Path) -> dict[str, Tensor]:
    """Restore the state dict that was packed by `pack`.

    Args:
        packed: The result of `pack`, or the path of a safetensors file that holds it. Tensors that were not
            packed are returned as they are.

    Returns:
        The state dict.

    Raises:
        ValueError: If the entries of a packed tensor are incomplete or contradict each other, or the file is
            no safetensors file. All tensors are checked before memory is allocated for one of them.
    """
    if isinstance(packed, (str, Path)):
        packed, _ = read_tensors(Path(packed))
    names = {_whole_name(entry): None for entry in packed}  # in the order of the entries, each once
    shapes = {name: _checked_shape(name, packed) for name in names}
    return {
        name: packed[name] if shape is None else _dense(name, packed, shape) for name, shape in shapes.items()
    }


def _whole_name(entry: str) -> str:
    """Return the name of the tensor that an entry belongs to."""
    return next((entry.removesuffix(end) for end in _ENTRIES if entry.endswith(end)), entry)


def _dense(name: str, packed: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
    values = packed[name + _VALUES]
    dense = torch.zeros(shape.numel(), dtype=values.dtype)
    dense[_bits(packed[name + _MASK])[: shape.numel()]] = values
    return dense.view(shape)


def _bits(mask: Tensor) -> Tensor:
    return ((mask.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten().bool()


def _checked_shape(name: str, packed: Mapping[str, Tensor]) -> torch.Size | None:
    """Return the shape of a packed tensor; None: the tensor is not packed.

    Raises:
        ValueError: If its entries are incomplete or contradict each other.
    """
    there = [end for end in _ENTRIES if name + end in packed]
    if not there:
        return None
    shown = printable(name, one_line=True)
    if name in packed:
        raise ValueError(f"{shown} is there twice: packed ({shown}{there[0]}) and as it is")
    if len(there) < len(_ENTRIES):
        missing = next(end for end in _ENTRIES if end not in there)
        raise ValueError(f"{shown} is packed incompletely: {shown}{there[0]} has no partner {shown}{missing}")
    mask, values, sizes = (packed[name + end] for end in _ENTRIES)
    for end, tensor, allowed in ((_MASK, mask, (torch.uint8,)), (_VALUES, values, _FLOATS)):
        if tensor.dim() != 1 or tensor.dtype not in allowed:
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
            raise ValueError(f"{shown}{end} must be a vector of {kinds}, got {_described(tensor)}")
    # a scalar has no sizes; the element type of that empty vector does not matter
    if sizes.dim() != 1 or (sizes.dtype != torch.int64 and len(sizes)):
        raise ValueError(f"{shown}{_SHAPE} must be a vector of int64, got {_described(sizes)}")
    shape = sizes.tolist() if len(sizes) <= _DIMENSIONS else []
    if len(sizes) > _DIMENSIONS or any(size < 1 for size in shape):
        raise ValueError(
            f"{shown}{_SHAPE} must hold at most {_DIMENSIONS} sizes >= 1, got {sizes[:_DIMENSIONS].tolist()}"
        )
    count = math.prod(shape)  # of Python, without overflow
    if len(mask) != (count + 7) // 8:
        raise ValueError(
            f"{shown}{_MASK} must have {(count + 7) // 8:,} bytes for the shape {shape}, got {len(mask):,}"
        )
    bits = _bits(mask)
    if bool(bits[count:].any()):
        raise ValueError(f"{shown}{_MASK} has bits set after its last weight ({count:,} weights)")
    if int(bits.sum()) != len(values):
        raise ValueError(
            f"{shown}{_VALUES} must have one value for each of the {int(bits.sum()):,} bits that are set in "
            f"{shown}{_MASK}, got {len(values):,}"
        )
    return torch.Size(shape)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
