"""The directory of a run: nothing of the user's is overwritten or deleted, and no two runs share it."""

import os
import threading
from pathlib import Path

import pytest
from killing import in_child
from small_runs import QUICK_RUN, StopAfterFirstStage, go

from fishleg import runs
from fishleg.formats import checkpoint
from fishleg.formats.results import write_json
from fishleg.runs import directory as directories
from fishleg.runs.directory import CHECKPOINTS, FILES, LOCK, LOG, MODEL, RUN, claimed, read_record
from fishleg.runs.errors import ToolError
from fishleg.runs.recipe import make_recipe

ONE_STAGE = {"sparsity": 0.5, "stages": 1, "method": "magnitude"}


def contents(folder: Path) -> dict[str, bytes | str]:
    """Every file below a folder with its content, and every link with its target."""
    return {
        str(p.relative_to(folder)): os.readlink(p) if p.is_symlink() else p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_symlink() or p.is_file()
    }


def interrupted(tmp_path: Path, **options: object) -> Path:
    """A run that was stopped after its first stage."""

    recipe = make_recipe(QUICK_RUN, {"out": "run", "sparsities": [0.3, 0.6], "stages": None}, options)
    with pytest.raises(runs.Interrupted):
        runs.start(recipe, base=tmp_path, listeners=[StopAfterFirstStage()]).execute()
    return tmp_path / "run"


def test_a_second_run_refuses_to_overwrite(tmp_path):
    go(tmp_path, **ONE_STAGE)
    before = contents(tmp_path)
    with pytest.raises(ToolError, match="holds a run already"):
        go(tmp_path, sparsity=0.5)
    with pytest.raises(ToolError, match="nothing to resume"):
        runs.resume(tmp_path / "run")
    assert before == contents(tmp_path)


@pytest.mark.parametrize("name", [name for name in FILES if name != RUN])
@pytest.mark.parametrize("kind", ["file", "link", "dangling link", "directory"])
def test_every_name_that_a_run_may_write_is_refused_if_it_is_there(tmp_path, name, kind):
    theirs, out = tmp_path / "theirs", tmp_path / "run"
    out.mkdir()
    theirs.write_text("precious")
    if kind == "file":
        (out / name).write_text("precious")
    elif kind == "directory":
        (out / name).mkdir()
        (out / name / "000123.ckpt").write_text("precious")
    else:
        (out / name).symlink_to(theirs if kind == "link" else tmp_path / "missing")
    before = contents(tmp_path)
    with pytest.raises(ToolError, match=f"holds {name}, which is not of a run"):
        go(tmp_path, **ONE_STAGE)
    assert before == contents(tmp_path)


def test_other_files_in_the_directory_stay_as_they_are(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "notes.txt").write_text("precious")
    (out / ".model.safetensors.partial").write_text("precious")
    go(tmp_path, **ONE_STAGE)
    assert (out / "notes.txt").read_text() == (out / ".model.safetensors.partial").read_text() == "precious"


def test_every_written_name_is_declared(tmp_path):
    go(tmp_path, sparsity=0.5, stages=1, pattern="rows")
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {*FILES, LOCK}


def test_two_processes_do_not_share_a_run(tmp_path):
    run = runs.start(make_recipe(QUICK_RUN, {"out": "run", **ONE_STAGE}), base=tmp_path)

    def second() -> None:
        directories._claims.clear()  # a fork has those of its parent
        with pytest.raises(ToolError, match="another process is working on"):
            run.execute()

    with claimed(run.directory, new=True):
        assert in_child(second) == 0
        with pytest.raises(ToolError, match="another run of this process is working on"):
            run.execute()
        assert in_child(second) == 0  # the second claim has not released the lock of the first
        assert [path.name for path in run.directory.iterdir()] == [LOCK]
    assert not run.directory.exists()


def test_a_run_that_was_slow_to_load_does_not_overwrite_one_that_has_finished_meanwhile(tmp_path):
    slow = runs.start(make_recipe(QUICK_RUN, {"out": "run", **ONE_STAGE}), base=tmp_path)
    go(tmp_path, **ONE_STAGE)
    before = contents(tmp_path)
    with pytest.raises(ToolError, match="holds a run already"):
        slow.execute()
    assert before == contents(tmp_path)


def test_a_resumed_run_that_another_process_has_ended_meanwhile_is_left_alone(tmp_path):
    directory = interrupted(tmp_path)
    slow = runs.resume(directory)
    runs.resume(directory).execute()
    before = contents(tmp_path)
    with pytest.raises(ToolError, match="another process has worked on"):
        slow.execute()
    assert before == contents(tmp_path)


def test_two_threads_of_one_process_do_not_share_a_run(tmp_path):
    both = [runs.start(make_recipe(QUICK_RUN, {"out": "run", **ONE_STAGE}), base=tmp_path) for _ in range(2)]
    ended = []

    def execute(run):
        try:
            ended.append(run.execute()["status"])
        except ToolError as error:
            ended.append(str(error))

    threads = [threading.Thread(target=execute, args=[run]) for run in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "finished" in ended
    assert read_record(tmp_path / "run")["status"] == "finished"
    assert any("another run of this process" in end or "holds a run" in end for end in ended), ended


@pytest.mark.parametrize("name", [LOG, MODEL, CHECKPOINTS, RUN, LOCK])
def test_links_in_the_directory_of_an_interrupted_run_are_refused(tmp_path, name):
    directory = interrupted(tmp_path)
    if (directory / name).exists():
        (directory / name).rename(tmp_path / "elsewhere")
    else:
        (tmp_path / "elsewhere").write_text("precious")
    (directory / name).symlink_to(tmp_path / "elsewhere")
    before = contents(tmp_path)
    with pytest.raises(ToolError, match="is a symbolic link"):
        runs.resume(directory)
    assert before == contents(tmp_path)


def test_a_lock_that_is_not_ours_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).write_text("precious")
    with pytest.raises(ToolError, match="is not a lock of fishleg"):
        go(tmp_path, **ONE_STAGE)
    assert contents(tmp_path) == {f"run/{LOCK}": b"precious"}
    (tmp_path / "run" / LOCK).unlink()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ToolError, match="cannot lock"):
        go(tmp_path, **ONE_STAGE)
    assert not (tmp_path / "elsewhere").exists()


def test_a_failure_before_anything_is_written_leaves_nothing_behind(tmp_path):
    def raising(model, loader):
        raise KeyError("score")

    run = runs.start(make_recipe(QUICK_RUN, {"out": "a/b/run", **ONE_STAGE}), base=tmp_path)
    run.evaluator.custom = raising
    with pytest.raises(ToolError, match="score"):
        run.execute()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()
    run = runs.start(make_recipe(QUICK_RUN, {"out": "a/b/run", **ONE_STAGE}), base=tmp_path)
    run.evaluator.custom = raising
    with pytest.raises(ToolError, match="score"):
        run.execute()
    assert [p.name for p in tmp_path.rglob("*")] == ["a"]  # which was there before


def test_only_checkpoints_that_this_run_wrote_are_deleted(tmp_path):
    directory = interrupted(tmp_path)
    theirs = directory / CHECKPOINTS / "000123.ckpt"
    theirs.write_bytes(b"precious")
    record = runs.resume(directory).execute()
    assert record["status"] == "finished"
    assert theirs.read_bytes() == b"precious"


def test_a_foreign_file_at_the_name_of_the_next_checkpoint_is_not_replaced(tmp_path):
    directory = interrupted(tmp_path)
    theirs = directory / CHECKPOINTS / f"{read_record(directory)['checkpoints']:06d}.ckpt"
    theirs.write_bytes(b"precious")
    for _ in range(2):  # the refusal is no claim to the name
        with pytest.raises(checkpoint.CheckpointError, match="exists and was not written by this run"):
            runs.resume(directory).execute()
        assert theirs.read_bytes() == b"precious"
    theirs.unlink()
    assert runs.resume(directory).execute()["status"] == "finished"


def test_a_run_that_was_killed_right_after_its_record_begins_again(tmp_path):
    expected = go(tmp_path, **ONE_STAGE, out="undisturbed")[1]
    run = runs.start(make_recipe(QUICK_RUN, {"out": "run", **ONE_STAGE}), base=tmp_path)
    run.directory.mkdir()
    write_json(run.directory / RUN, {**run.record, "status": "starting"})
    record = runs.resume(run.directory).execute()
    assert record["status"] == "finished"
    assert record["sparse"] == expected["sparse"]


def test_an_absurd_number_of_checkpoints_takes_no_memory(tmp_path):
    directory = interrupted(tmp_path)
    record = read_record(directory)
    write_json(directory / RUN, {**record, "checkpoints": 10**12})
    run = runs.resume(directory)
    assert len(run.store.owned) < 10
