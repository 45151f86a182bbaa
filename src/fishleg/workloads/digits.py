"""The optical digits that are part of the package, and shuffled batches of images in memory."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from importlib import resources

import torch
from torch import Tensor

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def load_digits() -> tuple[Tensor, Tensor]:
    """Load the 1797 optical digits of the UCI repository (Alpaydin and Kaynak; CC BY 4.0).

    Returns:
        Images [1797, 1, 8, 8] in [0, 1], and labels [1797].
    """
    packed = resources.files("fishleg.workloads").joinpath("digits.bin.gz").read_bytes()
    rows = torch.frombuffer(bytearray(gzip.decompress(packed)), dtype=torch.uint8).view(-1, 65)
    return rows[:, 1:].float().view(-1, 1, 8, 8) / 16, rows[:, 0].long()


def split_digits(test_size: int = 400) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split the digits into a training and a test set; the split is always the same.

    Args:
        test_size: The number of test examples.

    Returns:
        Training images, training labels, test images, test labels.
    """
    images, labels = load_digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:test_size], order[test_size:]
    return images[train], labels[train], images[test], labels[test]


def normalize(images: Tensor) -> Tensor:
    """Convert uint8 colour images to floats, normalised by the mean and standard deviation of ImageNet.

    Args:
        images: uint8 images [N, 3, height, width].

    Returns:
        Float images of the same shape, in the channels-last memory format.
    """
    mean, std = (torch.tensor(v, device=images.device).view(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    return ((images.float() / 255 - mean) / std).contiguous(memory_format=torch.channels_last)


def augment(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Crop and flip each image at random, with one gather operation for all images.

    Args:
        images: Images [N, channels, height, width].
        generator: The random generator.
        padding: The width of the zero padding on each side, out of which the crops are taken.

    Returns:
        Images of the same shape.
    """
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
    """A loader of shuffled batches of in-memory images.

    The order depends only on the seed and the epoch. An incomplete last batch is left out.

    Args:
        images: Images [N, channels, height, width].
        labels: Labels [N].
        batch_size: The number of examples in a batch.
        seed: The seed of the order and of the augmentation.
        augmented: Whether images are cropped and flipped at random.
        normalized: Whether uint8 images are converted with `normalize`.
    """

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
        """Set the epoch of the next pass, which determines its order. Each pass increases it by one.

        Args:
            epoch: The number of the epoch.
        """
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
