"""The networks and data of the benchmarks: CIFAR-10 with a trained ResNet20."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from fishleg.runs.errors import ToolError
from fishleg.workloads.digits import Batches
from fishleg.workloads.registry import Loaders, Workload
from reproduction.workloads.datasets import cifar10, data_directory
from reproduction.workloads.networks import resnet20


def resnet20_model(trained: bool) -> nn.Module:
    model: nn.Module = resnet20()
    if trained:
        path = Path(os.environ.get("FISHLEG_RESNET20") or data_directory() / "resnet20-cifar10.pt")
        if not path.is_file():
            raise ToolError(f"no trained ResNet20 at {path}: point FISHLEG_RESNET20 at its state dict")
        model.load_state_dict(torch.load(path, weights_only=True))
    channels_last: nn.Module = model.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return channels_last


def cifar10_data() -> Loaders:
    try:
        (x, y), (test_x, test_y) = cifar10("train"), cifar10("test")
    except FileNotFoundError as error:
        raise ToolError(str(error)) from None
    calibration = Batches(x, y, 128, augmented=True)
    return calibration, Batches(x, y, 128, seed=1, augmented=True), Batches(test_x, test_y, 500)


WORKLOADS = {
    "resnet20": Workload(
        "ResNet20 on CIFAR-10 ($FISHLEG_DATA, $FISHLEG_RESNET20)", resnet20_model, cifar10_data
    ),
}
