"""The registry of workloads: built-in models with their data, for the demo and `workload:<name>`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fishleg.workloads.digits import Batches, split_digits
from fishleg.workloads.digits_net import DigitsNet

Loaders = tuple[Iterable[Any], Iterable[Any], Iterable[Any]]
"""The loaders of the calibration, training and test data."""


class MakeModel(Protocol):
    """A function that returns the model of a workload."""

    def __call__(self, trained: bool) -> nn.Module:
        """Return the model.

        Args:
            trained: Whether it is trained or only initialised.

        Returns:
            The model.
        """
        ...


@dataclass(frozen=True)
class Workload:
    """A model and its data.

    Args:
        about: A one-line description.
        model: Returns the model; its argument says whether it is trained or only initialised.
        data: Returns the loaders of the calibration, training and test data.
    """

    about: str
    model: MakeModel
    data: Callable[[], Loaders]


def _digits_model(trained: bool) -> nn.Module:
    """Return a `DigitsNet`; if `trained`, after 12 epochs of AdamW from a fixed seed."""
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
    """Return the calibration, training and test loaders of the digits."""
    x, y, test_x, test_y = split_digits()
    test = Batches(test_x, test_y, 100, normalized=False)
    return Batches(x, y, 64, normalized=False), Batches(x, y, 64, seed=1, normalized=False), test


WORKLOADS = {
    "digits": Workload("a small conv net on embedded 8x8 digits", _digits_model, _digits_data),
}
