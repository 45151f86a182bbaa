"""A small trained convolutional network and its data."""

import copy

import pytest
from helpers import Batch
from torch import Tensor
from trained import trained_digits

from fishleg.workloads.digits import split_digits
from fishleg.workloads.digits_net import DigitsNet


@pytest.fixture(scope="session")
def trained() -> DigitsNet:
    return trained_digits(5)


@pytest.fixture
def model(trained: DigitsNet) -> DigitsNet:
    return copy.deepcopy(trained)


@pytest.fixture(scope="session")
def loader() -> list[Batch]:
    images, labels, _, _ = split_digits()
    return list(zip(images[:640].split(64), labels[:640].split(64), strict=True))


@pytest.fixture(scope="session")
def images(loader: list[Batch]) -> list[Tensor]:
    """Images without labels."""
    return [x for x, _ in loader]
