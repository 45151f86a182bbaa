"""TODO."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from fishleg.runtime.batches import Forward
from fishleg.runtime.tensors import Tensors


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name, shared ones once."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ValueError("the model has no trainable parameters (requires_grad is False for all of them)")
    return parameters


def abbreviate(names: Sequence[str]) -> str:
    """Some names of many, for a message."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def copy_model(model: nn.Module, otherwise: str = "") -> nn.Module:
    """A deep copy; an error that says what to do where there can be none."""
    try:
        return copy.deepcopy(model)
    except Exception as error:  # models hold anything: locks, files, handles of other libraries
        raise ValueError(
            f"the model cannot be copied ({type(error).__name__}: {error}): make permanent what "
            f"torch.nn.utils.prune or weight_norm has put on it (prune.remove, remove_weight_norm){otherwise}"
        ) from error


class _Call(nn.Module):
    """A user-given forward as a module, so that its model's parameters can be exchanged for others."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model, self.how = model, forward

    def forward(self, batch: Any) -> Tensor:
        return self.how(self.model, batch)


def call_with(model: nn.Module, values: Tensors, forward: Forward, batch: Any) -> Tensor:
    """The outputs with these parameters and buffers, whatever part of the model the forward calls."""
    outputs: Tensor = functional_call(
        _Call(model, forward), {f"model.{name}": value for name, value in values.items()}, (batch,)
    )
    return outputs
