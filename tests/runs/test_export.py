"""Exporting a run or a model to a file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import QUICK_RUN, make_two_runs, needs_onnx
from torch import nn

from fishleg.formats.packed import unpack
from fishleg.runs import export as module
from fishleg.runs.errors import ToolError
from fishleg.runs.export import export_model, export_recipe, export_run
from fishleg.runs.load import load_run, load_small
from fishleg.runs.recipe import make_recipe
from fishleg.shrinking.shrink import load_shrunk


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_two_runs(tmp_path_factory.mktemp("runs"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
@needs_onnx
def test_a_run_as_onnx(finished: Path, tmp_path: Path) -> None:
    import onnxruntime

    result = export_run(finished / "run", tmp_path / "model.onnx")
    assert names(tmp_path) == ["model.onnx"]
    assert (result.bytes, result.model, result.inputs) == (
        (tmp_path / "model.onnx").stat().st_size,
        "sparse",
        ["input"],
    )
    assert 0 <= result.difference <= 1e-5
    prepared = load_run(finished / "run")
    batch = prepared.draw_batch()
    size = len(batch[0])
    assert result.batch_sizes == [size, size + 1, 1]
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    with torch.no_grad():
        expected = prepared.forward(prepared.model.eval(), batch)
    (found,) = session.run(None, {"input": batch[0].numpy()})
    assert torch.allclose(torch.from_numpy(found), expected, atol=1e-5 * float(expected.abs().max()))
    assert json.loads(json.dumps(result.as_dict()))["path"] == str(tmp_path / "model.onnx")
    assert "onnxruntime.InferenceSession(" in result.text()


@pytest.mark.slow
def test_a_run_as_an_archive(finished: Path, tmp_path: Path) -> None:
    result = export_run(finished / "run", tmp_path / "model.pt2")
    prepared = load_run(finished / "run")
    batch = prepared.draw_batch()
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    with torch.no_grad():
        assert torch.allclose(loaded(batch[0][:3]), prepared.forward(prepared.model.eval(), batch)[:3])
    assert names(tmp_path) == ["model.pt2"]
    assert "torch.export.load(" in result.text()


@pytest.mark.parametrize("packed", [False, True])
def test_a_run_as_a_state_dict(finished: Path, tmp_path: Path, packed: bool) -> None:
    result = export_run(finished / "run", tmp_path / "m.safetensors", packed=packed)
    model = load_run(finished / "run").model
    state = unpack(tmp_path / "m.safetensors")
    assert state.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value)
    plain = sum(value.nbytes for value in state.values())
    assert (result.bytes < plain) is packed
    assert ("unpack" in result.hint) is packed
    assert "every value is the same" in result.text()


@pytest.mark.parametrize("shrunk", [True, False])
def test_removed_rows_are_cut_out(finished: Path, tmp_path: Path, shrunk: bool) -> None:
    result = export_run(finished / "rows", tmp_path / "m.safetensors", shrunk=shrunk)
    prepared = load_run(finished / "rows")
    small = load_small(prepared, finished / "rows")
    assert small is not None
    state = unpack(tmp_path / "m.safetensors")
    sizes = {name: list(value.shape) for name, value in state.items()}
    right = small if shrunk else prepared.model
    assert sizes == {name: list(value.shape) for name, value in right.state_dict().items()}
    assert result.model == ("shrunk" if shrunk else "sparse")
    if shrunk:
        assert "load_shrunk" in result.hint
        load_shrunk(prepared.model, state)
    # fishleg itself reads it as weights
    recipe = make_recipe({**QUICK_RUN, "weights": str(tmp_path / "m.safetensors")})
    again = export_recipe(recipe, tmp_path / "again.safetensors")
    assert again.model == "model"
    assert {k: list(v.shape) for k, v in unpack(tmp_path / "again.safetensors").items()} == sizes


def test_a_run_of_single_weights_has_no_small_model(finished: Path) -> None:
    assert load_small(load_run(finished / "run"), finished / "run") is None


def loads_nothing(*_: Any, **__: Any) -> None:
    raise AssertionError("a model was loaded")


@pytest.mark.parametrize(
    ("name", "packed", "message"),
    [
        ("model.onx", False, r"to: the file must end in .onnx, .pt2, .safetensors, got '.*model.onx'"),
        ("model", False, "must end in"),
        ("there.pt2", False, "there.pt2 is there already and is not written over"),
        ("dangling.pt2", False, "dangling.pt2 is there already and is not written over"),
        ("no/model.pt2", False, "its directory does not exist"),
        ("model.pt2", True, "packed is a form of .safetensors files"),
        (300 * "x" + ".pt2", False, "File name too long"),
    ],
)
def test_what_can_be_known_is_checked_before_a_model_is_loaded(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, packed: bool, message: str
) -> None:
    (tmp_path / "there.pt2").write_bytes(b"mine")
    (tmp_path / "dangling.pt2").symlink_to(tmp_path / "nowhere")
    before = names(tmp_path)
    monkeypatch.setattr(module, "prepare", loads_nothing)
    monkeypatch.setattr(module, "load_run", loads_nothing)
    recipe = make_recipe(QUICK_RUN)
    with pytest.raises(ToolError, match=message):
        export_run(finished / "run", tmp_path / name, packed=packed)
    with pytest.raises(ToolError, match=message):
        export_recipe(recipe, tmp_path / name, packed=packed)
    with pytest.raises(ToolError, match=message):
        export_model(nn.Linear(2, 2), torch.zeros(2, 2), tmp_path / name, packed=packed)
    assert names(tmp_path) == before
    assert (tmp_path / "there.pt2").read_bytes() == b"mine"


def test_missing_packages_are_told_with_the_command(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "missing_packages", lambda: ["onnx", "onnxscript"])
    monkeypatch.setattr(module, "load_run", loads_nothing)
    with pytest.raises(ToolError, match=r"needs onnx, onnxscript: pip install 'fishleg\[onnx\]'"):
        export_run(finished / "run", tmp_path / "model.onnx")
    monkeypatch.undo()
    export_run(finished / "run", tmp_path / "model.safetensors")  # needs none of them


def test_a_model_that_cannot_be_exported_leaves_nothing_behind(tmp_path: Path) -> None:
    class Branches(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if float(x.sum()) > 0 else -x

    with pytest.raises(ValueError, match=r"torch.export cannot trace the model"):
        export_model(Branches(2, 2), torch.zeros(3, 2), tmp_path / "m.pt2")
    assert names(tmp_path) == []


def test_a_file_that_appears_meanwhile_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.safetensors"
    right = module._to_safetensors

    def slow(*arguments: Any) -> bytes:
        path.write_bytes(b"mine")
        return right(*arguments)

    monkeypatch.setattr(module, "_to_safetensors", slow)
    with pytest.raises(ValueError, match="is there already and is not written over"):
        export_model(nn.Linear(2, 2), torch.zeros(3, 2), path)
    assert path.read_bytes() == b"mine"
    assert names(tmp_path) == [path.name]


def test_a_run_without_a_model_is_refused(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="there is no run in"):
        export_run(tmp_path, tmp_path / "m.pt2")
    record = json.loads((finished / "run" / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**record, "status": "running"}))
    with pytest.raises(ToolError, match=r"has no model yet \(running\)"):
        export_run(tmp_path, tmp_path / "m.pt2")
