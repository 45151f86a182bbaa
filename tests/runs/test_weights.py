"""Files of weights: what does not fit is refused, and the model stays as it was."""

import copy
import os
import pickle
import time
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from fishleg.formats.packed import pack
from fishleg.formats.tensor_files import to_bytes
from fishleg.runs.sources import SourceError
from fishleg.runs.weights import SHRUNK, apply_weights, load_weights


def network(hidden: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 3))


def write(path: Path, state: dict[str, torch.Tensor], kind: str) -> Path:
    if kind == "torch":
        torch.save(state, path.with_suffix(".pt"))
        return path.with_suffix(".pt")
    entries = pack(state) if kind == "packed" else state
    entries = {name: value.detach().contiguous().clone() for name, value in entries.items()}
    path = path.with_suffix(".safetensors")
    path.write_bytes(to_bytes(entries, {SHRUNK: "yes"} if kind == "shrunk" else {}))
    return path


def refused(path: Path, model: nn.Module, message: str) -> None:
    before = copy.deepcopy(model.state_dict())
    identities = [id(p) for p in model.parameters()]
    with pytest.raises(SourceError, match=message):
        apply_weights(model, load_weights(path), path)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert identities == [id(p) for p in model.parameters()]


KINDS = ("torch", "plain", "packed", "shrunk")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_fit_are_loaded(tmp_path, kind):
    small = network(5 if kind == "shrunk" else 6)
    with torch.no_grad():
        small[0].weight[0] = 0
    model = network()
    apply_weights(model, load_weights(write(tmp_path / "a", small.state_dict(), kind)), "a")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in small.state_dict().items())
    assert model(torch.ones(2, 4)).shape == (2, 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_other_kinds_of_numbers_are_refused(tmp_path, kind, dtype):
    state = network().state_dict()
    state["3.weight"] = state["3.weight"].to(dtype)
    name = str(dtype).removeprefix("torch.")
    message = rf"does not fit the model: 3\.weight is {name}, the model has float32"
    refused(write(tmp_path / "a", state, kind), network(), message)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_precisions_are_converted(tmp_path, kind, dtype):
    state, model = network().to(dtype).state_dict(), network()
    apply_weights(model, load_weights(write(tmp_path / "a", state, kind)), "a")
    assert torch.equal(model.state_dict()["3.weight"], state["3.weight"].float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["0.weight", "3.bias", "1.running_var"])
def test_nan_and_infinity_are_refused(tmp_path, kind, value, name):
    state = network().state_dict()
    state[name] = state[name].clone()
    state[name].flatten()[-1] = value
    refused(write(tmp_path / "a", state, kind), network(), r"holds NaN or Inf")


@pytest.mark.parametrize("kind", KINDS)
def test_values_beyond_the_range_of_the_model_are_refused(tmp_path, kind):
    state = network().double().state_dict()
    state["0.weight"][0, 0] = 1e300
    message = r"0\.weight has values beyond the range of float32"
    refused(write(tmp_path / "a", state, kind), network(), message)


@pytest.mark.parametrize("kind", KINDS)
def test_integers_keep_their_values(tmp_path, kind):
    name = "1.num_batches_tracked"
    state, model = {**network().state_dict(), name: torch.tensor(7, dtype=torch.int32)}, network()
    apply_weights(model, load_weights(write(tmp_path / "a", state, kind)), "a")
    assert int(model.state_dict()[name]) == 7
    state[name] = torch.tensor(7.5)
    refused(write(tmp_path / "a", state, kind), network(), rf"{name} is float32, the model has int64")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"0.bias": torch.ones(4)}, r"0\.bias has 4 entries, but 0\.weight of the same layer has 5 rows"),
        ({"0.bias": torch.ones(1)}, r"0\.bias has 1 entries, but 0\.weight of the same layer has 5 rows"),
        ({"1.running_var": torch.ones(4)}, r"1\.running_var has 4 entries, but 1\.weight of the same layer"),
        ({"0.weight": torch.ones(0, 4), "0.bias": torch.ones(0)}, r"0\.(weight|bias) would be empty"),
        ({"0.weight": torch.ones(5, 5)}, r"0\.weight has shape \(5, 5\) in the state, which must not exceed"),
        ({"0.weight": torch.ones(5)}, r"0\.weight has shape \(5,\) in the state, which must not exceed"),
        ({"1.num_batches_tracked": torch.ones(1)}, r"1\.num_batches_tracked has shape \(1,\) in the state"),
    ],
)
def test_a_shrunk_state_that_contradicts_itself_is_refused(tmp_path, changes, message):
    refused(write(tmp_path / "a", {**network(5).state_dict(), **changes}, "shrunk"), network(), message)


def test_shapes_that_no_shrinking_makes_are_refused(tmp_path):
    def convolutions(kernel: int = 3, groups: int = 2, channels: int = 4) -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, channels, kernel, groups=groups), nn.LayerNorm(channels))

    path = write(tmp_path / "a", convolutions(kernel=1).state_dict(), "shrunk")
    refused(path, convolutions(), r"0\.weight has shape .* only rows and columns of \(4, 2, 3, 3\)")
    path = write(tmp_path / "a", convolutions(channels=2).state_dict(), "shrunk")
    refused(path, convolutions(), r"0\.weight has shape .* only rows and columns of \(4, 2, 3, 3\)")
    state = convolutions().state_dict()
    state |= {"1.weight": torch.ones(2), "1.bias": torch.ones(2)}
    path = write(tmp_path / "a", state, "shrunk")
    refused(path, convolutions(), r"1\.weight has shape \(2,\), but only rows and columns of \(4,\)")


def test_shared_tensors_have_one_shape(tmp_path):
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        return model

    state = {"0.weight": torch.ones(3, 4), "1.weight": torch.ones(2, 4)}
    message = r"0\.weight and 1\.weight are the same tensor of the model, but have the shapes \(3, 4\) and"
    refused(write(tmp_path / "a", state, "shrunk"), tied(), message)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "prefix",
    ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "_orig_mod.module._orig_mod.module."],
)
def test_prefixes_are_stripped(tmp_path, kind, prefix):
    small = network(5 if kind == "shrunk" else 6).state_dict()
    path = write(tmp_path / "a", {prefix + name: value for name, value in small.items()}, kind)
    assert load_weights(path).keys() == small.keys()
    model = network()
    apply_weights(model, load_weights(path), path)
    assert torch.equal(model.state_dict()["3.weight"], small["3.weight"])


def test_a_compiled_part_and_a_compiled_model(tmp_path):
    state = network().state_dict()
    inner = {name.replace("3.", "3._orig_mod."): value for name, value in state.items()}
    for written, model in ((inner, network()), (state, torch.compile(network())), (inner, inner_compiled())):
        path = write(tmp_path / "a", written, "plain")
        apply_weights(model, load_weights(path), path)
        assert any(torch.equal(value, state["3.weight"]) for value in model.state_dict().values())


def inner_compiled() -> nn.Module:
    model = network()
    model[3] = torch.compile(model[3])
    return model


def test_names_that_become_the_same_are_refused(tmp_path):
    path = write(tmp_path / "a", {"w": torch.ones(2), "_orig_mod.w": torch.zeros(2)}, "torch")
    with pytest.raises(SourceError, match="holds w twice, with and without a prefix"):
        load_weights(path)


def test_a_zip_bomb_is_not_unpacked(tmp_path, monkeypatch):
    torch.save({"w": torch.zeros(3_000_000)}, tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as good, zipfile.ZipFile(tmp_path / "bomb.pt", "w") as bomb:
        for name in good.namelist():
            bomb.writestr(name, good.read(name), compress_type=zipfile.ZIP_DEFLATED)
    assert load_weights(tmp_path / "good.pt")["w"].shape == (3_000_000,)
    assert (tmp_path / "bomb.pt").stat().st_size < 50_000
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was unpacked"))
    with pytest.raises(SourceError, match=r"its entry '.*' is compressed, which torch does not do"):
        load_weights(tmp_path / "bomb.pt")


def test_entries_that_overlap_are_not_read(tmp_path, monkeypatch):
    """Many entries of the directory that name the same bytes."""
    torch.save({"w": torch.zeros(1000)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt", "a") as archive:
        entry = next(e for e in archive.infolist() if e.file_size == 4000)
        archive.writestr("x", b"")
        archive.filelist += [copy.copy(entry) for _ in range(9)]
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(SourceError, match=r"its entries claim [0-9,]+ bytes, the file has [0-9,]+"):
        load_weights(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("size", "stride"), [((2**40,), (0,)), ((10**6, 10**6), (0, 0)), ((2**30, 8), (0, 1))], ids=str
)
def test_a_view_that_claims_a_huge_size_is_refused(tmp_path, size, stride):
    torch.save({"w": torch.ones(8).as_strided(size, stride)}, tmp_path / "a.pt")
    with pytest.raises(
        SourceError, match=r"a\.pt .*\(it claims [0-9,]+ bytes of tensors, the file has [0-9,]+\)"
    ):
        load_weights(tmp_path / "a.pt")


class _Claim:
    """Pickles as a tensor that is larger than its storage."""

    def __init__(self, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self.size, self.stride = size, stride

    def __reduce_ex__(self, protocol: object) -> object:
        arguments = (torch.ones(8).untyped_storage(), 0, self.size, self.stride, False, {})
        storage = torch.storage.TypedStorage(wrap_storage=arguments[0], dtype=torch.float32, _internal=True)
        return torch._utils._rebuild_tensor_v2, (storage, *arguments[1:])


@pytest.mark.parametrize(
    ("size", "stride"), [((9,), (1,)), ((2**40,), (1,)), ((2,), (2**40,)), ((-1,), (1,)), ((2,), (-1,))]
)
def test_a_tensor_beyond_its_storage_is_refused(tmp_path, size, stride):
    torch.save({"w": _Claim(size, stride)}, tmp_path / "a.pt")
    with pytest.raises(SourceError, match=r"a\.pt cannot be read as a state dict"):
        load_weights(tmp_path / "a.pt")


@pytest.mark.parametrize(
    "value",
    [torch.eye(3).to_sparse(), torch.ones(2, device="meta"), torch.ones(2).to_sparse_csr, 3],
    ids=["sparse", "meta", "method", "number"],
)
def test_what_is_no_plain_tensor_is_refused(tmp_path, value):
    with open(tmp_path / "a.pt", "wb") as file:
        torch.save({"w": value}, file)
    with pytest.raises(SourceError, match=r"holds no state dict of tensors: 'w' is a|cannot be read as"):
        load_weights(tmp_path / "a.pt")


def test_deep_and_cyclic_files_end_in_an_error(tmp_path):
    cyclic: dict[str, object] = {}
    cyclic["state_dict"] = cyclic
    torch.save(cyclic, tmp_path / "cyclic.pt")
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    (tmp_path / "deep.pt").write_bytes(b"\x80\x02" + b"(" * 5000 + b"l" * 4999 + b".")
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps({"w": [1.0]}))
    for name in ("cyclic.pt", "deep.pt", "pickle.pt"):
        with pytest.raises(SourceError, match=r"weights: .*\.pt (holds no|cannot be read as a) state dict"):
            load_weights(tmp_path / name)


def test_devices_and_pipes_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    started = time.monotonic()
    for name in ("pipe.pt", "zero.safetensors"):
        with pytest.raises(SourceError, match=r"cannot be read as a state dict \(it is not a regular file\)"):
            load_weights(tmp_path / name)
    assert time.monotonic() - started < 1


def test_an_empty_tensor_with_many_rows_is_refused(tmp_path):
    for kind in ("plain", "torch"):
        path = write(tmp_path / "a", {"w": torch.zeros(2**31, 0)}, kind)
        with pytest.raises(SourceError, match=r"it claims 8,589,934,592 bytes of tensors, the file has"):
            load_weights(path)


def test_eight_bit_numbers_are_converted_and_checked(tmp_path):
    state, model = network().state_dict(), network()
    state["3.bias"] = torch.tensor([1.0, 2.0, -3.0]).to(torch.float8_e5m2)
    apply_weights(model, load_weights(write(tmp_path / "a", state, "plain")), "a")
    assert model[3].bias.tolist() == [1, 2, -3]
    state["3.bias"] = torch.tensor([1.0, float("nan"), -3.0]).to(torch.float8_e5m2)
    refused(write(tmp_path / "a", state, "plain"), network(), r"holds NaN or Inf in 3\.bias")


@pytest.mark.parametrize("kind", KINDS)
def test_messages_have_one_line_whatever_the_names(tmp_path, kind):
    state = {**network().state_dict(), "a\nb\x1b[2J": torch.ones(2)}
    with pytest.raises(SourceError, match=r"a\\nb\\x1b\[2J") as caught:
        apply_weights(network(), load_weights(write(tmp_path / "a", state, kind)), "a")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("old", [False, True], ids=["archive", "old file"])
def test_a_pickle_that_makes_a_huge_bytearray_is_refused_at_once(tmp_path, old):
    class Bomb:
        def __reduce__(self):
            return bytearray, (2_000_000_000,)

    path = tmp_path / "bomb.pt"
    torch.save({"weight": torch.zeros(2), "bomb": Bomb()}, path, _use_new_zipfile_serialization=not old)
    started = time.monotonic()
    with pytest.raises(SourceError, match="its pickle makes a bytearray"):
        load_weights(path)
    assert time.monotonic() - started < 1
