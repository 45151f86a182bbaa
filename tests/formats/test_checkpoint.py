"""Checkpoints: any state comes back, damage is noticed, a failed write loses nothing."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fishleg.formats import checkpoint

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5),
    st.lists(st.floats(-9, 9), max_size=3).map(torch.tensor),
)  # fmt: skip


STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=3),
    ),
    max_leaves=8,
)  # fmt: skip


def same(a, b):
    if torch.is_tensor(a):
        return torch.is_tensor(b) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(STATES)
def test_any_state_comes_back_as_it_was(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("any") / "x.ckpt"
    checkpoint.save(path, state)
    assert same(checkpoint.load(path), state)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64])
def test_dtypes_strides_and_scalars(tmp_path, dtype):
    x = torch.arange(6).view(2, 3).to(dtype)
    state = {"t": x.t(), "scalar": x[1, 1], "empty": x[:0], "same": (x, x)}
    checkpoint.save(tmp_path / "x.ckpt", state)
    assert same(checkpoint.load(tmp_path / "x.ckpt"), {**state, "t": x.t().contiguous()})


def test_values_that_cannot_be_saved_are_refused(tmp_path):
    with pytest.raises(TypeError, match="cannot save a set"):
        checkpoint.save(tmp_path / "x.ckpt", {"a": {1, 2}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", range(0, 400, 13))
def test_every_changed_byte_is_noticed(tmp_path, place):
    path = tmp_path / "x.ckpt"
    checkpoint.save(path, {"weights": torch.arange(8.0), "step": 3})
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.load(path)


@pytest.mark.parametrize("left", [0, 1, 8, 100, -1])
def test_truncation_is_noticed(tmp_path, left):
    path = tmp_path / "x.ckpt"
    checkpoint.save(path, {"weights": torch.arange(8.0)})
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(checkpoint.CheckpointError, match="damaged"):
        checkpoint.load(path)


def test_other_files_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "other.ckpt")
    with pytest.raises(checkpoint.CheckpointError, match="not a fishleg checkpoint"):
        checkpoint.load(tmp_path / "other.ckpt")
    with pytest.raises(checkpoint.CheckpointError, match="there is no checkpoint"):
        checkpoint.load(tmp_path / "missing.ckpt")


def test_the_store_keeps_the_last_and_the_protected(tmp_path):
    store = checkpoint.Store(tmp_path / "deep" / "store", keep=2)
    first = store.save({"i": 0})
    for i in range(1, 5):
        store.save({"i": i}, protect=first)
    assert [p.name for p in store.paths()] == ["000000.ckpt", "000003.ckpt", "000004.ckpt"]
    found = store.latest()
    assert found is not None
    assert found[1] == {"i": 4}
    assert checkpoint.Store(tmp_path / "none").latest() is None
    with pytest.raises(ValueError, match="keep must be >= 1, got 0"):
        checkpoint.Store(tmp_path, keep=0)


# The files of this process may not grow beyond 20 kB: the second write fails midway, as on a full disk.
FILL = """
import resource, signal, sys
from pathlib import Path
import torch
from fishleg.formats import checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = checkpoint.Store(Path(sys.argv[1]))
store.save({"small": torch.zeros(10)})
try:
    store.save({"large": torch.zeros(100_000)})
except checkpoint.CheckpointError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_good_one(tmp_path):
    command = [sys.executable, "-c", FILL, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "cannot write" in run.stdout
    assert "the last complete checkpoint is" in run.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["000000.ckpt"]
    assert checkpoint.load(tmp_path / "000000.ckpt")["small"].shape == (10,)
