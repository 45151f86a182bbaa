"""Recording the inputs of the model's last training call, so that auxiliary steps can repeat the call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fishleg.runtime.batches import default_forward, map_tensors, output_tensor, targets_of


class CallRecorder:
    """A forward pre-hook that records the model's last training call as a batch.

    A copy or a pickle of the model gets a hook that records nothing, because no optimizer uses it.

    Attributes:
        call: The arguments of the call, the autocast state and the labels; None where there was no call.
    """

    def __init__(self) -> None:
        self.call: dict[str, Any] | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call in training mode with gradients enabled.

        Args:
            module: The model.
            args: The positional arguments of the call.
            kwargs: The keyword arguments of the call.
        """
        if module.training and torch.is_grad_enabled():
            # Labels among the arguments tell which positions are ignored. Their values are not used.
            labels = targets_of(kwargs)
            self.call = {"args": args, "kwargs": kwargs, "autocast": _autocast_state(), "labels": labels}

    def clear(self) -> None:
        """Discard the recorded call."""
        self.call = None

    def __reduce__(self) -> tuple[type[_InactiveRecorder], tuple[()]]:
        return _InactiveRecorder, ()


class _InactiveRecorder:
    """The hook of a copied or unpickled model. It records nothing."""

    def __call__(self, *_: Any) -> None:
        pass


def replay_call(model: nn.Module, batch: Any) -> Tensor:
    """Repeat a recorded call, under the same autocast state.

    Args:
        model: The model.
        batch: A call that `CallRecorder` recorded, or any other batch, which `default_forward` then handles.

    Returns:
        The outputs of the model.
    """
    if not (isinstance(batch, dict) and batch.keys() == {"args", "kwargs", "autocast", "labels"}):
        return default_forward(model, batch)
    call = map_tensors(batch, lambda t: t.detach())
    if call["autocast"] is None:
        return output_tensor(model(*call["args"], **call["kwargs"]))
    device, dtype = call["autocast"]
    with torch.autocast(device, dtype=dtype):
        return output_tensor(model(*call["args"], **call["kwargs"])).float()


def _autocast_state() -> tuple[str, torch.dtype] | None:
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return device, torch.get_autocast_dtype(device)
    return None
