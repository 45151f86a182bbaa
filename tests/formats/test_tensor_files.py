"""Safetensors files: equal content gives equal bytes, and whatever is wrong is a ValueError."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fishleg.formats import checkpoint
from fishleg.formats.tensor_files import read_tensors, to_bytes

METADATA = {f'key {i} "é"': f"line\n{i}" for i in range(9)}
STATE = {
    "w": torch.arange(6.0).view(2, 3),
    "n": torch.tensor(3),
    "b": torch.tensor([True]),
    "ü": torch.ones(1),
}

WRITE = """
import sys, torch
from fishleg.formats.tensor_files import to_bytes
sys.stdout.buffer.write(to_bytes({"w": torch.ones(3), "v": torch.ones(2)}, {str(i): "x" for i in range(9)}))
"""


def test_what_is_written_is_read_by_safetensors(tmp_path: Path) -> None:
    from safetensors import safe_open

    data = to_bytes(STATE, METADATA)
    (tmp_path / "a.safetensors").write_bytes(data)
    assert int.from_bytes(data[:8], "little") % 8 == 0
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == METADATA
        assert all(torch.equal(file.get_tensor(name), value) for name, value in STATE.items())
    tensors, metadata = read_tensors(tmp_path / "a.safetensors")
    assert metadata == METADATA
    assert tensors.keys() == STATE.keys()


def test_equal_content_gives_equal_bytes() -> None:
    shuffled = dict(reversed(METADATA.items())), dict(reversed(STATE.items()))
    assert len({to_bytes(STATE, METADATA) for _ in range(20)} | {to_bytes(shuffled[1], shuffled[0])}) == 1


@pytest.mark.slow
def test_equal_content_gives_equal_bytes_in_other_processes() -> None:
    written = {
        subprocess.run(
            [sys.executable, "-c", WRITE], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True,
            check=True,
        ).stdout
        for seed in "123"
    }  # fmt: skip
    assert len(written) == 1


def test_checkpoints_are_equal_byte_by_byte(tmp_path: Path) -> None:
    for i in range(9):
        checkpoint.save(tmp_path / f"{i}.ckpt", {"weights": torch.arange(8.0), "step": 3})
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def write(path: Path, header: dict, data: bytes, length: int | None = None) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(
    ("header", "length"),
    [
        ({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}, None),
        ({"w": {"dtype": "F32", "shape": [2**63, 2], "data_offsets": [0, 8]}}, None),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, 2**62),
        ({"w": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}, None),
        ({"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, None),
    ],
)
def test_an_absurd_header_is_a_value_error(tmp_path: Path, header: dict, length: int | None) -> None:
    with pytest.raises(ValueError, match=r"^.+$"):
        read_tensors(write(tmp_path / "a.safetensors", header, bytes(8), length))


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_tensors(tmp_path / "missing")
    with pytest.raises(ValueError, match="Is a directory"):
        read_tensors(tmp_path)
    with pytest.raises(ValueError, match="not a regular file"):
        read_tensors(Path("/dev/zero"))
