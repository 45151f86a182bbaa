"""Built-in models with their data: something to try the tool on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fishleg.tool.errors import ToolError
from fishleg.workloads.data import Batches, cifar10, data_directory, split_digits
from fishleg.workloads.models import DigitsNet, resnet20

Loaders = tuple[Iterable[Any], Iterable[Any], Iterable[Any]]  # calibration, training, test


@dataclass(frozen=True)
class Workload:
    """A model (trained, or as a bare skeleton) and its loaders."""

    about: str
    model: Callable[[bool], nn.Module]
    data: Callable[[], Loaders]


def _digits_model(trained: bool) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = DigitsNet()
        if trained:
            images, labels, _, _ = split_digits()
            optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
            batches = Batches(images, labels, 64, normalized=False)
            for _ in range(12):
                for x, y in batches:
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
    return model.eval()


def _digits_data() -> Loaders:
    x, y, test_x, test_y = split_digits()
    test = Batches(test_x, test_y, 100, normalized=False)
    return Batches(x, y, 64, normalized=False), Batches(x, y, 64, seed=1, normalized=False), test


def _resnet20_model(trained: bool) -> nn.Module:
    model: nn.Module = resnet20()
    if trained:
        path = Path(os.environ.get("FISHLEG_RESNET20") or data_directory() / "resnet20-cifar10.pt")
        if not path.is_file():
            raise ToolError(f"no trained ResNet20 at {path}: point FISHLEG_RESNET20 at its state dict")
        model.load_state_dict(torch.load(path, weights_only=True))
    channels_last: nn.Module = model.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return channels_last


def _cifar10_data() -> Loaders:
    try:
        (x, y), (test_x, test_y) = cifar10("train"), cifar10("test")
    except FileNotFoundError as error:
        raise ToolError(str(error)) from None
    calibration = Batches(x, y, 128, augmented=True)
    return calibration, Batches(x, y, 128, seed=1, augmented=True), Batches(test_x, test_y, 500)


WORKLOADS = {
    "digits": Workload("a small conv net on embedded 8x8 digits", _digits_model, _digits_data),
    "resnet20": Workload(
        "ResNet20 on CIFAR-10 ($FISHLEG_DATA, $FISHLEG_RESNET20)", _resnet20_model, _cifar10_data
    ),
}
