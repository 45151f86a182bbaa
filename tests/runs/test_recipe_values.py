"""What the values of a recipe may be: wrong ones are refused before any work."""

from typing import Any

import pytest
from option_values import GRADUAL

from fishleg import Gaussian, register_likelihood, register_pattern
from fishleg.options.declaration import is_list
from fishleg.options.names import LIKELIHOODS, PATTERNS
from fishleg.pruning.patterns import NM
from fishleg.runs.recipe import FIELDS, RecipeError, make_recipe


def key(name: str) -> str:
    """The name of an option in its section, as messages have it."""
    return FIELDS[name][1].name


@pytest.mark.parametrize("name", list(FIELDS))
def test_choices_and_kinds(name: str):
    mode = {"mode": "gradual"} if name in GRADUAL else {}
    choices = tuple(FIELDS[name][1].metadata["choices"])
    for value in choices:
        make_recipe({**mode, name: value})
    if choices:
        wrong = choices[0][:-1] + "q"
        with pytest.raises(RecipeError, match=f"{key(name)} must be one of .*got '{wrong}'; did you mean"):
            make_recipe({name: wrong})
    with pytest.raises(RecipeError, match=rf"{key(name)} must be .*, got {{'a': 1}}"):
        make_recipe({name: {"a": 1}})


@pytest.mark.parametrize(
    "name", [name for name, (_, f) in FIELDS.items() if f.metadata["rule"] and not is_list(f)]
)
def test_rules(name: str):
    kind = str(FIELDS[name][1].type)
    wrong: list[Any] = [-1, 10**400, -(10**400)]
    wrong += [-0.5, float("nan"), float("inf")] if "float" in kind else [True, 1.5]
    for value in wrong:
        with pytest.raises(RecipeError, match=f"{key(name)} must be "):
            make_recipe({name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 90}, "sparsity must be in .*got 90; for 90 % write 0.9"),
        ({"sparsity": "90"}, r"sparsity must be a number in \(0, 1\), got '90'; write 90 without quotes"),
        ({"sparsity": True}, r"sparsity must be a number in \(0, 1\), got True"),
        ({"sparsity": [0.5]}, r"sparsity must be a number in \(0, 1\), got \[0.5\]"),
        ({"samples": 2.0}, "samples must be a whole number >= 1, got 2.0"),
        ({"model": None}, "model must be a text, got None"),
        ({"model": "a\0b"}, "model must be UTF-8 text without null characters"),
        ({"out": "a\udcffb"}, "out must be UTF-8 text"),
        ({"lr": "1e-3"}, "lr must be a number > 0, got '1e-3'; write 0.001"),
        ({"include": "fc"}, "include must be a list of texts, got 'fc'"),
        ({"sparsities": [0.5, True]}, "sparsities must be a list of numbers"),
        ({"exclude": ["("]}, r"exclude: '\(' is no regular expression"),
        ({"max_drop": "one"}, "max_drop must be a number or a percentage such as 1%, got 'one'"),
        ({"max_drop": 5}, r"max_drop must be in \(0 %, 100 %\), got 5"),
        ({"max_flops": "-3"}, "max_flops must be > 0, got '-3'"),
        ({"sparsity": 0.5, "max_params": 3}, "give one of sparsity.*got sparsity and max_params"),
        ({"sparsities": [0.5], "stages": 2}, "leave out stages"),
        ({"sparsities": [0.5], "mode": "one-shot"}, "leave out mode"),
        ({"mode": "one-shot", "stages": 2}, "a single stage, got stages = 2"),
        ({"train_data": "d.py:f"}, "train_data needs mode = 'gradual'"),
        ({"empirical": True, "method": "kfac"}, "empirical = true needs one of the methods"),
    ],
)
def test_values(options: dict[str, Any], message: str):
    with pytest.raises(RecipeError, match=message):
        make_recipe(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "globel"}, "got 'globel'; did you mean 'global'"),
        ({"pattern": "4:2"}, "pattern = '4:2': .*did you mean '2:4'"),
        ({"pattern": "2:4", "sparsity": 0.9}, "pattern 2:4 allows a sparsity of 0.5 at most, got 0.9"),
        ({"pattern": "2:4", "sparsities": [0.4, 0.6]}, "0.5 at most, got 0.6"),
        ({"sparsities": [0.9, 0.5]}, r"sparsities = \[0.9, 0.5\]: sparsities must rise"),
        ({"sparsities": [float("nan")]}, r"sparsity must be in \(0, 1\), got nan"),
    ],
)
def test_rules_that_only_the_library_checks(options: dict[str, Any], message: str):
    recipe = make_recipe(options)
    with pytest.raises(RecipeError, match=message):
        recipe.check()


@pytest.mark.parametrize("name", GRADUAL)
def test_options_of_the_training_need_training(name: str):
    texts = {"train_data": "a:b", "optimizer": "sgd", "lr_schedule": "constant"}
    value = {**texts, "distill": True, "momentum": 0.5, "regain": 0.5}.get(name, 7)
    with pytest.raises(RecipeError, match=f"{name} needs mode = 'gradual', got mode = 'staged'"):
        make_recipe({name: value})
    make_recipe({name: value, "mode": "gradual"})


@pytest.mark.parametrize(
    ("name", "value"), [("pattern", NM(2, 4)), ("structure", len), ("auxiliary_probe", len)]
)
def test_objects_without_a_name_are_refused(name: str, value: Any):
    """The run writes its recipe to a file, from which it is resumed."""
    with pytest.raises(
        RecipeError, match=rf"{key(name)} must be a name, .* register the object under a name"
    ):
        make_recipe({name: value}).check()


def test_names_that_were_registered_are_accepted():
    register_pattern("mine", lambda argument: NM(2, 4))
    register_likelihood("ours", Gaussian)
    try:
        recipe = make_recipe({"pattern": "mine", "likelihood": "ours"})
        recipe.check()
        assert recipe.replace(sparsity=0.25).model.likelihood == "ours"
    finally:
        PATTERNS.remove("mine")
        LIKELIHOODS.remove("ours")
