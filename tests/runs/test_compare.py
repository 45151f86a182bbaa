"""Comparing methods."""

import pytest
from small_runs import QUICK_RUN

from fishleg.runs.compare import compare_methods
from fishleg.runs.errors import ToolError
from fishleg.runs.recipe import make_recipe


def test_compare_goes_on_and_ranks(tmp_path):
    recipe = make_recipe(QUICK_RUN, {"out": "cmp", "sparsity": 0.7, "stages": 2})
    first = compare_methods(recipe, ["magnitude", "fishleg"], tmp_path)
    assert (tmp_path / "cmp/comparison.png").is_file()
    times = (tmp_path / "cmp/fishleg/run.json").stat().st_mtime
    again = compare_methods(recipe, ["magnitude", "fishleg"], tmp_path)
    assert (tmp_path / "cmp/fishleg/run.json").stat().st_mtime == times
    assert again.as_dict() == first.as_dict()
    lines = first.table().splitlines()
    assert len(lines) == 4
    with pytest.raises(ToolError, match="other options"):
        compare_methods(make_recipe(QUICK_RUN, {"out": "cmp", "sparsity": 0.6}), ["magnitude"], tmp_path)
