"""Replacing parameters and buffers of a model by tensors of other shapes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from fishleg.shrinking.trace import parameter_or_buffer

_SAME_LENGTH = ("weight", "bias", "running_mean", "running_var")  # of one layer: as many entries as rows


def select_indices(tensor: Tensor, kept: Mapping[int, Tensor]) -> Tensor:
    """Return a copy of a tensor with only some indices; its memory format is kept.

    Args:
        tensor: The tensor.
        kept: By dimension, which indices are kept, as boolean tensors [size].

    Returns:
        The smaller tensor.
    """
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = formats.get(tensor.dim(), torch.contiguous_format)
    if tensor.is_contiguous() or not tensor.is_contiguous(memory_format=layout):
        layout = torch.contiguous_format
    value = tensor.detach()
    for dim, keep in kept.items():
        value = value.index_select(dim, keep.nonzero().flatten().to(value.device))
    return value.clone(memory_format=layout)


def replace_tensors(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Replace parameters and buffers in place, in every module that shares them.

    Args:
        model: The model.
        values: The new tensors by name; their shapes may differ from the old ones.
    """
    new = {id(parameter_or_buffer(model, name)): value for name, value in values.items()}
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        changed = False
        for name, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(p) in new:
                parameters.setdefault(id(p), nn.Parameter(new[id(p)], requires_grad=p.requires_grad))
                setattr(module, name, parameters[id(p)])
                changed = True
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if id(buffer) in new:
                setattr(module, name, new[id(buffer)])
                changed = True
        if changed:
            _update_size_attributes(module)


def check_sizes(model: nn.Module, shapes: Mapping[str, torch.Size]) -> None:
    """Check that new shapes agree with each other within each layer, and wherever a tensor is shared.

    Whether the layers fit each other is only known when the model is called.

    Args:
        model: The model.
        shapes: The new shape of every entry of its state dict; no dimension is larger than in the model.

    Raises:
        ValueError: Two shapes contradict each other, or a tensor would be empty.
    """
    shared: dict[int, str] = {}
    for name, shape in shapes.items():
        tensor = parameter_or_buffer(model, name)
        if tensor.numel() and not shape.numel():
            raise ValueError(f"{name} would be empty: its shape is {tuple(shape)}")
        first = shared.setdefault(id(tensor), name)
        if shapes[first] != shape:
            raise ValueError(
                f"{first} and {name} are the same tensor of the model, but have the shapes "
                f"{tuple(shapes[first])} and {tuple(shape)}"
            )
    for prefix, module in model.named_modules():
        names = {key: f"{prefix}.{key}" if prefix else key for key in (*module._parameters, *module._buffers)}
        _check_layer(module, {key: (n, shapes[n]) for key, n in names.items() if n in shapes})


def _check_layer(module: nn.Module, entries: Mapping[str, tuple[str, torch.Size]]) -> None:
    """Check the new shapes of one layer, given as (name, shape) by attribute.

    Raises:
        ValueError: Two of them contradict each other, or a size changes that cannot.
    """
    sized = isinstance(module, (nn.Linear, _ConvNd, _BatchNorm))
    together = [entries[key] for key in _SAME_LENGTH if sized and key in entries]
    for name, shape in together[1:]:
        if shape[0] != together[0][1][0]:
            raise ValueError(
                f"{name} has {shape[0]} entries, but {together[0][0]} of the same layer has "
                f"{together[0][1][0]} rows"
            )
    for key, (name, shape) in entries.items():
        old = getattr(module, key).shape
        free = _free_dimensions(module, key, len(old))
        if shape[free:] != old[free:]:
            raise ValueError(
                f"{name} has shape {tuple(shape)}, but only rows and columns of {tuple(old)} can be cut out"
            )


def _free_dimensions(module: nn.Module, key: str, dimensions: int) -> int:
    """Return how many of the first dimensions of a layer's tensor may become smaller."""
    if isinstance(module, _ConvNd):
        depthwise = module.groups == module.in_channels == module.out_channels
        if module.transposed or (module.groups > 1 and not depthwise):
            return 0
        return min(dimensions, 1 if depthwise and module.groups > 1 else 2)
    if isinstance(module, (nn.Linear, _BatchNorm, nn.PReLU)) and key in _SAME_LENGTH:
        return dimensions
    own_code = not type(module).__module__.startswith("torch.nn.")  # a user's layer may hold any tensors
    return dimensions if own_code else 0


def _update_size_attributes(module: nn.Module) -> None:
    """Set the sizes that a module stores beside its tensors, for example `out_features`."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, _ConvNd) and not module.transposed:
        if module.groups > 1 and module.groups == module.in_channels == module.out_channels:
            module.groups = len(module.weight)
        module.out_channels, module.in_channels = len(module.weight), module.groups * module.weight.shape[1]
    elif isinstance(module, _BatchNorm):
        sizes = [len(t) for t in (module.weight, module.running_mean) if t is not None]
        module.num_features = sizes[0] if sizes else module.num_features
    elif isinstance(module, nn.PReLU):
        module.num_parameters = module.weight.numel()
