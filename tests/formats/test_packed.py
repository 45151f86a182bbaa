"""Packed files of sparse models."""

from pathlib import Path

import pytest
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


def broken(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """A packed weight of shape [3, 4] with five values, with some of its entries changed or left out."""
    weight = torch.zeros(12)
    weight[[0, 2, 3, 7, 11]] = torch.arange(1.0, 6.0)
    packed = pack({"other": torch.ones(2), "weight": weight.view(3, 4)})
    packed |= {f"weight.${key}": value for key, value in changes.items() if value is not None}
    return {
        name: t for name, t in packed.items() if changes.get(name.removeprefix("weight.$"), t) is not None
    }


BYTES = {"dtype": torch.uint8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": torch.ones(1)}, r"weight\.\$values must have one value for each of the 5 bits .*, got 1"),
        ({"values": torch.ones(4)}, r"weight\.\$values must have one value for each of the 5 bits .*, got 4"),
        ({"values": torch.ones(6)}, r"weight\.\$values must have one value for each of the 5 bits .*, got 6"),
        ({"values": torch.ones(0)}, r"weight\.\$values must have one value for each of the 5 bits .*, got 0"),
        ({"values": torch.ones(5, 1)}, r"weight\.\$values must be a vector of float16 or .*shape \[5, 1\]"),
        ({"values": torch.tensor(1.0)}, r"weight\.\$values must be a vector of float16 or .*shape \[\]"),
        ({"values": torch.ones(5, **BYTES)}, r"weight\.\$values must be a vector of .*, got uint8"),
        ({"values": torch.ones(5, dtype=torch.complex64)}, r"weight\.\$values must be .*, got complex64"),
        ({"mask": torch.ones(1, **BYTES)}, r"weight\.\$mask must have 2 bytes for the shape \[3, 4\], got 1"),
        ({"mask": torch.ones(3, **BYTES)}, r"weight\.\$mask must have 2 bytes for the shape \[3, 4\], got 3"),
        ({"mask": torch.ones(2)}, r"weight\.\$mask must be a vector of uint8, got float32 of shape \[2\]"),
        ({"mask": torch.ones(2, 1, **BYTES)}, r"weight\.\$mask must be a vector of uint8, .* \[2, 1\]"),
        ({"mask": torch.tensor([1, 128], **BYTES)}, r"weight\.\$mask has bits set after its last weight"),
        ({"shape": torch.tensor([-3, -4])}, r"weight\.\$shape must hold .* sizes >= 1, got \[-3, -4\]"),
        ({"shape": torch.tensor([0, 4])}, r"weight\.\$shape must hold .* sizes >= 1, got \[0, 4\]"),
        ({"shape": torch.tensor([3.0, 4.0])}, r"weight\.\$shape must be a vector of int64, got float32"),
        ({"shape": torch.tensor([3, 4], dtype=torch.int32)}, r"weight\.\$shape must be a .*, got int32"),
        ({"shape": torch.tensor(12)}, r"weight\.\$shape must be a vector of int64, got int64 of shape \[\]"),
        ({"shape": torch.tensor([2**40, 2**40])}, r"weight\.\$mask must have 151,115,.* bytes .*, got 2"),
        ({"shape": torch.tensor([2**32, 2**32, 12])}, r"weight\.\$mask must have .* bytes .*, got 2"),
        ({"shape": torch.tensor([2**62])}, r"weight\.\$mask must have .* bytes for the shape .*, got 2"),
        ({"shape": torch.ones(65, dtype=torch.int64)}, r"weight\.\$shape must hold at most 64 sizes"),
        ({"mask": None}, r"weight is packed incompletely: weight\.\$values has no partner weight\.\$mask"),
        ({"values": None}, r"weight is packed incompletely: weight\.\$mask has no partner weight\.\$values"),
        ({"shape": None}, r"weight is packed incompletely: weight\.\$mask has no partner weight\.\$shape"),
    ],
)
def test_a_packed_tensor_that_contradicts_itself_is_refused(
    changes: dict[str, torch.Tensor | None], message: str
) -> None:
    assert unpack(broken())["weight"].flatten().tolist() == [1, 0, 2, 3, 0, 0, 0, 4, 0, 0, 0, 5]
    with pytest.raises(ValueError, match=message):
        unpack(broken(**changes))


def test_a_tensor_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight is there twice: packed \(weight\.\$mask\) and as it is"):
        unpack({**broken(), "weight": torch.ones(3, 4)})


def test_names_of_entries_are_reserved() -> None:
    with pytest.raises(ValueError, match=r"a\.\$mask cannot be packed: names that end in .* are reserved"):
        pack({"a.$mask": torch.ones(2)})


def test_scalars_and_other_element_types() -> None:
    state = {"zero": torch.zeros(()), "eight": torch.zeros(64).to(torch.float8_e4m3fn)}
    back = unpack(pack(state))
    assert torch.equal(back["zero"], state["zero"])
    assert back["eight"].dtype == torch.float8_e4m3fn
    old = {**pack({"zero": torch.zeros(())}), "zero.$shape": torch.zeros(0)}  # as versions before wrote it
    assert torch.equal(unpack(old)["zero"], state["zero"])


def test_a_damaged_file_is_a_value_error(tmp_path: Path) -> None:
    (tmp_path / "packed.safetensors").write_bytes(b"\0\1garbage" * 9)
    with pytest.raises(ValueError, match=r"^.+$"):
        unpack(tmp_path / "packed.safetensors")
