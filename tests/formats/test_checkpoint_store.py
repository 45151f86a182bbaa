"""Stores touch their own files only; content that does not fit is skipped like a damaged file."""

import json
import os
from pathlib import Path

import pytest
import torch

from fishleg.formats import checkpoint
from fishleg.formats.checkpoint import CheckpointError, Store
from fishleg.formats.tensor_files import checksum


def write_structure(path: Path, structure: str, tensors: dict[str, torch.Tensor] | None = None) -> None:
    """A checkpoint with a correct checksum, whatever its structure is."""
    tensors = tensors or {"0": torch.ones(2)}
    metadata = {
        "format": "fishleg-1", "structure": structure, "sha256": checksum(tensors, structure),
    }  # fmt: skip
    path.write_bytes(checkpoint.to_bytes(tensors, metadata))


@pytest.mark.parametrize(
    "structure",
    [
        "", "{", "nan", '{"$tensor": "7"}', '{"$tensor": 0}', '{"$tensor": ["0"]}', '{"$tensor": null}', "{}",
        '{"$dict": 3}', '{"$dict": [1]}', '{"$dict": [[1]]}', '{"$dict": [[1, 2, 3]]}', '{"$dict": ["ab"]}',
        '{"$dict": {"a": 1}}', '{"$dict": [[[1], 2]]}', '{"$dict": [[{"$dict": []}, 2]]}', '{"$tuple": 3}',
        '{"$tuple": {"a": 1}}', '{"$tuple": "abc"}', '{"$other": []}', '{"$dict": [], "$tuple": []}',
        '[{"a": 1}]', "[" * 99 + "]" * 99, "[" * 100_000, '{"$tuple": [' * 900 + "]}" * 900, "1" * 5000,
    ],
)  # fmt: skip
def test_wrong_content_with_a_correct_checksum_is_a_checkpoint_error(tmp_path: Path, structure: str) -> None:
    write_structure(tmp_path / "x.ckpt", '{"$dict": [["a", {"$tensor": "0"}]]}')
    assert torch.equal(checkpoint.load(tmp_path / "x.ckpt")["a"], torch.ones(2))
    write_structure(tmp_path / "x.ckpt", structure)
    if structure.startswith("[[") and structure.endswith("]]"):
        checkpoint.load(tmp_path / "x.ckpt")  # deep, but not too deep
        return
    with pytest.raises(CheckpointError, match=r"x\.ckpt holds no state that this version can read: .+"):
        checkpoint.load(tmp_path / "x.ckpt")


@pytest.mark.parametrize("special", ["pipe", "/dev/zero", "."])
def test_what_is_no_file_is_told_at_once(tmp_path: Path, special: str) -> None:
    path = tmp_path / special
    if special == "pipe":
        os.mkfifo(path)
    with pytest.raises(CheckpointError, match="damaged: "):
        checkpoint.load(path)


def test_a_checkpoint_whose_content_does_not_fit_is_followed_by_the_one_before_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    paths = [store.save({"step": step}) for step in range(3)]
    assert store.latest() == (paths[2], {"step": 2})
    assert store.latest(before=paths[2]) == (paths[1], {"step": 1})
    assert store.latest(before=paths[0]) is None


def test_checkpoints_of_others_are_neither_read_nor_deleted(tmp_path: Path) -> None:
    for name in ("000123.ckpt", "000001.txt", "x.partial", "000000.ckpt.partial", "mine.ckpt"):
        (tmp_path / name).write_bytes(b"precious")
    before = {path.name for path in tmp_path.iterdir()}
    store = Store(tmp_path, keep=1, written=0)
    assert store.latest() is None
    for i in range(5):
        assert store.next_path().name == f"00000{i}.ckpt"
        store.save({"i": i})
    assert store.owned == ["000004.ckpt"]
    assert {path.name for path in tmp_path.iterdir()} == {*before, "000004.ckpt"}
    assert all((tmp_path / name).read_bytes() == b"precious" for name in before)


@pytest.mark.parametrize("kind", ["file", "link", "dangling link", "directory"])
def test_the_next_number_is_never_overwritten(tmp_path: Path, kind: str) -> None:
    taken, users = tmp_path / "000001.ckpt", tmp_path / "users"
    users.write_bytes(b"precious")
    store = Store(tmp_path)
    store.save({"i": 0})
    if kind == "directory":
        taken.mkdir()
    elif kind == "file":
        taken.write_bytes(b"precious")
    else:
        taken.symlink_to(users if kind == "link" else tmp_path / "nowhere")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=r"000001\.ckpt exists and was not written by this run"):
        store.save({"i": 1})
    assert sorted(tmp_path.iterdir()) == before
    assert users.read_bytes() == b"precious"
    assert store.owned == ["000000.ckpt"]


def test_a_resumed_store_goes_on_with_its_own(tmp_path: Path) -> None:
    first = Store(tmp_path, keep=2)
    for i in range(3):
        first.save({"i": i})
    (tmp_path / "000123.ckpt").write_bytes(b"precious")
    store = Store(tmp_path, keep=2, written=4)  # killed after it claimed 3, before it was written
    assert [path.name for path in store.paths()] == ["000001.ckpt", "000002.ckpt"]
    found = store.latest()
    assert found is not None
    assert found[1] == {"i": 2}
    assert store.save({"i": 4}).name == "000004.ckpt"
    assert [path.name for path in store.paths()] == ["000002.ckpt", "000004.ckpt"]
    assert (tmp_path / "000123.ckpt").read_bytes() == b"precious"


def test_every_checkpoint_of_a_directory(tmp_path: Path) -> None:
    for name in ("000002.ckpt", "000010.ckpt", "1000000.ckpt", "0000003.ckpt", "1.ckpt", "000001.ckpt.bak"):
        checkpoint.save(tmp_path / name, {"name": name})
    store = Store(tmp_path)
    assert [path.name for path in store.paths()] == ["000002.ckpt", "000010.ckpt", "1000000.ckpt"]
    assert Store(tmp_path / "none").latest() is None


def test_own_leftovers_are_removed(tmp_path: Path) -> None:
    token = "0123456789abcdef"
    for name in ("000000.ckpt", "000001.ckpt", "000007.ckpt", "users"):
        (tmp_path / f".{name}.{token}.partial").write_bytes(b"half")
    store = Store(tmp_path)
    store.save({"i": 0})
    store.save({"i": 1})
    left = sorted(path.name for path in tmp_path.glob(".*"))
    assert left == [f".000007.ckpt.{token}.partial", f".users.{token}.partial"]


def test_metadata_of_a_checkpoint_is_sorted(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "x.ckpt", {"a": 1})
    data = (tmp_path / "x.ckpt").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert list(header["__metadata__"]) == ["format", "sha256", "structure"]
