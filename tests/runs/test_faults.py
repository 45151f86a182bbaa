"""A file system that is full, read-only, slow, linked or removed underneath: told, and nothing is lost."""

import errno
import os
from pathlib import Path

import pytest
from faults import FAULTS, command, fail_in_call, finish, linking
from killing import model_bytes, recipe_for, warm_up

from fishleg.runs.directory import LOG, MODEL, REPORT, RUN

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The model of an undisturbed run."""
    warm_up()
    base = tmp_path_factory.mktemp("undisturbed")
    ended = command(recipe_for("staged", "run"), base)
    assert ended.code == 0, ended.output
    return model_bytes(base / "run")


@pytest.mark.parametrize("fault", ["full", "read-only", "broken"])
@pytest.mark.parametrize(("call", "at"), [("fsync", 1), ("fsync", 9), ("open", 7), ("replace", 4)])
def test_a_failing_file_system_is_told_and_the_run_goes_on_later(tmp_path, expected, fault, call, at):
    recipe, directory = recipe_for("staged", "run"), tmp_path / "run"
    ended = command(
        recipe, tmp_path, lambda: fail_in_call(call, at, FAULTS[fault], directory, for_good=fault == "full")
    )
    assert ended.told, ended.output
    assert ended.code == 1
    assert finish(recipe, tmp_path).code == 0
    assert model_bytes(directory) == expected


@pytest.mark.parametrize("at", [2, 6, 12])
def test_a_directory_that_is_removed_underneath_is_told(tmp_path, expected, at):
    recipe, directory = recipe_for("staged", "run"), tmp_path / "run"
    ended = command(recipe, tmp_path, lambda: fail_in_call("fsync", at, FAULTS["removed"], directory))
    assert ended.told, ended.output
    assert ended.code == 1
    assert finish(recipe, tmp_path).code == 0
    assert model_bytes(directory) == expected


@pytest.mark.parametrize("name", [RUN, LOG, MODEL, REPORT])
def test_links_that_appear_underneath_are_not_followed(tmp_path, expected, name):
    theirs = tmp_path / "theirs"
    theirs.write_text("precious")
    recipe, directory = recipe_for("staged", "run"), tmp_path / "run"
    ended = command(recipe, tmp_path, lambda: fail_in_call("fsync", 6, linking(name, theirs), directory))
    assert ended.told, ended.output
    assert theirs.read_text() == "precious"
    if ended.code == 0:
        assert model_bytes(directory) == expected


def test_a_slow_file_system_changes_nothing(tmp_path, expected):
    recipe, directory = recipe_for("staged", "run"), tmp_path / "run"
    ended = command(
        recipe, tmp_path, lambda: fail_in_call("fsync", 1, FAULTS["slow"], directory, for_good=True)
    )
    assert ended.code == 0, ended.output
    assert model_bytes(directory) == expected


def test_the_faults_are_real(tmp_path):
    fail_in = []
    original = os.fsync
    try:
        fail_in_call("fsync", 1, lambda path: fail_in.append(path), tmp_path)
        with open(Path(tmp_path) / "x", "w") as file:
            os.fsync(file.fileno())
    finally:
        os.fsync = original
    assert fail_in == [tmp_path]
    with pytest.raises(OSError, match="No space") as caught:
        FAULTS["full"](tmp_path)
    assert caught.value.errno == errno.ENOSPC
