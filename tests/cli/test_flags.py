"""Flags of the command line become values of the recipe."""

from pathlib import Path

import pytest

from fishleg.cli.flags import flags_given
from fishleg.options.run import BUDGETS
from fishleg.runs.recipe import load_recipe, make_recipe


def test_flags_win_over_the_recipe(tmp_path: Path):
    (tmp_path / "a.toml").write_text("[schedule]\nsparsity = 0.5\n[run]\nseed = 3\n[pruning]\nsamples = 8\n")
    flags = flags_given(
        {"sparsity": "0.75", "seed": None, "samples": "16", "include": (), "tensorboard": None}
    )
    recipe = make_recipe(load_recipe(tmp_path / "a.toml"), flags)
    assert (recipe.schedule.sparsity, recipe.run.seed, recipe.pruning.samples) == (0.75, 3, 16)


def test_flags_become_values():
    flags = flags_given({"sparsities": "0.5,0.75", "exclude": ("a", "b"), "empirical": False, "lr": "1e-2"})
    assert flags == {"sparsities": [0.5, 0.75], "exclude": ["a", "b"], "empirical": False, "lr": 0.01}
    assert flags_given({"max_drop": "1%", "max_params": "1000", "json": True}) == {
        "max_drop": "1%",
        "max_params": 1000,
    }


@pytest.mark.parametrize("first", BUDGETS)
@pytest.mark.parametrize("second", BUDGETS)
def test_a_later_budget_replaces_an_earlier_one(first: str, second: str):
    budgets = {
        "sparsity": 0.5, "sparsities": [0.3], "max_drop": "1%", "max_params": 10, "max_flops": "40%",
    }  # fmt: skip
    recipe = make_recipe({first: budgets[first], "seed": 4}, {second: budgets[second]})
    assert recipe.run.seed == 4
    assert [name for name in BUDGETS if getattr(recipe.schedule, name) not in (None, ())] == [second]
    assert make_recipe({first: budgets[first]}, {"seed": 5}) == make_recipe(
        {first: budgets[first], "seed": 5}
    )


def test_none_is_read_where_an_option_may_be_none():
    assert flags_given({"max_kl": "none", "steps": "None"}) == {"max_kl": "none", "steps": "None"}
    recipe = make_recipe(flags_given({"max_kl": "none", "mode": "gradual"}))
    assert recipe.fine_tuning.max_kl is None
