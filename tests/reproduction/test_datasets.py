"""CIFAR-10 from its files."""

from pathlib import Path

import pytest
import torch

from reproduction.workloads.datasets import cifar10, data_directory


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
