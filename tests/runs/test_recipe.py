"""Recipes: read back as they were written, checked by name, and in step with the library."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fishleg import PruningOptions
from fishleg.curvature import likelihoods
from fishleg.inverse import estimators as baselines
from fishleg.pruning import api, schedules, tuning
from fishleg.pruning import compensation as obs
from fishleg.runs import recipe as recipes
from fishleg.runs.recipe import (
    BUDGETS,
    FIELDS,
    SECTIONS,
    Recipe,
    RecipeError,
    amount,
    flatten,
    load_recipe,
    make_recipe,
)

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)


# values that each rule allows, by kind of option
NUMBERS = {
    "(0, 1)": st.floats(0, 1, exclude_min=True, exclude_max=True),
    "[0, 1)": st.floats(0, 1, exclude_max=True),
    "> 0": st.floats(0, 1e9, exclude_min=True),
    ">= 0": st.floats(0, 1e9),
    ">= 1": st.floats(1, 1e9),
}


def values_of(name: str) -> st.SearchStrategy[Any]:
    f = FIELDS[name]
    kind, rule = str(f.type), f.metadata["rule"]
    if name in ("include", "exclude"):
        return st.lists(st.sampled_from(["^fc", r"\.weight$", 'a"b', "layer[0-9]+"]), max_size=3)
    if name == "sparsities":
        return st.lists(NUMBERS["(0, 1)"], max_size=3)
    if name in ("max_drop", "max_flops"):
        return st.sampled_from(["1%", "0.5%", 0.02, "99%"])
    if f.metadata["choices"]:
        return st.sampled_from(f.metadata["choices"])
    if kind.startswith("bool"):
        return st.booleans()
    if kind.startswith("str"):
        return texts
    if kind.startswith("int"):
        return st.integers(1, 2**31)
    return NUMBERS[rule]


# what --mode gradual alone knows
GRADUAL = ["train_data", *(n for n, f in FIELDS.items() if f.metadata["section"] == "tuning")]


@st.composite
def any_recipe(draw: st.DrawFn) -> Recipe:
    """A recipe with any of its options set; what excludes one another is left out."""
    names = draw(st.sets(st.sampled_from(list(FIELDS))))
    budget = draw(st.sampled_from(BUDGETS))
    options = {name: draw(values_of(name)) for name in sorted(names) if name not in BUDGETS or name == budget}
    if options.get("sparsities") or options.get("mode") == "one-shot":
        options.pop("stages", None)
    if options.get("sparsities") and options.get("mode") == "one-shot":
        del options["mode"]
    if options.get("mode") != "gradual":
        options = {n: v for n, v in options.items() if n not in GRADUAL}
    if options.get("method") not in recipes.EMPIRICAL:
        options.pop("empirical", None)
    return Recipe(**options)


@given(any_recipe())
def test_a_recipe_is_read_back_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe):
    path = tmp_path_factory.getbasetemp() / "again.toml"
    path.write_text(recipe.to_toml(), encoding="utf-8")
    assert make_recipe(load_recipe(path)) == recipe
    path = path.with_suffix(".json")
    path.write_text(json.dumps(recipe.sections()), encoding="utf-8")
    assert make_recipe(load_recipe(path)) == recipe
    path = path.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(recipe.sections(), allow_unicode=True), encoding="utf-8")
    assert make_recipe(load_recipe(path)) == recipe


@pytest.mark.parametrize("name", list(FIELDS))
def test_every_option_is_read_back(tmp_path: Path, name: str):
    kind, choices = str(FIELDS[name].type), FIELDS[name].metadata["choices"]
    special: dict[str, Any] = {
        "sparsity": 0.25,
        "floor": 0.3,
        "momentum": 0.5,
        "regain": 0.5,
        "max_drop": "2%",
        "max_flops": 1e6,
    }
    if name in special:
        value = special[name]
    elif choices:
        value = choices[-1]
    elif kind.startswith("list"):
        value = [0.2, 0.4] if "float" in kind else ["a|b", r"\d"]
    else:
        value = {"str": "some:text é\n\\", "int": 7, "float": 2.5, "bool": True}[kind.split(" ")[0]]
    recipe = make_recipe({name: value, **({"mode": "gradual"} if name in GRADUAL else {})})
    assert getattr(recipe, name) == value != FIELDS[name].default
    (tmp_path / "a.toml").write_text(recipe.to_toml(), encoding="utf-8")
    assert make_recipe(load_recipe(tmp_path / "a.toml")) == recipe


@pytest.mark.parametrize("suffix", ["toml", "json", "yaml", "yml"])
def test_forms(tmp_path: Path, suffix: str):
    text = {
        "toml": '[model]\nmodel = "net.py:make"\n[target]\nsparsity = 0.8\nexclude = ["^fc"]\n',
        "json": '{"model": {"model": "net.py:make"}, "target": {"sparsity": 0.8, "exclude": ["^fc"]}}',
        "yaml": "model:\n  model: net.py:make\ntarget:\n  sparsity: 0.8\n  exclude: [^fc]\n",
    }[suffix.replace("yml", "yaml")]
    path = tmp_path / f"recipe.{suffix}"
    path.write_text(text)
    assert load_recipe(path) == {"model": "net.py:make", "sparsity": 0.8, "exclude": ["^fc"]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"target": {"sparsty": 0.5}}, r"unknown key 'sparsty' in \[target\] .*did you mean 'sparsity'\?"),
        (
            {"tuning": {"learning_rate": 0.5}},
            r"unknown key 'learning_rate' in \[tuning\] \(keys are optimizer",
        ),
        ({"run": {"sed": 1}}, "did you mean 'seed'"),
        (
            {"method": {"sparsities": []}},
            r"unknown key 'sparsities' in \[method\].*it belongs under \[target\]",
        ),
        ({"method": {"momentun": 0.5}}, r"did you mean 'momentum'\? It belongs under \[tuning\]"),
        ({"lr": 0.1}, r"unknown key 'lr' in the recipe; it belongs under \[tuning\]"),
        ({"tunning": {}}, r"unknown section 'tunning'.*sections are model, .*did you mean 'tuning'"),
        ({"speed": 3}, r"unknown key 'speed' in the recipe \(sections are"),
        ({"run": [1]}, r"\[run\] must be a section with keys, got \[1\]"),
    ],
)
def test_keys_are_checked_by_name(content: dict[str, Any], message: str):
    with pytest.raises(RecipeError, match=message):
        flatten(content)


def test_an_option_by_keyword_is_checked_by_name():
    with pytest.raises(RecipeError, match=r"unknown option 'sparsty'; did you mean 'sparsity'\?"):
        make_recipe({"sparsty": 0.5})


@pytest.mark.parametrize(("name", "choices"), [(n, f.metadata["choices"]) for n, f in FIELDS.items()])
def test_choices_and_kinds(name: str, choices: tuple[str, ...]):
    mode = {"mode": "gradual"} if name in GRADUAL else {}
    for value in choices:
        make_recipe({**mode, name: value})
    if choices:
        wrong = choices[0][:-1] + "q"
        with pytest.raises(RecipeError, match=f"{name} must be one of .*got '{wrong}'; did you mean"):
            make_recipe({name: wrong})
    with pytest.raises(RecipeError, match=rf"{name} must be .*, got {{'a': 1}}"):
        make_recipe({name: {"a": 1}})


@pytest.mark.parametrize("name", [name for name, f in FIELDS.items() if f.metadata["rule"]])
def test_rules(name: str):
    kind = str(FIELDS[name].type)
    wrong: list[Any] = [-1, 10**400, -(10**400)]
    wrong += [-0.5, float("nan"), float("inf")] if "float" in kind else [True, 1.5]
    for value in wrong:
        if value == 10**400 and "int" in kind and name != "seed":
            continue  # there is no upper limit
        with pytest.raises(RecipeError, match=f"{name} must be "):
            make_recipe({name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 90}, "sparsity must be in .*got 90.0; for 90 % write 0.9"),
        ({"sparsity": "90"}, "sparsity must be a number, got '90'; write 90 without quotes"),
        ({"sparsity": True}, "sparsity must be a number, got True"),
        ({"sparsity": [0.5]}, r"sparsity must be a number, got \[0.5\]"),
        ({"samples": 2.0}, "samples must be a whole number, got 2.0"),
        ({"model": None}, "model must be a text, got None"),
        ({"model": "a\0b"}, "model must be UTF-8 text without null characters"),
        ({"out": "a\udcffb"}, "out must be UTF-8 text"),
        ({"lr": "1e-3"}, "lr must be a number, got '1e-3'; write 0.001"),
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
def test_what_only_the_library_can_judge(options: dict[str, Any], message: str):
    recipe = make_recipe(options)
    with pytest.raises(RecipeError, match=message):
        recipe.check()


def test_amounts():
    assert amount("max_drop", "1%") == (0.01, True)
    assert amount("max_drop", 0.02) == (0.02, True)
    assert amount("max_flops", "40 %".replace(" ", "")) == (0.4, True)
    assert amount("max_flops", 1e6) == (1e6, False)


def test_choices_are_those_of_the_library():
    assert recipes.METHODS == baselines.METHODS
    assert recipes.MODES == api.MODES
    assert tuple(recipes.COMPENSATIONS) == tuple(obs.COMPENSATIONS)
    assert tuple(tuning.OPTIMIZERS) == recipes.OPTIMIZERS
    assert tuple(likelihoods.LIKELIHOODS) == recipes.LIKELIHOODS
    assert set(recipes.EMPIRICAL) == {"fishleg", "magnitude", *baselines.EMPIRICAL}
    for name in recipes.LIKELIHOODS:
        likelihoods.as_likelihood(name)
    for name in recipes.SCHEDULES:
        schedules.schedule(name, 0.9, 3)


@pytest.mark.parametrize("options", [PruningOptions, tuning.FineTuningOptions])
def test_defaults_are_those_of_the_library(options: type[Any]):
    recipe, own = Recipe(), options()
    shared = {f.name for f in dataclasses.fields(options)} & set(FIELDS)
    assert len(shared) > 10
    for name in shared:
        ours, theirs = getattr(recipe, name), getattr(own, name)
        assert ours == (list(theirs) if isinstance(theirs, tuple) else theirs), name
    if options is tuning.FineTuningOptions:  # a run takes all of them from the recipe
        assert shared == {f.name for f in dataclasses.fields(options)}


def test_every_option_has_a_section_and_help():
    for name, f in FIELDS.items():
        assert f.metadata["section"] in SECTIONS, name
        assert f.metadata["help"].endswith((".", "...")), name


def test_a_recipe_runs_no_code(tmp_path: Path):
    """A recipe names functions that are called later, if ever; to read it runs nothing."""
    mark = tmp_path / "owned"
    (tmp_path / "bad.py").write_text(f"open({str(mark)!r}, 'w')\n")
    for tag in ("!!python/object/apply:os.mkdir", "!!python/object/new:os.mkdir", "!!python/name:os.mkdir"):
        (tmp_path / "a.yaml").write_text(f"run:\n  out: {tag} ['{mark}']\n")
        with pytest.raises(RecipeError, match="cannot be read"):
            load_recipe(tmp_path / "a.yaml")
    (tmp_path / "a.toml").write_text(
        f"[model]\nmodel = \"{tmp_path}/bad.py:make\"\n[run]\nout = \"__import__('os').mkdir('{mark}')\"\n"
    )
    make_recipe(load_recipe(tmp_path / "a.toml")).check()
    assert not mark.exists()


@pytest.mark.parametrize("name", GRADUAL)
def test_options_of_the_training_need_training(name: str):
    texts = {"train_data": "a:b", "optimizer": "sgd", "lr_schedule": "constant"}
    value = {**texts, "distill": True, "momentum": 0.5, "regain": 0.5}.get(name, 7)
    with pytest.raises(RecipeError, match=f"{name} needs mode = 'gradual', got mode = 'staged'"):
        make_recipe({name: value})
    make_recipe({name: value, "mode": "gradual"})
