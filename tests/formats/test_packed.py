"""Packed files of sparse models."""

from pathlib import Path

import torch

from fishleg.formats.packed import pack, unpack


def test_packing_is_lossless_and_small():
    dense = torch.randn(30, 11)
    sparse = dense * (torch.rand(30, 11) < 0.1)
    state = {
        "dense": dense,
        "sparse": sparse,
        "half": sparse.bfloat16(),
        "count": torch.tensor(3),
        "none": sparse[:0],
    }
    back = unpack(pack(state))
    assert back.keys() == state.keys()
    assert all(
        torch.equal(back[name], value) and back[name].dtype == value.dtype for name, value in state.items()
    )
    assert sum(t.nbytes for n, t in pack(state).items() if n.startswith("sparse")) < 0.25 * sparse.nbytes
    assert unpack(state) == state


def test_a_packed_file_is_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = {"a": torch.tensor([0.0, 1.0, 0.0, 0.0]), "b": torch.tensor([1])}
    save_file(pack(state), tmp_path / "packed.safetensors")
    for path in (tmp_path / "packed.safetensors", str(tmp_path / "packed.safetensors")):
        found = unpack(path)
        assert all(torch.equal(found[name], value) for name, value in state.items())
