"""TODO."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fishleg.pruning.masks import _by_parameter, masks_of
from fishleg.runtime.models import abbreviate


@torch.no_grad()
def zero_removed(optimizer: Optimizer, model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Set every masked weight, and the optimizer's state for it, to exactly 0."""
    for p, mask in _by_parameter(model, masks).items():
        p.masked_fill_(~mask, 0)  # not a product: NaN · 0 is NaN
        for value in optimizer.state.get(p, {}).values():
            if torch.is_tensor(value) and value.shape == p.shape:
                value.mul_(mask)


def keep_zeros(
    optimizer: Optimizer | Iterable[Optimizer], model: nn.Module, masks: Mapping[str, Tensor] | None = None
) -> RemovableHandle:
    """After every step of any torch optimizer: masked weights, and their state, are exactly 0.

    A model that is trained by several optimizers needs all of them here. Without masks, the model's
    present zeros are kept; a model without any is an error.
    """
    optimizers = as_optimizers(optimizer)
    masks = masks_of(model) if masks is None else masks
    if not masks:
        raise ValueError("the model has no zeros to keep: prune it first, or pass masks")
    _check_masks(model, masks)
    check_optimizers_cover(optimizers, model, masks)

    def enforce(stepped: Optimizer, *_: Any) -> None:
        zero_removed(stepped, model, masks)

    for each in optimizers:
        enforce(each)
    return join_handles([each.register_step_post_hook(enforce) for each in optimizers])


def as_optimizers(optimizer: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """One optimizer or several, as a list."""
    found = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    if not found:
        raise ValueError("optimizer must be an optimizer or several of them, got an empty sequence")
    return found


def join_handles(handles: Sequence[RemovableHandle]) -> RemovableHandle:
    """One handle for all: it removes them together."""
    return handles[0] if len(handles) == 1 else _Handles(handles)


class _Handles(RemovableHandle):
    def __init__(self, handles: Sequence[RemovableHandle]) -> None:
        super().__init__(OrderedDict())
        self.handles = handles

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def _check_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Masks are by parameter name, boolean, and of the parameter's own shape: none is broadcast."""
    for p, (name, mask) in zip(_by_parameter(model, masks), masks.items(), strict=True):
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"the mask of {name!r} must be a boolean tensor (True = kept), got {found}")
        if mask.shape != p.shape:
            raise ValueError(
                f"the mask of {name!r} must have its shape {tuple(p.shape)}, got {tuple(mask.shape)}"
            )


def check_optimizers_cover(optimizers: Sequence[Optimizer], model: nn.Module, names: Iterable[str]) -> None:
    """An error where some of these parameters are trained by none of the optimizers: their zeros would go.

    Frozen ones need no optimizer.
    """
    moved = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    trained = {name: p for name in names if (p := model.get_parameter(name)).requires_grad}
    missing = [name for name, p in trained.items() if id(p) not in moved]
    if missing and len(missing) == len(trained):
        raise ValueError(
            "the optimizer has none of the model's pruned parameters: it is that of another model; "
            "fishleg.prune returns a copy, which needs an optimizer of its own"
        )
    if missing:
        raise ValueError(
            f"the optimizer does not have {abbreviate(missing)}, whose zeros another one would fill: pass all "
            "optimizers of the model as a list, and freeze what none of them trains (requires_grad_(False))"
        )
