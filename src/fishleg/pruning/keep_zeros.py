"""Keep removed weights at zero while any torch optimizer trains the model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fishleg.pruning.masks import masks_by_parameter, masks_of
from fishleg.runtime.models import abbreviate


@torch.no_grad()
def zero_removed(optimizer: Optimizer, model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Set the removed weights, and the optimizer's state for them, to exactly 0.

    Args:
        optimizer: The optimizer whose state is changed.
        model: The model; it is changed in place.
        masks: Masks by parameter name, of the parameters' shapes; True = kept.

    Raises:
        ValueError: The model has no parameter of one of these names.
    """
    for p, mask in masks_by_parameter(model, masks).items():
        p.masked_fill_(~mask, 0)  # not a product: NaN · 0 is NaN
        for value in optimizer.state.get(p, {}).values():
            if torch.is_tensor(value) and value.shape == p.shape:
                value.mul_(mask)


def keep_zeros(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], masks: Mapping[str, Tensor] | None = None
) -> RemovableHandle:
    """Keep removed weights, and the optimizer's state for them, at exactly 0 after every optimizer step.

    >>> layer = nn.Linear(2, 1)
    >>> _ = layer.weight.data.copy_(torch.tensor([[0.0, 1.0]]))
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> handle = keep_zeros(layer, optimizer)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> layer.weight.data
    tensor([[0.0000, 0.9000]])

    Args:
        model: The pruned model.
        optimizer: The optimizer, or all optimizers that train the model.
        masks: Masks by parameter name, of the parameters' shapes; True = kept. Default: the model's zeros,
            as `masks_of` finds them.

    Returns:
        A handle; its `remove()` ends this.

    Raises:
        TypeError: The first argument is not a model.
        ValueError: There is no zero to keep, a mask does not fit its parameter, or an optimizer is missing.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the first argument of keep_zeros is the model, got {type(model).__name__}")
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
    return _join_handles([each.register_step_post_hook(enforce) for each in optimizers])


def as_optimizers(optimizer: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """Return one optimizer or several as a list.

    Args:
        optimizer: An optimizer, or an iterable of optimizers.

    Returns:
        The optimizers.

    Raises:
        ValueError: The iterable is empty.
    """
    found = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    if not found:
        raise ValueError("optimizer must be one optimizer or several, got an empty sequence")
    return found


def _join_handles(handles: Sequence[RemovableHandle]) -> RemovableHandle:
    """Return one handle that removes all of these."""
    return handles[0] if len(handles) == 1 else _Handles(handles)


class _Handles(RemovableHandle):
    def __init__(self, handles: Sequence[RemovableHandle]) -> None:
        super().__init__(OrderedDict())
        self.handles = handles

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def _check_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Check that masks are boolean and have the shapes of their parameters, without broadcasting.

    Raises:
        ValueError: A mask does not fit its parameter.
    """
    for p, (name, mask) in zip(masks_by_parameter(model, masks), masks.items(), strict=True):
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"the mask of {name!r} must be a boolean tensor (True = kept), got {found}")
        if mask.shape != p.shape:
            raise ValueError(
                f"the mask of {name!r} must have its shape {tuple(p.shape)}, got {tuple(mask.shape)}"
            )


def check_optimizers_cover(optimizers: Sequence[Optimizer], model: nn.Module, names: Iterable[str]) -> None:
    """Check that each of these parameters is trained by one of the optimizers, or is frozen.

    Another optimizer would move the parameter without restoring its zeros.

    Args:
        optimizers: The optimizers whose steps are watched.
        model: The model.
        names: The names of the parameters that have zeros to keep.

    Raises:
        ValueError: A parameter that is not frozen belongs to none of the optimizers.
    """
    covered = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    trained = {name: p for name in names if (p := model.get_parameter(name)).requires_grad}
    missing = [name for name, p in trained.items() if id(p) not in covered]
    if missing and len(missing) == len(trained):
        raise ValueError(
            "the optimizer has none of the model's pruned parameters: it belongs to another model. "
            "fishleg.prune returns a copy of the model, which needs its own optimizer"
        )
    if missing:
        raise ValueError(
            f"the optimizer does not have {abbreviate(missing)}: another optimizer would change the zeros "
            "there. Pass all optimizers of the model as a list, and freeze the parameters that none of them "
            "trains (requires_grad_(False))"
        )
