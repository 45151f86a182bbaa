"""Masks under any optimizer, and normalisation statistics after surgery."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fishleg.curvature.layers import find_layers

logger = logging.getLogger(__name__)
SPARSE = 0.01  # with a larger share of zeros than that, a model was pruned before


@torch.no_grad()
def apply_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Set every masked weight to exactly 0."""
    for p, mask in _by_parameter(model, masks).items():
        p.masked_fill_(~mask, 0)  # not a product: NaN · 0 is NaN


def masks_of(model: nn.Module) -> dict[str, Tensor]:
    """The masks of a pruned model, from its zeros: every matrix or kernel that has some.

    A row that is gone takes its bias along, where that is zero, too; a channel whose scale and shift in a
    BatchNorm are both zero is gone as well. A tensor that is nothing but zeros was
    not pruned (no layer is emptied) but starts there, as adapters do, and is left free.
    """
    return _with_biases(model, _weight_masks(model))


def pruned_masks(model: nn.Module, prunable: Collection[str]) -> dict[str, Tensor]:
    """Those of `masks_of` that look like the work of a pruning.

    Unless the `prunable` weights as a whole are sparse, a few zeros in a tensor are chance. And where all
    other entries are of one size, as in an identity or a Dirac kernel, somebody has made the tensor so.
    """
    weights = [model.get_parameter(name) for name in prunable]
    sparse = sum(int((w == 0).sum()) for w in weights) > SPARSE * sum(w.numel() for w in weights)

    def looks_pruned(name: str, mask: Tensor) -> bool:
        kept = model.get_parameter(name).detach()[mask].abs()
        made_so = kept.numel() > 1 and bool(kept.min() == kept.max())
        return not made_so and (sparse or kept.numel() < (1 - SPARSE) * mask.numel())

    return _with_biases(model, {n: mask for n, mask in _weight_masks(model).items() if looks_pruned(n, mask)})


def _weight_masks(model: nn.Module) -> dict[str, Tensor]:
    masks = {
        name: p.detach() != 0 for name, p in model.named_parameters() if p.dim() > 1 and bool((p == 0).any())
    }
    for name in [name for name, mask in masks.items() if not bool(mask.any())]:
        logger.info("%s is all zeros: taken for a start, not for a mask", name)
        del masks[name]
    return masks


def _with_biases(model: nn.Module, masks: dict[str, Tensor]) -> dict[str, Tensor]:
    for layer in find_layers(model):
        if layer.is_matrix and layer.bias is not None and layer.weight in masks:
            gone = ~masks[layer.weight].flatten(1).any(1) & (model.get_parameter(layer.bias) == 0)
            if bool(gone.any()):
                masks[layer.bias] = ~gone
    names = {id(p): name for name, p in model.named_parameters()}
    for norm in (module for module in model.modules() if isinstance(module, _BatchNorm) and module.affine):
        gone = (norm.weight == 0) & (norm.bias == 0)
        if masks and bool(gone.any()) and not bool(gone.all()):
            masks.update({names[id(p)]: ~gone for p in (norm.weight, norm.bias)})
    return masks


def _by_parameter(model: nn.Module, masks: Mapping[str, Tensor]) -> dict[nn.Parameter, Tensor]:
    parameters = dict(model.named_parameters())
    for name in masks:
        if name not in parameters:
            raise ValueError(f"mask for unknown parameter {name!r}")
    return {parameters[name]: mask for name, mask in masks.items()}
