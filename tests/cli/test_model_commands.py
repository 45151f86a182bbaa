"""The commands export and bench."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from small_runs import needs_onnx

from fishleg.cli.commands import main
from fishleg.formats.onnx import missing_packages

QUICK = "--seconds 0.02 --batch-size 1,2"


def call(line: str, *more: str) -> Result:
    result = CliRunner().invoke(main, [*line.split(), *more])
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.slow
@needs_onnx
def test_export_and_bench_of_a_run(work: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    text = call("export done --to", str(file)).stdout
    assert text.startswith(f"{file}: the sparse model, {file.stat().st_size:,} bytes\n")
    assert "checked at batch sizes 16, 17, 1: largest relative difference" in text
    assert f"load it: onnxruntime.InferenceSession('{file}')" in text
    table = call(f"bench done {QUICK} --threads 1 --onnx", str(file)).stdout
    assert [line.split()[:2] for line in table.splitlines()[1:7]] == [
        [size, name] for size in "12" for name in ("dense", "sparse", "onnx")
    ]
    assert "with 1 thread;" in table


@pytest.mark.slow
def test_results_as_json(work: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.pt2"
    found = json.loads(call("export done --json --to", str(file)).stdout)
    assert found["path"] == str(file)
    assert found["bytes"] == file.stat().st_size
    assert found["difference"] <= 1e-5
    assert found["batch_sizes"] == [16, 17, 1]
    measured = json.loads(call(f"bench done {QUICK} --json").stdout)
    assert [t["model"] for t in measured["timings"]] == 2 * ["dense", "sparse"]
    assert measured["threads"] == torch.get_num_threads()


def test_a_model_by_its_name(work: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    line = "net.py:make --weights good.safetensors --eval-data data.py:loader"
    assert "the model, " in call(f"export {line} --to", str(file)).stdout
    right = load_file("good.safetensors")
    assert all(torch.equal(value, right[name]) for name, value in load_file(file).items())
    assert "speed (model = 1)" in call(f"bench {line} {QUICK}").stdout


def test_empty_names(work: Path) -> None:
    for line in (["export", "done", "--to", ""], ["export", "", "--to", "m.pt2"], ["bench", ""]):
        result = CliRunner().invoke(main, line)
        assert result.exit_code == 1
        assert ("to: the file must end in" if "done" in line else "MODEL is missing") in result.output


def test_a_missing_package_is_told_before_the_model_is_loaded(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fishleg.runs.export.missing_packages", lambda: ["onnxruntime"])
    result = CliRunner().invoke(main, ["export", "damaged", "--to", str(tmp_path / "m.onnx")])
    assert result.exit_code == 1
    needs = "error: an .onnx file needs onnxruntime: pip install 'fishleg[onnx]'\n"
    assert result.output == f"loading PyTorch\n{needs}"


def test_the_doctor_lists_the_packages() -> None:
    from fishleg.cli.doctor import diagnose

    found = {entry["what"]: entry["ok"] for entry in diagnose()}
    for package in ("onnx", "onnxscript", "onnxruntime"):
        assert found[package] is (package not in missing_packages())
