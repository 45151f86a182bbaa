"""Data and models that travel with the package."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fishleg.workloads.digits import CIFAR_MEAN, CIFAR_STD, Batches, augment, digits, normalize, split_digits
from fishleg.workloads.digits_net import DigitsNet
from reproduction.workloads.datasets import cifar10, data_directory
from reproduction.workloads.networks import CifarResNet, autoencoder, resnet20


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# --- digits -------------------------------------------------------------------------------------------------


def test_digits() -> None:
    images, labels = digits()
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
    images, labels = digits()
    whole = torch.cat([images.flatten(1), labels[:, None]], 1)
    assert sorted(rows.tolist()) == sorted(whole.tolist())
    assert torch.equal(split_digits(400)[2], test), "always the same split"
    assert min(test_labels.bincount(minlength=10)) > 20


# --- CIFAR-10 -----------------------------------------------------------------------------------------------


def test_cifar_missing_or_misnamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"CIFAR-10 is not at .*cifar-10-batches-bin \(missing data_batch_1"
    ):
        cifar10("train", tmp_path)
    monkeypatch.setenv("FISHLEG_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(FileNotFoundError, match=r"elsewhere.*missing test_batch\.bin.*or point FISHLEG_DATA"):
        cifar10("test")
    with pytest.raises(ValueError, match="split must be 'train' or 'test', got 'valid'"):
        cifar10("valid", tmp_path)


def test_cifar_binary_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One label byte, then 1024 bytes each of red, green and blue, row by row."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (4, 3073), generator=generator).to(torch.uint8)
    rows[:, 0] = torch.tensor([3, 0, 9, 1])
    content = bytes(rows.flatten().tolist())
    (folder / "test_batch.bin").write_bytes(content)
    monkeypatch.setattr("reproduction.workloads.datasets._CIFAR_IMAGES", 4)
    images, labels = cifar10("test", tmp_path)
    assert labels.tolist() == [3, 0, 9, 1]
    assert images.shape == (4, 3, 32, 32)
    assert int(images[2, 1, 5, 7]) == int(rows[2, 1 + 1024 + 32 * 5 + 7])
    for damaged, why in (
        (content[:-1], "12291 bytes, expected 12292"),
        (content[:3073], "3073 bytes, expected 12292"),
        (b"", "0 bytes"),
        (b"\xff" + content[1:], "labels above 9"),
    ):
        (folder / "test_batch.bin").write_bytes(damaged)
        with pytest.raises(ValueError, match=f"test_batch.bin is damaged .{why}.*remove .*--download"):
            cifar10("test", tmp_path)


def test_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FISHLEG_DATA", raising=False)
    assert data_directory() == Path("data")
    monkeypatch.setenv("FISHLEG_DATA", str(tmp_path))
    assert data_directory() == tmp_path
    assert data_directory("here") == Path("here")


def test_normalize() -> None:
    images = torch.randint(0, 256, (5, 3, 4, 6), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    normalized = normalize(images).double()
    for channel in range(3):
        expected = (images[:, channel].double() / 255 - CIFAR_MEAN[channel]) / CIFAR_STD[channel]
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


# --- batches ------------------------------------------------------------------------------------------------


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


# --- models -------------------------------------------------------------------------------------------------


def test_resnet20_has_the_published_size() -> None:
    """Shortcuts without parameters (He et al., option A)."""
    convolutions = 9 * (3 * 16 + 6 * 16 * 16 + 16 * 32 + 5 * 32 * 32 + 32 * 64 + 5 * 64 * 64)
    norms = 2 * (7 * 16 + 6 * 32 + 6 * 64)
    assert size(resnet20()) == convolutions + norms + 64 * 10 + 10 == 269_722
    assert resnet20(7)(torch.randn(2, 3, 32, 32)).shape == (2, 7)
    assert size(CifarResNet(depth=9)) == 853_018  # ResNet56


def test_resnet_shortcut_is_a_strided_slice_with_zero_channels() -> None:
    block = resnet20().layer2[0].eval()
    with torch.no_grad():
        block.bn2.weight.zero_()  # leaves the shortcut alone
    x = torch.rand(2, 16, 6, 6)
    expected = torch.zeros(2, 32, 3, 3)
    expected[:, 8:24] = x[:, :, ::2, ::2]
    torch.testing.assert_close(block(x).detach(), expected)


def test_small_models() -> None:
    x = torch.rand(5, 1, 8, 8)
    assert DigitsNet()(x).shape == (5, 10)
    assert size(DigitsNet()) == 9 * (16 + 16 * 32 + 32 * 64) + 2 * (16 + 32 + 64) + 650
    model = autoencoder()
    assert model(x.flatten(1)).shape == (5, 64)
    widths = [module.out_features for module in model if isinstance(module, nn.Linear)]
    assert widths == [48, 24, 8, 24, 48, 64]
    assert isinstance(model[-1], nn.Linear), "outputs are logits"


def test_resnet20_loads_the_shared_weights() -> None:
    beside = Path(__file__).parents[2] / "shared" / "models"
    places = [Path(os.environ[name]) for name in ("FISHLEG_DATA",) if name in os.environ] + [beside]
    found = [p for place in places if (p := place / "resnet20-cifar10.pt").is_file()]
    if not found:
        pytest.skip("resnet20-cifar10.pt is neither in $FISHLEG_DATA nor beside the repository")
    torch.set_default_dtype(torch.float32)
    state = torch.load(found[0], weights_only=True)
    model = resnet20()
    model.load_state_dict(state)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    logits = model.eval()(normalize(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)))
    assert bool(torch.isfinite(logits).all())
    assert float(logits.detach().abs().max()) > 1, "not a network at initialisation"
