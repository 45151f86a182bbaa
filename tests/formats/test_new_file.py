"""New files appear complete or not at all, and never over another file."""

import os
from pathlib import Path

import pytest

from fishleg.formats.new_file import check_new_file, write_new_file


def refuse_link(*_: object) -> None:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
def test_a_new_file_is_written_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", refuse_link)
    check_new_file(tmp_path / "a.bin")
    write_new_file(tmp_path / "a.bin", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]
    assert (tmp_path / "a.bin").read_bytes() == b"content"
    assert (tmp_path / "a.bin").stat().st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
@pytest.mark.parametrize("kind", ["file", "link to a file", "dangling link", "directory"])
def test_nothing_is_written_over_or_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool, kind: str
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", refuse_link)
    path, other = tmp_path / "a.bin", tmp_path / "other"
    if kind == "file":
        path.write_bytes(b"mine")
    elif kind == "directory":
        path.mkdir()
    else:
        if kind == "link to a file":
            other.write_bytes(b"mine")
        path.symlink_to(other)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match="is there already and is not written over"):
        check_new_file(path)
    with pytest.raises(ValueError, match="is there already and is not written over"):
        write_new_file(path, b"content")
    assert sorted(tmp_path.iterdir()) == before
    for mine in (path, other):
        assert not mine.is_file() or mine.read_bytes() == b"mine"


@pytest.mark.parametrize("fails", ["fsync", "link"])
def test_an_error_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, fails, full)
    if fails == "link":
        monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ValueError, match=r"cannot write .*a\.bin: No space left on device"):
        write_new_file(tmp_path / "a.bin", b"content")
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_new_file(tmp_path / "a.bin", b"content")
    assert list(tmp_path.iterdir()) == []


def test_what_can_be_known_before_is_checked_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="its directory does not exist"):
        check_new_file(tmp_path / "no" / "a.bin")
    with pytest.raises(ValueError, match="File name too long"):
        check_new_file(tmp_path / (300 * "x"))
    with pytest.raises(ValueError, match=r"cannot be written: .*null"):
        check_new_file(tmp_path / "a\0b")
    with pytest.raises(ValueError, match="does not name a file"):
        check_new_file(Path(""))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match="Not a directory"):
        check_new_file(tmp_path / "file" / "a.bin")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="is read-only"):
        check_new_file(tmp_path / "a.bin")
