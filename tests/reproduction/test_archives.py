"""Datasets from their official archives: downloads that are whole or not there, layouts, clear errors."""

import hashlib
import io
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from http.client import IncompleteRead
from pathlib import Path

import pytest
import torch

from reproduction.workloads.archives import CIFAR10, TINY_IMAGENET, Archive, fetch
from reproduction.workloads.datasets import cifar10, tiny_imagenet

Image = pytest.importorskip("PIL.Image")


def pack(path: Path, files: dict[str, bytes]) -> Archive:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as target:
            for name, content in files.items():
                target.writestr(name, content)
    else:
        with tarfile.open(path, "w:gz") as target:
            for name, content in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                target.addfile(info, io.BytesIO(content))
    md5 = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    return Archive("Things", path.as_uri(), md5, "things")


@pytest.mark.parametrize("name", ["things.zip", "things.tar.gz"])
def test_an_archive_arrives_whole_and_once(tmp_path: Path, name: str) -> None:
    archive = pack(tmp_path / name, {"things/a/b.txt": b"hello", "things/c": b""})
    out, said = tmp_path / "data", []
    assert (fetch(archive, out, said.append) / "a" / "b.txt").read_bytes() == b"hello"
    assert [path.name for path in out.iterdir()] == ["things"]
    assert archive.url in said[0]
    (tmp_path / name).unlink()
    assert fetch(archive, out) == out / "things"  # nothing to download


def test_a_wrong_checksum_leaves_nothing(tmp_path: Path) -> None:
    archive = replace(pack(tmp_path / "things.zip", {"things/a": b"1"}), md5="0" * 32)
    with pytest.raises(ValueError, match=r"has the MD5 .* expected 0000"):
        fetch(archive, tmp_path / "data", lambda _: None)
    assert not list((tmp_path / "data").iterdir())


def test_an_archive_of_something_else_leaves_nothing(tmp_path: Path) -> None:
    archive = pack(tmp_path / "things.zip", {"others/a": b"1"})
    with pytest.raises(ValueError, match="holds no directory things"):
        fetch(archive, tmp_path / "data", lambda _: None)
    assert not list((tmp_path / "data").iterdir())


def test_without_a_network_the_error_says_what_to_do(tmp_path: Path) -> None:
    archive = Archive("Things", (tmp_path / "nowhere.zip").as_uri(), "a" * 32, "things")
    with pytest.raises(ConnectionError, match=f"MD5 is {'a' * 32}.*things exists"):
        fetch(archive, tmp_path / "data", lambda _: None)
    assert not list((tmp_path / "data").iterdir())


@pytest.mark.parametrize("evil", ["../evil", "/evil"])
def test_an_archive_writes_nowhere_else(tmp_path: Path, evil: str) -> None:
    archive = pack(tmp_path / "things.tar.gz", {"things/a": b"1", evil: b"2"})
    try:
        fetch(archive, tmp_path / "data", lambda _: None)
    except tarfile.FilterError:
        assert not list((tmp_path / "data").iterdir())
    assert not list(tmp_path.rglob("**/evil"))
    assert not Path("/evil").exists()


def tiny(root: Path, classes: list[str], size: int = 64) -> None:
    """A Tiny-ImageNet of uniformly grey pictures: 3 to train on and 1 to test on, for each class."""
    root.mkdir(parents=True)
    (root / "wnids.txt").write_text("\n".join(classes) + "\n")
    (root / "val" / "images").mkdir(parents=True)
    lines = []
    for i, name in enumerate(sorted(classes)):
        (root / "train" / name / "images").mkdir(parents=True)
        for k in range(3):
            path = root / "train" / name / "images" / f"{name}_{k}.JPEG"
            Image.new("L" if k == 0 else "RGB", (size, size), 40 * i if k == 0 else (40 * i,) * 3).save(path)
        Image.new("RGB", (size, size), (40 * i,) * 3).save(root / "val" / "images" / f"val_{i}.JPEG")
        lines.append(f"val_{i}.JPEG\t{name}\t0\t0\t9\t9\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))


def test_tiny_imagenet_layout(tmp_path: Path) -> None:
    tiny(tmp_path / "tiny-imagenet-4", ["n03", "n01", "n02", "n04"])
    tiny(tmp_path / "tiny-imagenet-2", ["n01", "n02"])
    for split, count in (("train", 3), ("test", 1)):
        images, labels = tiny_imagenet(split, tmp_path)
        assert images.shape == (4 * count, 3, 64, 64)
        assert images.dtype == torch.uint8
        assert labels.bincount().tolist() == [count] * 4
        grey = images.float().mean((1, 2, 3))
        torch.testing.assert_close(grey, 40.0 * labels.float(), atol=2, rtol=0)  # JPEG is not exact


def test_some_classes_of_tiny_imagenet(tmp_path: Path) -> None:
    tiny(tmp_path / "tiny-imagenet-4", ["n03", "n01", "n02", "n04"])
    tiny(tmp_path / "tiny-imagenet-2", ["n01", "n02"])
    _, labels = tiny_imagenet("train", tmp_path, 2)
    assert labels.bincount().tolist() == [3, 3]
    images, labels = tiny_imagenet("test", tmp_path, ["n04", "n02"])
    assert labels.tolist() == [0, 1]
    torch.testing.assert_close(
        images.float().mean((1, 2, 3)), torch.tensor([40.0, 120.0], dtype=torch.float32), atol=2, rtol=0
    )
    with pytest.raises(
        FileNotFoundError, match=r"with 200 classes is not in .*tiny-imagenet-2 has 2 classes"
    ):
        tiny_imagenet("train", tmp_path, 200)
    with pytest.raises(FileNotFoundError, match=r"these 2 classes \(n05, for one, is lacking\) is not in"):
        tiny_imagenet("train", tmp_path, ["n01", "n05"])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:150])


@pytest.mark.parametrize(
    ("split", "damage", "match"),
    [
        (
            "train",
            lambda root: shutil.rmtree(root / "train" / "n03"),
            "0 train images of n03, and 3 of others",
        ),
        (
            "train",
            lambda root: (root / "train/n02/images/n02_1.JPEG").unlink(),
            "2 train images of n02, and 3",
        ),
        ("train", lambda root: cut(root / "train/n02/images/n02_1.JPEG"), r"n02_1\.JPEG cannot be read"),
        (
            "test",
            lambda root: (root / "val/val_annotations.txt").unlink(),
            r"No such file.*val_annotations\.txt",
        ),
        ("test", lambda root: (root / "val/val_annotations.txt").write_text("n01\n"), "has the line 'n01'"),
        ("test", lambda root: (root / "val/images/val_0.JPEG").unlink(), r"val_0\.JPEG cannot be read"),
    ],
)
def test_a_damaged_tiny_imagenet_is_refused(
    tmp_path: Path, split: str, damage: Callable[[Path], object], match: str
) -> None:
    root = tmp_path / "tiny-imagenet-3"
    tiny(root, ["n01", "n02", "n03"])
    damage(root)
    with pytest.raises(
        ValueError, match=f"tiny-imagenet-3 is incomplete or damaged, remove it: .*{match}.*--download"
    ):
        tiny_imagenet(split, tmp_path)


def test_an_empty_list_of_classes_is_no_dataset(tmp_path: Path) -> None:
    tiny(tmp_path / "tiny-imagenet-1", ["n01"])
    (tmp_path / "tiny-imagenet-1" / "wnids.txt").write_text("\n")
    with pytest.raises(FileNotFoundError, match="Tiny-ImageNet is not in"):
        tiny_imagenet("train", tmp_path)


def test_a_damaged_archive_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "things.tar.gz"
    pack(path, {"things/a": bytes(range(256)) * 50})
    cut(path)
    md5 = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    with pytest.raises(ValueError, match=r"things\.tar\.gz cannot be unpacked: .*nothing was kept"):
        fetch(Archive("Things", path.as_uri(), md5, "things"), tmp_path / "data", lambda _: None)
    assert not list((tmp_path / "data").iterdir())


def test_a_download_that_breaks_off_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise IncompleteRead(b"")

    monkeypatch.setattr("urllib.request.urlopen", broken)
    archive = Archive("Things", "http://nowhere/things.zip", "a" * 32, "things")
    with pytest.raises(ConnectionError, match=r"IncompleteRead.*Without a network"):
        fetch(archive, tmp_path / "data", lambda _: None)


def test_pictures_of_another_size_are_refused(tmp_path: Path) -> None:
    tiny(tmp_path / "tiny-imagenet-1", ["n01"], size=32)
    with pytest.raises(ValueError, match=r"_0\.JPEG is 32×32"):
        tiny_imagenet("train", tmp_path)


@pytest.mark.parametrize(("read", "archive"), [(cifar10, CIFAR10), (tiny_imagenet, TINY_IMAGENET)])
def test_missing_data_says_where_from(tmp_path: Path, read, archive: Archive) -> None:
    with pytest.raises(FileNotFoundError, match=f"{archive.url}.*--download.*FISHLEG_DATA"):
        read("train", tmp_path)
    with pytest.raises(ValueError, match="split must be"):
        read("validation", tmp_path)
