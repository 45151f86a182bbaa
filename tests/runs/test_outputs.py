"""What a run says about its results."""

import csv
import json

import pytest
from safetensors import safe_open
from small_runs import go

from fishleg.runs.directory import MODEL, PACKED, SMALL
from fishleg.runs.events import FileLog
from fishleg.runs.inspection import inspect_path
from fishleg.runs.macs import count_macs
from fishleg.runs.recipe import load_recipe, make_recipe
from fishleg.runs.weights import apply_weights, load_weights


def test_rows_are_counted_in_the_smaller_model(tmp_path):
    run, record = go(tmp_path, sparsity=0.3, stages=1, pattern="rows")
    small = run.prepared.dense
    apply_weights(small, load_weights(tmp_path / "run" / SMALL), SMALL)
    counted = count_macs(small, run.batch, run.prepared.forward)
    assert record["macs_small"] == sum(counted.values()) < record["macs_dense"]
    assert record["zero_rows_small"] == 0
    assert "What next" in (tmp_path / "run/report.html").read_text()


def test_the_loss_of_q_is_not_in_the_column_of_the_loss(tmp_path):
    go(tmp_path, sparsity=0.5, stages=1)
    events = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    learning = [event for event in events if event["event"] == "q"]
    assert learning
    assert all("loss" not in event and isinstance(event["auxiliary_loss"], float) for event in learning)
    with open(tmp_path / "run/log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    of_q = [row for row in rows if row["event"] == "q"]
    assert [float(row["auxiliary_loss"]) for row in of_q] == [e["auxiliary_loss"] for e in learning]
    assert {row["loss"] for row in of_q} == {""}
    assert {row["auxiliary_loss"] for row in rows if row["event"] != "q"} == {""}


def test_events_for_displays_are_not_logged(tmp_path):
    log = FileLog(tmp_path)
    log.event({"event": "phase", "message": "loading the model"})
    log.event({"event": "progress", "what": "evaluating", "done": 1, "total": 2})
    log.event({"event": "start", "metric": 0.9})
    log.close()
    assert (tmp_path / "log.jsonl").read_text().splitlines() == ['{"event": "start", "metric": 0.9}']
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 2


def test_tensors_come_in_natural_order(tmp_path):
    import torch
    from safetensors.torch import save_file

    names = ["0.weight", "1.weight", "3.weight", "12.bias", "12.weight", "a2.b10.c", "a10.b2.c"]
    names.append(f"b{'9' * 5000}.weight")
    save_file({name: torch.ones(2, 2) for name in reversed(names)}, tmp_path / "net.safetensors")
    assert [t.name for t in inspect_path(tmp_path / "net.safetensors").tensors] == names


def test_one_pruning_step_is_counted_in_english(tmp_path):
    run, _ = go(tmp_path, sparsity=0.5, stages=1)
    found = inspect_path(run.store.paths()[-1])
    assert found.made["place"].startswith("1 pruning step done")


@pytest.mark.slow
def test_equal_runs_write_equal_files_wherever_they_are(tmp_path):
    runs = [go(tmp_path, out=out, pattern="rows", sparsity=0.4)[0] for out in ("first", "second/deeper")]
    for name in ("model.safetensors", "packed.safetensors", "small.safetensors", "dense.ckpt"):
        first, second = ((run.directory / name).read_bytes() for run in runs)
        assert first == second, name
    with safe_open(runs[0].directory / "small.safetensors", "pt") as file:
        metadata = file.metadata()
    assert set(metadata) == {"fishleg_sha256", "fishleg_shrunk", "format", "recipe", "sparsity"}
    assert "first" not in metadata["recipe"]
    (tmp_path / "inside.toml").write_text(metadata["recipe"])
    assert make_recipe(load_recipe(tmp_path / "inside.toml"), {"out": "first"}) == runs[0].recipe


def test_a_damaged_model_is_detected_by_its_checksum(tmp_path):
    run, _ = go(tmp_path, sparsity=0.5, stages=1, method="magnitude")
    for name in (MODEL, PACKED):
        path = run.directory / name
        data = bytearray(path.read_bytes())
        data[-20] ^= 1
        path.write_bytes(data)
        with pytest.raises(ValueError, match="its checksum does not match"):
            load_weights(path)
