"""The networks that are pruned: ResNets for small images, and a deep autoencoder."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional


class _BasicBlock(nn.Module):
    """Two 3×3 convolutions; the shortcut is a strided slice with zero-padded channels."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.stride, self.extra = stride, n_out - n_in

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.skip(x) + self.bn2(self.conv2(y)))

    def skip(self, x: Tensor) -> Tensor:
        if self.stride != 1 or self.extra:
            x = x[:, :, :: self.stride, :: self.stride]
            x = functional.pad(x, (0, 0, 0, 0, self.extra // 2, self.extra - self.extra // 2))
        return x


class CifarResNet(nn.Module):
    """ResNet-(6·depth+2) for 32×32 images; depth 3 and width 16 is ResNet20 (0.27 M parameters)."""

    def __init__(self, depth: int = 3, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = self._stage(width, width, depth, 1)
        self.layer2 = self._stage(width, 2 * width, depth, 2)
        self.layer3 = self._stage(2 * width, 4 * width, depth, 2)
        self.linear = nn.Linear(4 * width, classes)

    @staticmethod
    def _stage(n_in: int, n_out: int, depth: int, stride: int) -> nn.Sequential:
        blocks = [_BasicBlock(n_in, n_out, stride)]
        blocks += [_BasicBlock(n_out, n_out, 1) for _ in range(depth - 1)]
        return nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


class _ProjectedBlock(_BasicBlock):
    """The same; where the shape changes, the shortcut is a strided 1×1 convolution."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__(n_in, n_out, stride)
        self.shortcut = nn.Sequential()
        if stride != 1 or n_in != n_out:
            projection = nn.Conv2d(n_in, n_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(n_out))

    def skip(self, x: Tensor) -> Tensor:
        projected: Tensor = self.shortcut(x)
        return projected


class ResNet18(nn.Module):
    """ResNet18 for small images: a 3×3 first convolution (`stem_stride` 2 for 64×64), one linear layer last.

    Width 64 is the usual one (11.2 M parameters), width 16 has 0.7 M.
    """

    def __init__(self, classes: int = 10, width: int = 64, stem_stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, stem_stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(_ProjectedBlock(a, b, 1 if a == b else 2), _ProjectedBlock(b, b, 1))
                for a, b in pairwise(widths)
            )
        )
        self.linear = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(functional.relu(self.bn1(self.conv1(x))))
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


def resnet20(classes: int = 10) -> CifarResNet:
    """The CIFAR ResNet20 of He et al."""
    return CifarResNet(3, 16, classes)


def autoencoder(inputs: int = 64, widths: tuple[int, ...] = (48, 24, 8)) -> nn.Sequential:
    """A deep tanh autoencoder with Bernoulli outputs: small, and hard for first-order methods."""
    sizes = [inputs, *widths, *widths[-2::-1], inputs]
    modules: list[nn.Module] = []
    for n_in, n_out in pairwise(sizes):
        modules += [nn.Linear(n_in, n_out), nn.Tanh()]
    return nn.Sequential(*modules[:-1])
