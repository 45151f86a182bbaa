"""Models that several tests begin with."""

import torch
from torch.nn import functional

from fishleg.workloads.digits import Batches, split_digits
from fishleg.workloads.digits_net import DigitsNet


def trained_digits(epochs: int) -> DigitsNet:
    """A small network trained on the digits, in float32 whatever the default type of the tests is."""
    torch.manual_seed(0)
    images, labels, _, _ = split_digits()
    model = DigitsNet(8).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = Batches(images, labels, 64, normalized=False)
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()
