"""Files are written completely or not at all, links are not followed, and reading is bounded."""

import errno
import os
import time
from pathlib import Path

import pytest

from fishleg.formats import files


def test_nothing_else_is_left_behind(tmp_path: Path) -> None:
    files.write_atomically(tmp_path / "a", b"1")
    files.write_atomically(tmp_path / "a", b"2")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"a": b"2"}


@pytest.mark.parametrize("link", ["a.partial", ".a.partial"])
def test_a_link_beside_the_file_is_not_followed(tmp_path: Path, link: str) -> None:
    users = tmp_path / "users"
    users.write_bytes(b"precious")
    (tmp_path / link).symlink_to(users)
    files.write_atomically(tmp_path / "a", b"1")
    assert users.read_bytes() == b"precious"
    assert (tmp_path / link).is_symlink()
    assert (tmp_path / "a").read_bytes() == b"1"


def test_a_link_at_the_name_of_the_temporary_file_is_not_followed(tmp_path: Path, monkeypatch) -> None:
    users = tmp_path / "users"
    users.write_bytes(b"precious")
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "0" * 16)
    (tmp_path / f".a.{'0' * 16}.partial").symlink_to(users)
    with pytest.raises(FileExistsError):
        files.write_atomically(tmp_path / "a", b"1")
    assert users.read_bytes() == b"precious"
    assert (tmp_path / f".a.{'0' * 16}.partial").is_symlink()
    assert not (tmp_path / "a").exists()


def test_a_link_at_the_name_of_the_file_is_replaced_itself(tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_bytes(b"precious")
    (tmp_path / "a").symlink_to(users)
    files.write_atomically(tmp_path / "a", b"1")
    assert users.read_bytes() == b"precious"
    assert not (tmp_path / "a").is_symlink()
    assert (tmp_path / "a").read_bytes() == b"1"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch) -> None:
    files.write_atomically(tmp_path / "a", b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_atomically(tmp_path / "a", b"new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"a": b"old"}


def test_only_leftovers_of_the_named_files_are_removed(tmp_path: Path) -> None:
    token = "0123456789abcdef"
    kept = ["a.partial", ".a.partial", f".b.{token}.partial", f".a.{token}", ".a.users-own.partial", "a"]
    for name in [*kept, f".a.{token}.partial", f".a.b.{token}.partial"]:
        (tmp_path / name).write_bytes(b"")
    files.remove_leftovers([tmp_path / "a", tmp_path / "a.b", tmp_path / "none" / "a"])
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(kept)


def test_reading_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert files.read_limited(path, 5) == b"12345"
    with pytest.raises(OSError, match="it is larger than 4 bytes"):
        files.read_limited(path, 4)
    with pytest.raises(OSError, match="Is a directory"):
        files.read_limited(tmp_path, 4)
    os.mkfifo(tmp_path / "pipe")
    started = time.monotonic()
    for special in (Path("/dev/zero"), tmp_path / "pipe"):
        with pytest.raises(OSError, match="it is not a regular file"):
            files.read_limited(special, 4)
        with pytest.raises(OSError, match="it is not a regular file"):
            files.check_regular(special)
    assert time.monotonic() - started < 1


def test_a_new_file_replaces_nothing(tmp_path):
    path = tmp_path / "x"
    files.write_atomically(path, b"one", new=True)
    with pytest.raises(FileExistsError):
        files.write_atomically(path, b"two", new=True)
    assert path.read_bytes() == b"one"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    files.write_atomically(path, b"three")
    assert path.read_bytes() == b"three"


def test_a_new_file_on_a_file_system_without_hard_links(tmp_path, monkeypatch):
    def no_link(*_: object) -> None:
        raise OSError(errno.EPERM, "not permitted")

    monkeypatch.setattr(os, "link", no_link)
    files.write_atomically(tmp_path / "x", b"one", new=True)
    with pytest.raises(FileExistsError):
        files.write_atomically(tmp_path / "x", b"two", new=True)
    assert (tmp_path / "x").read_bytes() == b"one"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_link_is_in_the_way_of_a_new_file(tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_bytes(b"precious")
    (tmp_path / "a").symlink_to(users)
    with pytest.raises(FileExistsError, match="File exists"):
        files.write_atomically(tmp_path / "a", b"1", new=True)
    assert (tmp_path / "a").is_symlink()
    assert users.read_bytes() == b"precious"
