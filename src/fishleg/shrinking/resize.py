"""Replacing parameters and buffers of a model by tensors of other shapes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from fishleg.shrinking.trace import parameter_or_buffer


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
