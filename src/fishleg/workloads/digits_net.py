"""A small convolutional network for the digits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class DigitsNet(nn.Module):
    """A convolutional network with about 25 000 parameters for 8×8 images; it trains in seconds.

    Args:
        width: The number of channels of the first convolution.
        classes: The number of classes.
    """

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(2 * width)
        self.conv3 = nn.Conv2d(2 * width, 4 * width, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.linear = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits.

        Args:
            x: Images [N, 1, 8, 8].

        Returns:
            Logits [N, classes].
        """
        x = functional.relu(self.bn1(self.conv1(x)))
        x = functional.max_pool2d(functional.relu(self.bn2(self.conv2(x))), 2)
        x = functional.relu(self.bn3(self.conv3(x)))
        logits: Tensor = self.linear(torch.mean(x, (2, 3)))
        return logits
