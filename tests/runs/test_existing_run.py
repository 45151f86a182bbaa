"""A run on disk: whose code it names, and whether its recipe was edited."""

import json
import sys
import xml
from pathlib import Path

import pytest
from killing import make_model
from small_runs import QUICK_RUN, batches, interrupt

from fishleg import runs
from fishleg.runs.directory import RECIPE, RUN
from fishleg.runs.errors import ToolError
from fishleg.runs.recipe import make_recipe
from fishleg.runs.sources import Data, untrusted_code


@pytest.mark.parametrize(
    ("old", "new"),
    [("[0.3, 0.6]", "[0.3, 0.7]"), ('"magnitude"', '"diagonal"'), ("samples = 16", "samples = 17")],
)
def test_an_edited_recipe_is_refused_where_it_changes_the_result(tmp_path, old, new):
    directory = interrupt(tmp_path, make_model(), Data(batches()))
    text = (directory / RECIPE).read_text()
    assert old in text
    (directory / RECIPE).write_text(text.replace(old, new))
    with pytest.raises(ToolError, match=r"recipe.toml was edited after the run began: \w+ was .* and is"):
        runs.resume(directory, model=make_model(), data=Data(batches()))


def test_an_edited_recipe_is_told_where_it_does_not(tmp_path, caplog):
    directory = interrupt(tmp_path, make_model(), Data(batches()))
    text = (directory / RECIPE).read_text()
    (directory / RECIPE).write_text(text.replace("keep = 3", "keep = 4"))
    record = runs.resume(directory, model=make_model(), data=Data(batches())).execute()
    assert "keep was 3 and is 4" in caplog.text
    assert record["status"] == "finished"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """The current directory is one folder, and a run with its code is in another one."""
    for name in ("here", "theirs"):
        (tmp_path / name).mkdir()
    code = "from pathlib import Path\nPath('owned').touch()\n"
    for name in ("net.py", "workload.py"):
        (tmp_path / "theirs" / name).write_text(code)
    (tmp_path / "theirs" / "package").mkdir()
    (tmp_path / "theirs" / "package" / "net.py").write_text(code)
    (tmp_path / "theirs" / "package" / "__init__.py").symlink_to(str(xml.__file__))  # of an installed package
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "theirs"


def foreign_run(folder: Path, **specs: str) -> Path:
    directory = folder / "run"
    directory.mkdir()
    sections = make_recipe({**QUICK_RUN, **specs}).sections()
    record = {
        "base": str(folder),
        "warnings": [],
        "checkpoints": 0,
        "status": "interrupted",
        "recipe": sections,
    }
    (directory / RUN).write_text(json.dumps(record))
    return directory


@pytest.mark.parametrize(
    "specs",
    [
        {"model": "net.py:make"},
        {"model": "../theirs/net.py:make"},
        {"model": "net:make"},
        {"model": "workload:digits", "data": "net.py:loader"},
        {"model": "workload:digits", "eval_data": "net.py:loader"},
        {"model": "workload:digits", "metric": "net.py:score"},
        {"model": "workload:digits", "forward": "net.py:call"},
        {"model": "workload:digits", "data": "workload:loader"},
        {"model": "package.net:make"},
    ],
)
def test_code_from_elsewhere_needs_trust(elsewhere, specs):
    directory = foreign_run(elsewhere, **specs)
    with pytest.raises(ToolError, match=r"neither below the current directory nor installed: .*--trust"):
        runs.resume(directory)
    assert not (elsewhere.parent / "here" / "owned").exists()
    with pytest.raises(ToolError, match=r"net|workload"):
        runs.resume(directory, trust=True)
    assert (elsewhere.parent / "here" / "owned").exists()


def test_a_link_to_code_elsewhere_needs_trust(elsewhere):
    here = elsewhere.parent / "here"
    (here / "net.py").symlink_to(elsewhere / "net.py")
    assert untrusted_code({"model": "net.py:make"}, here) is not None


def test_code_below_the_current_directory_and_installed_code_is_trusted(elsewhere):
    here = elsewhere.parent / "here"
    (here / "sub").mkdir()
    (here / "sub" / "net.py").touch()
    for spec in (
        "sub/net.py:make",
        "torch.nn:Linear",
        "json:loads",
        "workload:digits",
        "fishleg.workloads:x",
    ):
        assert untrusted_code({"model": spec, "data": None}, here) is None
    assert untrusted_code({"model": "net:make"}, here / "sub") is None


def test_files_beside_a_run_do_not_take_the_place_of_installed_modules(elsewhere):
    (elsewhere / "colorsys.py").write_text("from pathlib import Path\nPath('owned').touch()\n")
    assert untrusted_code({"model": "colorsys:make"}, elsewhere) is not None
    (elsewhere / "evil_helper.py").write_text("")
    before = list(sys.path)
    from fishleg.runs.sources import find_function

    find_function("json:loads", "model", elsewhere)
    assert sys.path == before


def test_a_comparison_does_not_resume_code_from_elsewhere(elsewhere):
    from fishleg.runs.compare import compare_methods

    here = elsewhere.parent / "here"
    (here / "net.py").write_text("")
    recipe = make_recipe({**QUICK_RUN, "model": "net.py:make", "out": "comparison", "method": "magnitude"})
    directory = here / "comparison" / "magnitude"
    directory.mkdir(parents=True)
    sections = recipe.replace(out=str(directory), compensation="none").sections()
    record = {
        "base": str(elsewhere),
        "warnings": [],
        "checkpoints": 0,
        "recipe": sections,
        "status": "failed",
    }
    (directory / RUN).write_text(json.dumps(record))
    with pytest.raises(ToolError, match="neither below the current directory nor installed"):
        compare_methods(recipe, ["magnitude"])
    assert not (here / "owned").exists()
