"""Files are written completely or not at all, replace nothing by accident, and follow no link."""

import errno
import itertools
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fishleg.formats import files

JSON = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=9)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
)


@given(JSON)
def test_json_is_laid_out_and_nothing_else(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("json") / "x.json"
    files.write_json(path, value)
    assert json.loads(path.read_text(encoding="utf-8")) == value


def test_lists_of_numbers_take_one_line(tmp_path):
    files.write_json(tmp_path / "x.json", {"a": [1, 2.5, None], "b": ["x  y", "[\n"]})
    assert (
        tmp_path / "x.json"
    ).read_text() == '{\n "a": [ 1, 2.5, null ],\n "b": [\n  "x  y",\n  "[\\n"\n ]\n}\n'


def test_json_has_no_bare_nan(tmp_path):
    nan, inf = float("nan"), float("inf")
    files.write_json(tmp_path / "x.json", {"a": nan, "b": [1.0, -inf, (nan,)], "c": {"d": inf}})
    assert json.loads((tmp_path / "x.json").read_text()) == {
        "a": None,
        "b": [1, None, [None]],
        "c": {"d": None},
    }


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


@pytest.mark.parametrize("new", [True, False])
def test_links_are_not_followed(tmp_path, monkeypatch, new):
    theirs = tmp_path / "theirs"
    theirs.write_text("precious")
    path = tmp_path / "x"
    path.symlink_to(theirs)
    monkeypatch.setattr(files, "_numbers", itertools.count(7))
    temporary = tmp_path / f".x.{os.getpid()}-7.partial"
    temporary.symlink_to(theirs)
    if new:
        with pytest.raises(FileExistsError):
            files.write_atomically(path, b"ours", new=True)
        assert path.is_symlink()
    else:
        files.write_atomically(path, b"ours")
        assert path.read_bytes() == b"ours"
        assert not path.is_symlink()
    assert theirs.read_text() == "precious"
    assert temporary.is_symlink()


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x"
    files.write_atomically(path, b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_only_leftovers_of_named_files_are_removed(tmp_path):
    ours = [".run.json.123-0.partial", ".run.json.9-77.partial"]
    theirs = [
        ".run.json.partial",
        ".other.json.1.partial",
        ".run.json.12a.partial",
        "run.json.1.partial",
        "run.json",
    ]
    for name in [*ours, *theirs]:
        (tmp_path / name).touch()
    files.remove_leftovers(tmp_path, ["run.json"])
    assert {p.name for p in tmp_path.iterdir()} == set(theirs)
