"""Exported models: batches of every form, every batch size, and refusals."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import needs_onnx
from torch import Tensor, nn

from fishleg.formats.onnx import OnnxModel, to_onnx
from fishleg.formats.traced import TensorCall, TracedModel, relative_difference, to_pt2, trace_model
from fishleg.runtime.batches import Forward, default_forward, resize_batch

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _float32() -> None:
    torch.set_default_dtype(torch.float32)


class Keywords(nn.Module):
    """Keyword arguments, an embedding, attention, and a mapping as output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, 3)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, *, input_ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        hidden = self.encoder(self.embed(input_ids), src_key_padding_mask=mask == 0)
        return {"logits": self.out(hidden.mean(1)), "hidden": hidden}


class Pair(nn.Module):
    """One argument that is a tuple; several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.a(x[0]) + self.b(x[1]), x[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


def by_hand(model: nn.Module, batch: Any) -> Tensor:
    return model(2 * batch["left"], batch["right"]["deep"])


def make(kind: str) -> tuple[nn.Module, Any, Forward, list[str]]:
    torch.manual_seed(0)
    x, y = torch.randn(5, 4), torch.arange(5) % 3
    if kind == "tensor":
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.ReLU(), nn.Linear(8, 3))
        return model, x, default_forward, ["input"]
    if kind == "images":
        conv = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
        )
        return conv, (torch.randn(5, 3, 8, 8), y), default_forward, ["input"]
    if kind == "one example":
        return nn.Linear(4, 3), (x[:1], y[:1]), default_forward, ["input"]
    if kind == "mapping":
        batch = {"input_ids": torch.randint(0, 20, (5, 6)), "mask": torch.ones(5, 6), "labels": y}
        return Keywords(), batch, default_forward, ["input_ids", "mask"]
    if kind == "tuple":
        return Pair(), ((x, torch.randn(5, 2)), y), default_forward, ["input_0", "input_1"]
    if kind == "recurrent":
        return Recurrent(), (torch.randn(5, 7, 4), y), default_forward, ["input"]
    assert kind == "own forward"
    batch = {"left": x, "right": {"deep": torch.randn(5, 2)}, "labels": y, "scale": 3}
    return nn.Bilinear(4, 2, 3), batch, by_hand, ["left", "right_deep"]


KINDS = ["tensor", "images", "one example", "mapping", "tuple", "recurrent", "own forward"]


def check_everywhere(traced: TracedModel, run: Any, model: nn.Module, batch: Any, forward: Forward) -> None:
    """The outputs are those of the user's call of the model, at sizes that were not used before."""
    model.eval()
    for size in (2, 9):
        resized = resize_batch(batch, size)
        with torch.no_grad():
            expected = forward(model, resized)
            assert relative_difference(expected, run(traced.call.tensors_of(resized))) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_pt2(kind: str) -> None:
    model, batch, forward, names = make(kind)
    modes = [module.training for module in model.modules()]
    traced = trace_model(model, batch, forward)
    assert [module.training for module in model.modules()] == modes
    data, difference = to_pt2(traced)
    assert traced.call.names == names
    assert difference <= 1e-5
    loaded = torch.export.load(io.BytesIO(data)).module()
    check_everywhere(traced, lambda tensors: loaded(*tensors), model, batch, forward)


@needs_onnx
@pytest.mark.parametrize("kind", KINDS)
def test_onnx(kind: str, tmp_path: Path) -> None:
    import onnx

    model, batch, forward, names = make(kind)
    traced = trace_model(model, batch, forward)
    data, difference = to_onnx(traced)
    assert difference <= 1e-5
    session = OnnxModel(data)
    assert session.inputs == names
    check_everywhere(traced, session.run, model, batch, forward)
    proto = onnx.load_model_from_string(data)
    onnx.checker.check_model(proto, full_check=True)
    assert {value.type.tensor_type.shape.dim[0].dim_param for value in proto.graph.input} == {"batch"}
    # no source line, path or version of this machine
    assert str(Path(__file__).parent).encode() not in data
    assert str(Path(torch.__file__).parent).encode() not in data


def test_an_archive_does_not_tell_the_paths_of_this_machine() -> None:
    model, batch, forward, _ = make("tensor")
    data, _ = to_pt2(trace_model(model, batch, forward))
    assert str(Path(torch.__file__).parent).encode() not in data
    assert str(Path(__file__).parent).encode() not in data


class FixedSize(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(5, -1))


class Branches(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.sum()) > 0 else super().forward(-x)


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(3)


def test_refusals(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(5, 4)
    with pytest.raises(ValueError, match=r"fixes the batch size 5, .* write x.flatten\(1\)"):
        trace_model(FixedSize(4, 3), x)
    with pytest.raises(ValueError, match=r"cannot trace the model: .* depends on the values of a tensor"):
        trace_model(Branches(4, 3), x)
    assert capfd.readouterr() == ("", "")  # torch prints and logs the graph
    with pytest.raises(ValueError, match="outputs of the model do not depend on any tensor"):
        trace_model(nn.Linear(4, 3), x, lambda model, batch: model(torch.ones(5, 4)))
    with pytest.raises(
        ValueError, match="archive computes something else than the PyTorch model: on a batch"
    ):
        to_pt2(trace_model(Noisy(4, 3), x))


@needs_onnx
def test_an_onnx_model_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = trace_model(nn.Linear(4, 3), torch.randn(5, 4))
    right = OnnxModel.run
    monkeypatch.setattr(OnnxModel, "run", lambda self, tensors: right(self, tensors) * (1 + 3e-5))
    with pytest.raises(ValueError, match=r"the ONNX model computes something else .* \(allowed: 1e-05\)"):
        to_onnx(traced)
    with pytest.raises(ValueError, match="ONNX Runtime cannot load the ONNX model"):
        OnnxModel(b"garbage")


def test_a_difference_at_another_batch_size_is_found() -> None:
    traced = trace_model(nn.Linear(4, 3), torch.randn(5, 4))
    assert traced.sizes() == [5, 6, 1]

    def wrong_for_one(tensors: list[Tensor]) -> Tensor:
        found: Tensor = traced.call(*tensors)
        return found if len(found) > 1 else 2 * found

    with pytest.raises(
        ValueError, match="something else than the PyTorch model: on a batch of 1 the outputs"
    ):
        traced.verify(wrong_for_one, "it")
    with pytest.raises(ValueError, match=r"it computes something else .* differ by nan"):
        traced.verify(lambda tensors: traced.call(*tensors) * torch.nan, "it")
    with pytest.raises(ValueError, match=r"it computes something else .* differ by inf"):
        traced.verify(lambda tensors: traced.call(*tensors)[:, :1], "it")
    with pytest.raises(ValueError, match="it cannot be run on a batch of 5: KeyError: 'x'"):
        traced.verify(lambda tensors: {}["x"], "it")


def test_names_of_tensors() -> None:
    with pytest.raises(ValueError, match="at least one tensor, got list"):
        TensorCall(nn.Linear(4, 3), [["a", "b"]])
    with pytest.raises(ValueError, match="need different names, got a_b, a_b"):
        TensorCall(nn.Linear(4, 3), {"a.b": torch.zeros(2), "a_b": torch.zeros(2)})
    call = TensorCall(nn.Linear(4, 3), {"x": torch.zeros(2, 4)})
    with pytest.raises(ValueError, match="the batch has no tensor 'x'"):
        call.tensors_of({"y": torch.zeros(2, 4)})


@needs_onnx
def test_a_dtype_that_onnx_runtime_lacks_is_told() -> None:
    traced = trace_model(nn.Linear(4, 3).bfloat16(), torch.randn(5, 4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"cannot load the ONNX model: .* other dtypes than float32"):
        to_onnx(traced)
    data, difference = to_pt2(traced)
    assert difference == 0
    assert data
