"""The directory of a run: never overwritten, never shared."""

import pytest
from killing import in_child
from small_runs import QUICK_RUN, go

from fishleg import runs
from fishleg.runs.directory import locked
from fishleg.runs.errors import ToolError
from fishleg.runs.recipe import make_recipe


def test_a_second_run_refuses_to_overwrite(tmp_path):
    go(tmp_path, sparsity=0.5, stages=1)
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(ToolError, match="holds a run already"):
        go(tmp_path, sparsity=0.5)
    with pytest.raises(ToolError, match="nothing to resume"):
        runs.resume(tmp_path / "run")
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}


def test_two_processes_do_not_share_a_run(tmp_path):
    run = runs.start(make_recipe(QUICK_RUN, {"out": "run", "sparsity": 0.5}), base=tmp_path)
    run.directory.mkdir()

    def second() -> None:
        with pytest.raises(ToolError, match="another process"):
            run.execute()

    with locked(run.directory / "lock"):
        assert in_child(second) == 0
    assert not (run.directory / "run.json").exists()
