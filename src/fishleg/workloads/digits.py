"""Real data: the digits that travel along; CIFAR-10 and Tiny-ImageNet in their official layouts."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from importlib import resources

import torch
from torch import Tensor

CIFAR_MEAN, CIFAR_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def digits() -> tuple[Tensor, Tensor]:
    """The 1797 optical digits of UCI (Alpaydin, Kaynak; CC BY 4.0): images [N, 1, 8, 8] in [0, 1], labels."""
    packed = resources.files("fishleg.workloads").joinpath("digits.bin.gz").read_bytes()
    rows = torch.frombuffer(bytearray(gzip.decompress(packed)), dtype=torch.uint8).view(-1, 65)
    return rows[:, 1:].float().view(-1, 1, 8, 8) / 16, rows[:, 0].long()


def split_digits(test_size: int = 400) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(train images, train labels, test images, test labels), always the same split."""
    images, labels = digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:test_size], order[test_size:]
    return images[train], labels[train], images[test], labels[test]


def normalize(images: Tensor) -> Tensor:
    """uint8 images to floats with the usual mean and standard deviation, channels last."""
    mean, std = (torch.tensor(v, device=images.device).view(3, 1, 1) for v in (CIFAR_MEAN, CIFAR_STD))
    return ((images.float() / 255 - mean) / std).contiguous(memory_format=torch.channels_last)


def augment(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Random crop (zero padding) and flip, each image its own, by one gather: fast on few cores."""
    count, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    top = torch.randint(0, 2 * padding + 1, (count, 1), generator=generator)
    left = torch.randint(0, 2 * padding + 1, (count, 1), generator=generator)
    flip = torch.randint(0, 2, (count, 1), generator=generator).bool()
    rows = top + torch.arange(height)
    columns = left + torch.arange(width)
    columns = torch.where(flip, columns.flip(1), columns)
    index = torch.arange(count)[:, None, None]
    return padded.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class Batches:
    """Shuffled batches of in-memory tensors, re-iterable; the order depends on the seed and epoch alone."""

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        batch_size: int = 128,
        *,
        seed: int = 0,
        augmented: bool = False,
        normalized: bool = True,
    ) -> None:
        self.images, self.labels, self.batch_size = images, labels, batch_size
        self.seed, self.augmented, self.normalized, self.epoch = seed, augmented, normalized, 0

    def __len__(self) -> int:
        return len(self.images) // self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """The order of the next pass; it goes up by one with each."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + self.epoch)
        self.epoch += 1
        order = torch.randperm(len(self.images), generator=generator)
        for index in order.split(self.batch_size):
            if len(index) < self.batch_size:
                return
            images = self.images[index]
            if self.augmented:
                images = augment(images, generator)
            yield (normalize(images) if self.normalized else images), self.labels[index]
