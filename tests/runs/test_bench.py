"""Measuring latencies."""

import json
from pathlib import Path

import pytest
import torch
from small_runs import QUICK_RUN, make_two_runs, needs_onnx
from torch import nn

from fishleg.runs import bench as module
from fishleg.runs.bench import Benchmark, Timing, bench_recipe, bench_run
from fishleg.runs.errors import ToolError
from fishleg.runs.export import export_model, export_run
from fishleg.runs.recipe import make_recipe
from fishleg.runs.speed import compare_speed, measure_times
from fishleg.runtime.batches import default_forward


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_two_runs(tmp_path_factory.mktemp("runs"))


def test_calls_take_turns_and_settle() -> None:
    made: list[str] = []
    calls = {"a": lambda: made.append("a"), "b": lambda: made.append("b")}
    times = measure_times(calls, 0.0, fewest=3, settle=1)
    assert made == 3 * ["a", "a", "b", "b"]
    assert {name: len(found) for name, found in times.items()} == {"a": 2, "b": 2}  # without the first
    made.clear()
    assert len(measure_times(calls, 60.0, most=7)["a"]) == 6
    assert made == 7 * ["a", "b"]


def test_the_report_measures_two_models() -> None:
    dense, small = nn.Linear(4, 8), nn.Linear(4, 2)
    small.train()
    found = compare_speed(dense, small, torch.zeros(5, 4), default_forward, 0.01)
    assert found["dense_ms"] > 0
    assert found["sparse_ms"] > 0
    assert found["what"] == "one batch of 5, removed rows cut out"
    assert small.training
    assert "dense kernels" in compare_speed(dense, dense, torch.zeros(5, 4), default_forward, 0.01)["what"]


def test_a_run_is_measured(finished: Path) -> None:
    result = bench_run(finished / "run", [1, 3], 0.05)
    assert [(t.batch_size, t.model) for t in result.timings] == [
        (1, "dense"), (1, "sparse"), (3, "dense"), (3, "sparse"),
    ]  # fmt: skip
    for t in result.timings:
        assert 0 < t.lower_ms <= t.median_ms <= t.upper_ms
        assert t.passes >= 4
    assert [t.speed for t in result.timings if t.model == "dense"] == [1.0, 1.0]
    assert result.threads == torch.get_num_threads()
    assert json.loads(json.dumps(result.as_dict()))["timings"][0]["model"] == "dense"
    assert "speed (dense = 1)" in result.table()


def test_the_shrunk_model_is_measured_too(finished: Path) -> None:
    result = bench_run(finished / "rows", [2], 0.05)
    assert [t.model for t in result.timings] == ["dense", "sparse", "shrunk"]


def test_the_models_are_called_at_the_batch_size(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []

    def measure(calls, *_, **__):
        seen.extend((name, len(call())) for name, call in calls.items())
        return {name: [1.0, 2.0, 3.0] for name in calls}

    monkeypatch.setattr(module, "measure_times", measure)
    bench_run(finished / "rows", [1, 100], 0.05)
    assert seen == [(name, size) for size in (1, 100) for name in ("dense", "sparse", "shrunk")]


def test_a_model_is_measured_alone() -> None:
    result = bench_recipe(make_recipe(QUICK_RUN), [2], 0.05)
    assert [t.model for t in result.timings] == ["model"]
    assert result.notes == [
        "There is nothing to compare with: bench the directory of a run, or add --onnx FILE."
    ]


@pytest.mark.slow
@needs_onnx
def test_an_onnx_file_is_measured_and_compared(finished: Path, tmp_path: Path) -> None:
    right, wrong, foreign = (tmp_path / f"{name}.onnx" for name in ("right", "wrong", "foreign"))
    export_run(finished / "run", right)
    result = bench_run(finished / "run", [1, 3], 0.05, right)
    assert [t.model for t in result.timings] == 2 * ["dense", "sparse", "onnx"]
    assert not any("something else" in note for note in result.notes)
    export_run(finished / "rows", wrong)
    result = bench_run(finished / "run", [1, 3], 0.05, wrong)
    assert sum("computes something else than each of the other models" in n for n in result.notes) == 1
    export_model(nn.Bilinear(2, 2, 3), (torch.zeros(3, 2), torch.zeros(3, 2)), foreign,
                 lambda model, batch: model(*batch))  # fmt: skip
    with pytest.raises(
        ToolError, match=r"the inputs of .*foreign.onnx are input_0, input_1, the batches have"
    ):
        bench_run(finished / "run", [1], 0.05, foreign)
    foreign.unlink()
    export_model(nn.Linear(3, 3), torch.zeros(3, 3), foreign)
    with pytest.raises(ToolError, match=r"foreign.onnx cannot be run on a batch of 1: "):
        bench_run(finished / "run", [1], 0.05, foreign)
    foreign.write_bytes(b"garbage")
    with pytest.raises(ToolError, match=r"onnx: ONNX Runtime cannot load .*foreign.onnx"):
        bench_run(finished / "run", [1], 0.05, foreign)


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ([], 1, r"batch_size must be different whole numbers in \[1, 65536\], got none"),
        ([0], 1, "got 0"),
        ([1, -3], 1, "got 1, -3"),
        ([2, 2], 1, "got 2, 2"),
        ([10**9], 1, "got 1000000000"),
        ([1], 0, r"seconds must be in \(0, 3600\], got 0"),
        ([1], float("nan"), "got nan"),
        ([1], float("inf"), "got inf"),
    ],
)
def test_wrong_values(finished: Path, sizes: list[int], seconds: float, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        bench_run(finished / "run", sizes, seconds)
    with pytest.raises(ToolError, match=message):
        bench_recipe(make_recipe(QUICK_RUN), sizes, seconds)


def test_onnx_runtime_may_be_missing(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ToolError, match="onnx: there is no file"):
        bench_run(finished / "run", [1], 1, tmp_path / "model.onnx")
    (tmp_path / "model.onnx").write_bytes(b"")
    monkeypatch.setattr(module, "missing_packages", lambda needed: list(needed))
    with pytest.raises(ToolError, match=r"needs onnxruntime: pip install 'fishleg\[onnx\]'"):
        bench_run(finished / "run", [1], 1, tmp_path / "model.onnx")


def timing(model: str, median: float, spread: float = 0.01, size: int = 1) -> Timing:
    return Timing(model, size, median, median - spread, median + spread, 9, 1.0 / median)


def test_what_is_said() -> None:
    dense = timing("dense", 1.0)
    nothing, zeros = module._verdict([dense, timing("sparse", 0.99)])
    assert nothing == "Clearly faster than the dense model: nothing."
    assert zeros.startswith("The sparse model is not faster, because dense kernels multiply zeros")
    assert "--pattern rows" in zeros
    assert module._verdict([dense, timing("sparse", 0.5, 0.6)])[0] == nothing  # the quartiles overlap
    said = module._verdict([dense, timing("sparse", 1.0), timing("shrunk", 0.5)])
    assert said[0] == "Clearly faster than the dense model: shrunk at batch size 1 (2.00 times as fast)."
    assert "--pattern rows" not in said[1]
    # each batch size is compared with its own dense model
    larger = [timing("dense", 3.0, size=8), timing("shrunk", 2.9, size=8)]
    assert "batch size 8" not in module._verdict([dense, timing("shrunk", 0.5), *larger])[0]
    assert any("ONNX Runtime" in line for line in module._verdict([dense, timing("onnx", 0.5)]))


def test_a_table_with_one_thread() -> None:
    table = Benchmark([timing("dense", 1.0)], 1, "cpu", ["a note"]).table()
    assert "on cpu with 1 thread;" in table
    assert table.endswith("\na note")
