"""User code that ends the process, or raises what is no Exception: an error, never a success."""

import sys

import pytest
from killing import make_model
from small_runs import OPTIONS, batches

from fishleg import runs
from fishleg.runs.directory import read_record
from fishleg.runs.errors import ToolError
from fishleg.runs.recipe import make_recipe
from fishleg.runs.sources import Data


class Odd(BaseException):
    """An exception that is no Exception."""


@pytest.mark.parametrize("kind", [Odd, GeneratorExit, SystemExit])
def test_whatever_user_code_raises_is_an_error_with_a_status(tmp_path, kind):
    calls = 0

    def score(model, loader):
        nonlocal calls
        calls += 1
        if calls > 2:
            raise kind("text")
        return 1.0

    run = runs.start(make_recipe(OPTIONS), model=make_model(), data=Data(batches()), base=tmp_path)
    run.evaluator.custom = score
    with pytest.raises(ToolError, match=f"the work was ended by {kind.__name__}: text"):
        run.execute()
    assert read_record(tmp_path / "run")["status"] == "failed"


class Leaves:
    """A loader that calls sys.exit(0) at its n-th pass."""

    def __init__(self, at: int) -> None:
        self.at, self.passes = at, 0

    def __iter__(self):
        self.passes += 1
        for place, batch in enumerate(batches()):
            if self.passes >= self.at and place == 1:
                sys.exit(0)
            yield batch


def test_an_exit_in_the_loader_is_an_error(tmp_path):
    passes = Leaves(10**9)
    runs.start(make_recipe(OPTIONS), model=make_model(), data=Data(passes), base=tmp_path).execute()
    found = []
    for at in range(1, passes.passes + 1):
        out = f"run-{at}"
        recipe, data = make_recipe({**OPTIONS, "out": out}), Data(Leaves(at))
        with pytest.raises(ToolError, match="SystemExit"):
            runs.start(recipe, model=make_model(), data=data, base=tmp_path).execute()
        if (tmp_path / out).exists():
            found.append(read_record(tmp_path / out)["status"])
    assert found
    assert set(found) == {"failed"}
