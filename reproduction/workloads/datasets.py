"""CIFAR-10 and Tiny-ImageNet from their official files, and the accuracy of a classifier on them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fishleg.workloads.digits import normalize
from reproduction.workloads.archives import CIFAR10, TINY_IMAGENET, how_to_get

_CIFAR_IMAGES = 10_000  # in each file


def data_directory(directory: str | os.PathLike[str] | None = None) -> Path:
    """The directory of the datasets: the argument, else $FISHLEG_DATA, else ./data."""
    return Path(directory or os.environ.get("FISHLEG_DATA") or "data")


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, device: str = "cpu") -> float:
    """Per cent of the images (uint8) that the model, in evaluation mode, classifies correctly."""
    model.eval()
    correct = 0
    for x, y in zip(images.split(500), labels.split(500), strict=True):
        correct += int((model(normalize(x.to(device))).argmax(1) == y.to(device)).sum())
    return 100 * correct / len(labels)


def cifar10(split: str = "train", directory: str | os.PathLike[str] | None = None) -> tuple[Tensor, Tensor]:
    """CIFAR-10 as uint8 images [N, 3, 32, 32] and labels, from `cifar-10-batches-bin/*.bin`."""
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    root = data_directory(directory) / "cifar-10-batches-bin"
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if split == "train" else ["test_batch.bin"]
    missing = [name for name in names if not (root / name).is_file()]
    if missing:
        raise FileNotFoundError(f"CIFAR-10 is not at {root} (missing {missing[0]}). {how_to_get(CIFAR10)}")
    rows = torch.cat([_cifar_rows(root / name) for name in names])
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()


def _cifar_rows(path: Path) -> Tensor:
    """For each image its label and its 3072 bytes; raises for a file of another size or content."""
    content = path.read_bytes()
    expected = _CIFAR_IMAGES * 3073
    if len(content) == expected:
        rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, 3073)
        if int(rows[:, 0].max()) <= 9:
            return rows
    why = f"{len(content)} bytes, expected {expected}" if len(content) != expected else "labels above 9"
    raise ValueError(f"{path} is damaged ({why}): remove {path.parent}. {how_to_get(CIFAR10)}")


def tiny_imagenet(
    split: str = "train",
    directory: str | os.PathLike[str] | None = None,
    classes: int | Sequence[str] | None = None,
) -> tuple[Tensor, Tensor]:
    """Tiny-ImageNet as uint8 images [N, 3, 64, 64] and labels; the test split is the official `val`.

    Read from the official `tiny-imagenet-200` or from a directory `tiny-imagenet-N` with some of its classes
    in the same layout. `classes` is the expected number of classes, or the names of the classes to use.
    Labels number the classes in alphabetical order.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    base = data_directory(directory)
    listed = {
        path.parent: sorted(path.read_text().split()) for path in base.glob("tiny-imagenet-*/wnids.txt")
    }
    found = {root: names for root, names in listed.items() if names}
    suitable = {root: names for root, names in found.items() if _suit(names, classes)}
    if not suitable:
        there = "".join(f"; {root} has {len(names)} classes" for root, names in sorted(found.items()))
        wanted = ""
        if classes is not None:
            known = {name for names in found.values() for name in names}
            lacking = [] if isinstance(classes, int) else [name for name in classes if name not in known]
            wanted = f" with {classes if isinstance(classes, int) else f'these {len(classes)}'} classes"
            wanted += f" ({lacking[0]}, for one, is lacking)" if lacking and found else ""
        raise FileNotFoundError(
            f"Tiny-ImageNet{wanted} is not in {base} (tiny-imagenet-*/wnids.txt{there}). "
            + how_to_get(TINY_IMAGENET)
        )
    root = max(suitable, key=lambda root: len(suitable[root]))
    names = suitable[root] if classes is None or isinstance(classes, int) else sorted(classes)
    labels = {name: i for i, name in enumerate(names)}
    try:
        files = _tiny_files(root, split, labels)
        counts = [sum(label == i for _, label in files) for i in labels.values()]
        if min(counts) < max(counts):
            fewest = names[counts.index(min(counts))]
            raise ValueError(f"{min(counts)} {split} images of {fewest}, and {max(counts)} of others")
        images = torch.stack([_jpeg(path) for path, _ in files])
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{root} is incomplete or damaged, remove it: {error}. {how_to_get(TINY_IMAGENET)}"
        ) from error
    return images, torch.tensor([label for _, label in files])


def _tiny_files(root: Path, split: str, labels: Mapping[str, int]) -> list[tuple[Path, int]]:
    """The pictures of the classes, with their labels."""
    if split == "train":
        return [
            (path, i)
            for name, i in labels.items()
            for path in sorted((root / "train" / name).rglob("*.JPEG"))
        ]
    annotations = root / "val" / "val_annotations.txt"
    lines = [line.split("\t") for line in annotations.read_text().splitlines()]
    if bad := next((line for line in lines if len(line) < 2), None):
        raise ValueError(f"{annotations} has the line {bad[0]!r}")
    return [(root / "val" / "images" / file, labels[name]) for file, name, *_ in lines if name in labels]


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
    try:
        with Image.open(path) as picture:
            size, content = picture.size, picture.convert("RGB").tobytes()
    except OSError as error:  # its message may not name the file
        raise OSError(f"{path} cannot be read ({error})") from error
    if size != (64, 64):
        raise ValueError(f"{path} is {size[0]}×{size[1]}, Tiny-ImageNet's are 64×64")
    pixels = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return pixels.view(64, 64, 3).permute(2, 0, 1).contiguous()
