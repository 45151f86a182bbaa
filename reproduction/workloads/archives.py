"""The official archives of the datasets: their addresses, download and verification."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Archive:
    """A file to download, its MD5 as its publishers or users give it, and the directory it unpacks to."""

    name: str
    url: str
    md5: str
    directory: str


CIFAR10 = Archive(
    "CIFAR-10",
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-10-batches-bin",
)
TINY_IMAGENET = Archive(
    "Tiny-ImageNet",
    "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    "90528d7ca1a48142e341f4ef8d21d0de",
    "tiny-imagenet-200",
)


def how_to_get(archive: Archive) -> str:
    """Advice for an error message when the data are not there."""
    return (
        f"Unpack {archive.url} there (--download does it), or point FISHLEG_DATA "
        f"(or --data) at the directory that holds {archive.directory}."
    )


def fetch(archive: Archive, directory: Path, progress: Callable[[str], None] = print) -> Path:
    """The unpacked archive in `directory`, downloaded and checked unless it is there already.

    Nothing appears under its final name before it is complete.
    """
    target = directory / archive.directory
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".download-") as folder:
        packed = Path(folder) / archive.url.rpartition("/")[2]
        _download(archive, packed, progress)
        progress(f"unpacking {packed.name}")
        unpacked = Path(folder) / "unpacked"
        try:
            _unpack(packed, unpacked)
        except (tarfile.ReadError, zipfile.BadZipFile, EOFError) as error:
            raise ValueError(f"{archive.url} cannot be unpacked: {error}; nothing was kept") from error
        if not (unpacked / archive.directory).is_dir():
            raise ValueError(f"{archive.url} holds no directory {archive.directory}")
        os.replace(unpacked / archive.directory, target)
    return target


def _download(archive: Archive, path: Path, progress: Callable[[str], None]) -> None:
    digest, done, told = hashlib.md5(usedforsecurity=False), 0, time.monotonic()
    try:
        with urllib.request.urlopen(archive.url, timeout=30) as source, path.open("wb") as out:
            total = int(source.headers.get("Content-Length") or 0)
            progress(f"downloading {archive.url} ({total / 1e6:.0f} MB)")
            while chunk := source.read(_CHUNK):
                out.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                if time.monotonic() - told > 5:
                    told = time.monotonic()
                    progress(f"   {done / 1e6:.0f} of {total / 1e6:.0f} MB")
    except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
        raise ConnectionError(
            f"{archive.name} could not be downloaded from {archive.url} ({error}). Without a network: fetch "
            f"it elsewhere, check that its MD5 is {archive.md5}, and unpack it so that "
            f"{path.parent.parent / archive.directory} exists."
        ) from error
    if digest.hexdigest() != archive.md5:
        raise ValueError(
            f"{archive.url} has the MD5 {digest.hexdigest()} after {done} bytes, expected {archive.md5}: "
            "the download was cut off or the file is another one; nothing was kept"
        )


def _unpack(packed: Path, target: Path) -> None:
    if zipfile.is_zipfile(packed):
        with zipfile.ZipFile(packed) as pack:
            pack.extractall(target)  # zipfile itself strips absolute paths and ".."
        return
    with tarfile.open(packed) as pack:
        if hasattr(tarfile, "data_filter"):
            pack.extractall(target, filter="data")
            return
        for member in (
            pack.getmembers()
        ):  # older Pythons have no filter: only regular files with plain names are unpacked
            if member.isfile() and ".." not in Path(member.name).parts and not member.name.startswith("/"):
                out = target / member.name
                out.parent.mkdir(parents=True, exist_ok=True)
                source = pack.extractfile(member)
                assert source is not None
                with source, out.open("wb") as file:
                    shutil.copyfileobj(source, file)
