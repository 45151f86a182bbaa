"""The user's model as a whole: its trainable parameters, copies of it, and calls with other parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fishleg.runtime.batches import Forward
from fishleg.runtime.tensors import Tensors


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters with `requires_grad`, by name.

    Args:
        model: The model.

    Returns:
        The parameters in the model's order; a shared parameter appears once.

    Raises:
        ValueError: If the model has no trainable parameter.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ValueError("the model has no trainable parameters (requires_grad is False for all of them)")
    return parameters


Fingerprint = tuple[list[int], list[float]]


def fingerprint(tensors: Iterable[Tensor]) -> Fingerprint:
    """Return what changes when tensors do, to tell whether something was computed from their present values.

    Args:
        tensors: Parameters or buffers.

    Returns:
        How often each was changed in place, and the norm of each. The counts miss changes through
        `tensor.data`; the norms miss changes that are lost in rounding.
    """
    found = [tensor.detach() for tensor in tensors]
    wide = [tensor if tensor.is_floating_point() else tensor.double() for tensor in found]
    norms = torch._foreach_norm(wide) if wide else []
    return [tensor._version for tensor in found], [float(norm) for norm in norms]


def abbreviate(names: Sequence[str]) -> str:
    """Join the first three names for a message, and count the rest.

    Args:
        names: Any number of names.

    Returns:
        The text.

    Example:
        >>> abbreviate(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def copy_model(model: nn.Module, otherwise: str = "") -> nn.Module:
    """Return a deep copy of a model.

    Args:
        model: The model.
        otherwise: Text added to the error message, for example an alternative to copying.

    Returns:
        The copy.

    Raises:
        ValueError: If the model cannot be copied.
    """
    try:
        return copy.deepcopy(model)
    except Exception as error:  # a model may hold any object: locks, files, handles of other libraries
        raise ValueError(
            f"the model cannot be copied ({type(error).__name__}: {error}): first remove the hooks of "
            f"torch.nn.utils.prune or weight_norm (prune.remove, remove_weight_norm){otherwise}"
        ) from error


class _ForwardModule(nn.Module):
    """A user-defined `forward(model, batch)` as a module.

    `functional_call` replaces the parameters of a module. With this wrapper it also works for a forward
    function that calls only a part of the model.
    """

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model, self.forward_function = model, forward

    def forward(self, batch: Any) -> Tensor:
        return self.forward_function(self.model, batch)


def functional_forward(model: nn.Module, values: Tensors, forward: Forward, batch: Any) -> Tensor:
    """Compute the outputs of a model with other parameters and buffers.

    Args:
        model: The model; it is not changed.
        values: The parameters and buffers to use, by name.
        forward: `forward(model, batch) -> outputs`; it may call any part of the model.
        batch: The batch.

    Returns:
        The outputs. They are differentiable with respect to `values`.
    """
    outputs: Tensor = functional_call(
        _ForwardModule(model, forward), {f"model.{name}": value for name, value in values.items()}, (batch,)
    )
    return outputs
