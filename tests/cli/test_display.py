"""What is shown while a run works."""

import sys

import pytest
from small_runs import QUICK_RUN

from fishleg import runs
from fishleg.cli.display import duration, make_display
from fishleg.runs.recipe import make_recipe


@pytest.mark.slow
def test_all_displays_show_the_same_stages(tmp_path, capsys):
    run = runs.start(make_recipe(QUICK_RUN, {"out": "run", "sparsity": 0.5, "stages": 2}), base=tmp_path)
    run.listen(make_display("%", "accuracy", live=False))
    run.listen(make_display("%", "accuracy", sys.stdout, live=True))
    run.execute()
    shown = capsys.readouterr()
    plain, live = shown.err, shown.out
    assert "[2/2] sparsity 50.0%: accuracy" in plain
    assert "done: accuracy" in plain
    assert "50.0%" in live
    assert "accuracy" in live
    assert duration(40) == "40 s"
    assert duration(200) == "3 min"
    assert duration(7500) == "2 h 5 min"
