"""A run that is killed at any moment goes on to the bit-identical model of one that was not."""

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from killing import in_child, kill_in_call, kill_often, warm_up, work

from fishleg.formats import checkpoint
from fishleg.runs.recipe import Recipe, make_recipe

pytestmark = pytest.mark.slow  # each mode is run to its end several times

MODES = {
    "staged": {"sparsity": 0.8, "stages": 3, "batchnorm_batches": 2},
    "fishleg": {
        "mode": "gradual", "sparsities": [0.4, 0.7], "steps": 5, "update_every": 2, "refine_steps": 2,
    },
    "sgd": {"mode": "gradual", "sparsities": [0.4, 0.7], "steps": 5, "optimizer": "sgd", "distill": True},
    "baseline": {"mode": "gradual", "sparsities": [0.5, 0.7], "steps": 3, "method": "magnitude"},
    "search": {"max_drop": "20%", "stages": 2, "mode": "gradual", "optimizer": "adam", "steps": 3},
}  # fmt: skip


def recipe_for(mode: str, out: str) -> Recipe:
    common = {
        "model": "killing:make_model", "data": "killing:loader", "samples": 16, "sub_batch": 8, "out": out,
        "checkpoint_minutes": 1e-6,
    }  # fmt: skip
    return make_recipe(common, MODES[mode])


def model_bytes(directory: Path) -> bytes:
    """The weights as written, with the header: files are equal byte by byte."""
    return (directory / "model.safetensors").read_bytes()


def record_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "run.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=list(MODES))
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(mode, directory, seconds) of a run that nobody killed."""
    warm_up()
    base = tmp_path_factory.mktemp("undisturbed")
    started = time.monotonic()
    assert in_child(lambda: work(recipe_for(request.param, "run"), base)) == 0
    return request.param, base / "run", time.monotonic() - started


def test_killed_at_random_moments(undisturbed, tmp_path):
    mode, reference, seconds = undisturbed
    for directory in kill_often(recipe_for(mode, "run"), tmp_path, 5, seconds, random.Random(mode)):
        assert model_bytes(directory) == model_bytes(reference)
        assert record_of(directory)["sparse"] == record_of(reference)["sparse"]


@pytest.mark.parametrize("half_written", [False, True])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_killed_in_the_middle_of_a_write(undisturbed, tmp_path, call, half_written):
    mode, reference, _ = undisturbed
    recipe = recipe_for(mode, "run")

    def deadly_work(at: int) -> None:
        kill_in_call(os, call, at, half_written=half_written)
        work(recipe, tmp_path)

    codes = [in_child(lambda n=n: deadly_work(n)) for n in (1, 2, 5, 9)]
    assert codes[0] == -9
    assert in_child(lambda: work(recipe, tmp_path)) == 0
    assert model_bytes(tmp_path / "run") == model_bytes(reference)


def test_the_log_has_each_step_once(undisturbed, tmp_path):
    mode, reference, seconds = undisturbed
    recipe = recipe_for(mode, "run")
    assert in_child(lambda: work(recipe, tmp_path), kill_after=0.7 * seconds) in (0, -9)
    assert in_child(lambda: work(recipe, tmp_path)) == 0

    def steps(directory: Path) -> list[tuple[object, ...]]:
        lines = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
        kept = [e for e in lines if e["event"] in ("prune", "train", "stage", "rollback")]
        return [(e["event"], e.get("stage"), e.get("step"), e.get("loss"), e.get("sparsity")) for e in kept]

    assert steps(tmp_path / "run") == steps(reference)


def test_damaged_checkpoints_are_passed_over(tmp_path, caplog):
    store = checkpoint.Store(tmp_path, keep=3)
    for i in range(4):
        store.save({"i": i})
    paths = store.paths()
    assert len(paths) == 3
    paths[2].write_bytes(paths[2].read_bytes()[:-5])
    data = bytearray(paths[1].read_bytes())
    data[len(data) // 2] ^= 1
    paths[1].write_bytes(data)
    found = store.latest()
    assert found is not None
    assert found[1] == {"i": 1}
    assert caplog.text.count("The checkpoint before it is used") == 2
    paths[0].write_bytes(b"")
    with pytest.raises(checkpoint.CheckpointError, match="none of the 3 checkpoints"):
        store.latest()
