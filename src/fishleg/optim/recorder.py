"""TODO."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fishleg.runtime.batches import default_forward, map_tensors, output_tensor, targets_of


class CallRecorder:
    """A forward hook that remembers the model's last training call as a batch: it can be cut and replayed.

    A copy of the model, or its pickle, gets one that remembers nothing: it has no optimizer.
    """

    def __init__(self) -> None:
        self.call: dict[str, Any] | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            # Labels among the arguments say which positions count; nothing else of them is read.
            labels = targets_of(kwargs)
            self.call = {"args": args, "kwargs": kwargs, "autocast": _autocast_state(), "labels": labels}

    def __reduce__(self) -> tuple[type[_Silent], tuple[()]]:
        return _Silent, ()


class _Silent:
    """What stands in a copy's place of a recorder."""

    def __call__(self, *_: Any) -> None:
        pass


def replay_call(model: nn.Module, batch: Any) -> Tensor:
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
