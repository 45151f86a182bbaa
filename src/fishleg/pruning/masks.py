"""Masks of a model: apply them to its weights, or find them from its zeros."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fishleg.curvature.layers import find_layers
from fishleg.runtime.process_group import get_logger

logger = get_logger(__name__)
SPARSE = 0.01  # a model with a larger share of zeros counts as pruned before


@torch.no_grad()
def apply_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Set the removed weights to exactly 0.

    Args:
        model: The model; it is changed in place.
        masks: Masks by parameter name, of the parameters' shapes; True = kept.

    Raises:
        ValueError: The model has no parameter of one of these names.
    """
    for p, mask in masks_by_parameter(model, masks).items():
        p.masked_fill_(~mask, 0)  # not a product: NaN · 0 is NaN


def masks_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the masks of a pruned model: the zeros of every matrix or kernel that has some.

    There are also masks for vectors. A bias that is zero is masked where the row of its weight is zero. The
    scale and shift of a BatchNorm channel are masked where both are zero. A tensor that is zero everywhere
    gets no mask: pruning never empties a layer, and some tensors start at zero, such as those of adapters.

    Args:
        model: The pruned model.

    Returns:
        Masks by parameter name; True = kept.
    """
    return _with_biases(model, _weight_masks(model))


def pruned_masks(model: nn.Module, prunable: Collection[str]) -> dict[str, Tensor]:
    """Return the masks of `masks_of` that look like the result of pruning.

    A few zeros in a tensor are chance, unless the prunable weights as a whole are sparse. A tensor whose
    other entries all have the same absolute value was built that way, as an identity or a Dirac kernel is.

    Args:
        model: The model.
        prunable: The names of the weights that can be pruned.

    Returns:
        Masks by parameter name; True = kept.
    """
    weights = [model.get_parameter(name) for name in prunable]
    sparse = sum(int((w == 0).sum()) for w in weights) > SPARSE * sum(w.numel() for w in weights)

    def looks_pruned(name: str, mask: Tensor) -> bool:
        kept = model.get_parameter(name).detach()[mask].abs()
        built_so = kept.numel() > 1 and bool(kept.min() == kept.max())
        return not built_so and (sparse or kept.numel() < (1 - SPARSE) * mask.numel())

    return _with_biases(model, {n: mask for n, mask in _weight_masks(model).items() if looks_pruned(n, mask)})


def _weight_masks(model: nn.Module) -> dict[str, Tensor]:
    masks = {
        name: p.detach() != 0 for name, p in model.named_parameters() if p.dim() > 1 and bool((p == 0).any())
    }
    for name in [name for name, mask in masks.items() if not bool(mask.any())]:
        logger.info("%s is zero everywhere: it gets no mask, because pruning never empties a layer", name)
        del masks[name]
    return masks


def _with_biases(model: nn.Module, masks: dict[str, Tensor]) -> dict[str, Tensor]:
    for layer in find_layers(model):
        if layer.is_matrix and layer.bias is not None and layer.weight in masks:
            removed = ~masks[layer.weight].flatten(1).any(1) & (model.get_parameter(layer.bias) == 0)
            if bool(removed.any()):
                masks[layer.bias] = ~removed
    names = {id(p): name for name, p in model.named_parameters()}
    for norm in (module for module in model.modules() if isinstance(module, _BatchNorm) and module.affine):
        removed = (norm.weight == 0) & (norm.bias == 0)
        if masks and bool(removed.any()) and not bool(removed.all()):
            masks.update({names[id(p)]: ~removed for p in (norm.weight, norm.bias)})
    return masks


def masks_by_parameter(model: nn.Module, masks: Mapping[str, Tensor]) -> dict[nn.Parameter, Tensor]:
    """Return masks by parameter instead of by name.

    Args:
        model: The model.
        masks: Masks by parameter name.

    Returns:
        The same masks by parameter.

    Raises:
        ValueError: The model has no parameter of one of these names.
    """
    parameters = dict(model.named_parameters())
    for name in masks:
        if name not in parameters:
            raise ValueError(f"mask for unknown parameter {name!r}")
    return {parameters[name]: mask for name, mask in masks.items()}
