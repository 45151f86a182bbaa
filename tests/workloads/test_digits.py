"""The digits, their batches and their network."""

import pytest
import torch
from torch import Tensor

from fishleg.workloads.digits import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Batches,
    augment,
    load_digits,
    normalize,
    split_digits,
)
from fishleg.workloads.digits_net import DigitsNet


def test_digits() -> None:
    images, labels = load_digits()
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    assert torch.equal(images * 16, (images * 16).round()), "sixteen grey levels"
    assert labels.dtype == torch.int64
    # the counts of the UCI test set, class by class
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_split_digits_is_a_partition() -> None:
    train, train_labels, test, test_labels = split_digits(400)
    assert (len(train), len(test)) == (len(train_labels), len(test_labels)) == (1397, 400)
    rows = torch.cat(
        [torch.cat([x.flatten(1), y[:, None]], 1) for x, y in ((train, train_labels), (test, test_labels))]
    )
    images, labels = load_digits()
    whole = torch.cat([images.flatten(1), labels[:, None]], 1)
    assert sorted(rows.tolist()) == sorted(whole.tolist())
    assert torch.equal(split_digits(400)[2], test), "always the same split"
    assert min(test_labels.bincount(minlength=10)) > 20


def test_normalize() -> None:
    images = torch.randint(0, 256, (5, 3, 4, 6), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    normalized = normalize(images).double()
    for channel in range(3):
        expected = (images[:, channel].double() / 255 - IMAGENET_MEAN[channel]) / IMAGENET_STD[channel]
        torch.testing.assert_close(normalized[:, channel], expected, rtol=1e-5, atol=1e-6)
    assert normalize(images).is_contiguous(memory_format=torch.channels_last)


def crops(image: Tensor, padding: int) -> list[Tensor]:
    """Every crop of the zero-padded image [C, H, W], then each of them mirrored."""
    height, width = image.shape[1:]
    padded = torch.zeros(image.shape[0], height + 2 * padding, width + 2 * padding, dtype=image.dtype)
    padded[:, padding : padding + height, padding : padding + width] = image
    places = range(2 * padding + 1)
    found = [padded[:, i : i + height, j : j + width] for i in places for j in places]
    return found + [crop.flip(2) for crop in found]


@pytest.mark.parametrize(("shape", "padding"), [((3, 6, 6), 2), ((1, 5, 7), 1)])
def test_augment_takes_crops_and_mirror_images(shape: tuple[int, ...], padding: int) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(1, 256, (200, *shape), generator=generator).to(torch.uint8)
    augmented = augment(images, generator, padding)
    assert augmented.shape == images.shape
    assert augmented.dtype == images.dtype
    chosen = set()
    for image, output in zip(images, augmented, strict=True):
        matches = [i for i, crop in enumerate(crops(image, padding)) if torch.equal(crop, output)]
        assert len(matches) == 1
        chosen.update(matches)
    assert len(chosen) > 0.75 * 2 * (2 * padding + 1) ** 2, "places and mirror images all occur"


def loader(seed: int = 0, augmented: bool = False) -> Batches:
    images = torch.arange(10 * 3 * 8 * 8).remainder(251).to(torch.uint8).view(10, 3, 8, 8)
    return Batches(images, torch.arange(10), 4, seed=seed, augmented=augmented, normalized=False)


@pytest.mark.parametrize("augmented", [False, True])
def test_batches_depend_on_seed_and_epoch_alone(augmented: bool) -> None:
    first, second = loader(3, augmented), loader(3, augmented)
    epochs = []
    for _ in range(2):
        a, b = list(first), list(second)
        assert len(a) == len(first) == 2, "an incomplete last batch is dropped"
        assert all(torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(a, b, strict=True))
        epochs.append(torch.cat([y for _, y in a]).tolist())
        assert len(set(epochs[-1])) == 8
    assert epochs[0] != epochs[1]
    assert [y.tolist() for _, y in loader(4, augmented)] != [epochs[0][:4], epochs[0][4:]]
    resumed = loader(3, augmented)
    resumed.epoch = 1
    assert torch.cat([y for _, y in resumed]).tolist() == epochs[1]


def test_batches_keep_images_with_their_labels() -> None:
    batches = loader()
    for images, labels in batches:
        assert torch.equal(images, batches.images[labels])
    normalized = Batches(batches.images, batches.labels, 4)
    for images, labels in normalized:
        torch.testing.assert_close(images, normalize(batches.images[labels]))


def test_digits_net() -> None:
    assert DigitsNet()(torch.rand(5, 1, 8, 8)).shape == (5, 10)
    size = sum(p.numel() for p in DigitsNet().parameters())
    assert size == 9 * (16 + 16 * 32 + 32 * 64) + 2 * (16 + 32 + 64) + 650
