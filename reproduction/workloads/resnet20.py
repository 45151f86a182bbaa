"""A trained ResNet20 with CIFAR-10: the model, its loaders, and its accuracy."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from fishleg.workloads.digits import Batches
from fishleg.workloads.registry import Loaders, Workload
from reproduction.workloads.datasets import accuracy, cifar10, data_directory
from reproduction.workloads.networks import resnet20


def trained_resnet20() -> nn.Module:
    """The ResNet20 whose state dict is at $FISHLEG_RESNET20 or in the data directory, in evaluation mode."""
    path = Path(os.environ.get("FISHLEG_RESNET20") or data_directory() / "resnet20-cifar10.pt")
    if not path.is_file():
        raise FileNotFoundError(f"no trained ResNet20 at {path}: point FISHLEG_RESNET20 at its state dict")
    return _resnet20(torch.load(path, weights_only=True))


def test_accuracy(model: nn.Module) -> float:
    """Per cent of the 10 000 test images of CIFAR-10 that are classified correctly."""
    return accuracy(model, *cifar10("test"))


def _resnet20(state: dict[str, torch.Tensor] | None = None) -> nn.Module:
    model: nn.Module = resnet20()
    if state is not None:
        model.load_state_dict(state)
    channels_last: nn.Module = model.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return channels_last


def _loaders() -> Loaders:
    (x, y), (test_x, test_y) = cifar10("train"), cifar10("test")
    calibration = Batches(x, y, 128, augmented=True)
    return calibration, Batches(x, y, 128, seed=1, augmented=True), Batches(test_x, test_y, 500)


RESNET20 = Workload(
    "ResNet20 on CIFAR-10 ($FISHLEG_DATA, $FISHLEG_RESNET20)",
    lambda trained: trained_resnet20() if trained else _resnet20(),
    _loaders,
)
