"""The files that a run writes."""

import pytest
from safetensors import safe_open
from small_runs import go

from fishleg.runs.recipe import load_recipe, make_recipe


@pytest.mark.slow
def test_equal_runs_write_equal_files_wherever_they_are(tmp_path):
    runs = [go(tmp_path, out=out, pattern="rows", sparsity=0.4)[0] for out in ("first", "second/deeper")]
    for name in ("model.safetensors", "packed.safetensors", "small.safetensors", "dense.ckpt"):
        first, second = ((run.directory / name).read_bytes() for run in runs)
        assert first == second, name
    with safe_open(runs[0].directory / "small.safetensors", "pt") as file:
        metadata = file.metadata()
    assert set(metadata) == {"fishleg_shrunk", "format", "recipe", "sparsity"}
    assert "first" not in metadata["recipe"]
    (tmp_path / "inside.toml").write_text(metadata["recipe"])
    assert make_recipe(load_recipe(tmp_path / "inside.toml"), {"out": "first"}) == runs[0].recipe
