"""Real data: the digits that travel along; CIFAR-10 and Tiny-ImageNet in their official layouts."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from fishleg.workloads.archives import CIFAR10, TINY_IMAGENET, how_to_get

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


def data_directory(directory: str | os.PathLike[str] | None = None) -> Path:
    """Where big data lies: the argument, else $FISHLEG_DATA, else ./data."""
    return Path(directory or os.environ.get("FISHLEG_DATA") or "data")


def cifar10(split: str = "train", directory: str | os.PathLike[str] | None = None) -> tuple[Tensor, Tensor]:
    """CIFAR-10 as uint8 images [N, 3, 32, 32] and labels, from `cifar-10-batches-bin/*.bin`."""
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    root = data_directory(directory) / "cifar-10-batches-bin"
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if split == "train" else ["test_batch.bin"]
    missing = [name for name in names if not (root / name).is_file()]
    if missing:
        raise FileNotFoundError(f"CIFAR-10 is not at {root} (missing {missing[0]}). {how_to_get(CIFAR10)}")
    rows = torch.cat([torch.frombuffer(bytearray((root / n).read_bytes()), dtype=torch.uint8) for n in names])
    rows = rows.view(-1, 3073)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()


def tiny_imagenet(
    split: str = "train",
    directory: str | os.PathLike[str] | None = None,
    classes: int | Sequence[str] | None = None,
) -> tuple[Tensor, Tensor]:
    """Tiny-ImageNet as uint8 images [N, 3, 64, 64] and labels; the test split is the official `val`.

    Read from the official `tiny-imagenet-200` or from a directory `tiny-imagenet-N` with some of its classes
    in the same layout. `classes` says how many there must be, or names those to use. Labels number the
    classes in alphabetical order.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    base = data_directory(directory)
    found = {path.parent: sorted(path.read_text().split()) for path in base.glob("tiny-imagenet-*/wnids.txt")}
    suitable = {root: names for root, names in found.items() if _suit(names, classes)}
    if not suitable:
        there = "".join(f"; {root} has {len(names)} classes" for root, names in sorted(found.items()))
        wanted = "" if classes is None else f" with {classes if isinstance(classes, int) else 'all'} classes"
        raise FileNotFoundError(
            f"Tiny-ImageNet{wanted} is not in {base} (tiny-imagenet-*/wnids.txt{there}). "
            + how_to_get(TINY_IMAGENET)
        )
    root = max(suitable, key=lambda root: len(suitable[root]))
    names = suitable[root] if classes is None or isinstance(classes, int) else sorted(classes)
    labels = {name: i for i, name in enumerate(names)}
    if split == "train":
        files = [
            (path, i)
            for name, i in labels.items()
            for path in sorted((root / "train" / name).rglob("*.JPEG"))
        ]
    else:
        lines = (line.split("\t") for line in (root / "val" / "val_annotations.txt").read_text().splitlines())
        files = [(root / "val" / "images" / file, labels[name]) for file, name, *_ in lines if name in labels]
    empty = set(labels.values()) - {label for _, label in files}
    if empty:
        raise FileNotFoundError(
            f"{root} has no {split} images of {names[min(empty)]}: it is incomplete, remove it. "
            + how_to_get(TINY_IMAGENET)
        )
    images = torch.stack([_jpeg(path) for path, _ in files])
    return images, torch.tensor([label for _, label in files])


def _suit(names: Sequence[str], classes: int | Sequence[str] | None) -> bool:
    if classes is None:
        return True
    return len(names) == classes if isinstance(classes, int) else set(classes) <= set(names)


def _jpeg(path: Path) -> Tensor:
    """One picture as uint8 [3, 64, 64]."""
    try:
        from PIL import Image
    except ImportError:
        raise ImportError("reading JPEG images needs Pillow: pip install 'fishleg[plot]'") from None
    with Image.open(path) as picture:
        if picture.size != (64, 64):
            raise ValueError(f"{path} is {picture.size[0]}×{picture.size[1]}, Tiny-ImageNet's are 64×64")
        pixels = torch.frombuffer(bytearray(picture.convert("RGB").tobytes()), dtype=torch.uint8)
    return pixels.view(64, 64, 3).permute(2, 0, 1).contiguous()


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
