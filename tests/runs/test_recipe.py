"""Recipes: read back as they were written, and checked by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from option_values import GRADUAL

from fishleg import AuxiliaryOptions, FineTuningOptions
from fishleg.options.declaration import is_optional, plain_types
from fishleg.options.names import EMPIRICAL_METHODS
from fishleg.options.run import BUDGETS
from fishleg.runs.recipe import (
    FIELDS,
    Recipe,
    RecipeError,
    flatten,
    load_recipe,
    make_recipe,
)

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)


# values that each rule allows, by kind of option
NUMBERS = {
    "(0, 1)": st.floats(0, 1, exclude_min=True, exclude_max=True),
    "[0, 1)": st.floats(0, 1, exclude_max=True),
    "[0, 1]": st.floats(0, 1),
    "> 0": st.floats(0, 1e9, exclude_min=True),
    ">= 0": st.floats(0, 1e9),
    ">= 1": st.floats(1, 1e9),
}


def values_of(name: str) -> st.SearchStrategy[Any]:
    """Values that an option may have; None where it is the default or switches something off."""
    declared = FIELDS[name][1]
    values = _values_of(name, declared.metadata["rule"], plain_types(declared)[0])
    return st.one_of(st.none(), values) if is_optional(declared) else values


def _values_of(name: str, rule: str, kind: str) -> st.SearchStrategy[Any]:
    declared = FIELDS[name][1]
    if name in ("include", "exclude"):
        return st.lists(st.sampled_from(["^fc", r"\.weight$", 'a"b', "layer[0-9]+"]), max_size=3)
    if name == "sparsities":
        return st.lists(NUMBERS["(0, 1)"], max_size=3)
    if name == "auxiliary_betas":
        return st.tuples(NUMBERS[rule], NUMBERS[rule])
    if name in ("max_drop", "max_flops"):
        return st.sampled_from(["1%", "0.5%", 0.02, "99%"])
    if declared.metadata["choices"]:
        return st.sampled_from(list(declared.metadata["choices"]))
    if kind == "bool":
        return st.booleans()
    if kind == "str":
        return texts.filter(str.strip) if rule else texts
    if kind == "int":
        return st.integers(2, 1024 if name == "threads" else 2**31)
    return NUMBERS[rule]


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
    for name in contradicted(options):
        options.pop(name, None)
    return make_recipe(options)


def contradicted(options: dict[str, Any]) -> list[str]:
    """Options that others exclude."""
    found = []
    if options.get("method") not in EMPIRICAL_METHODS:
        found.append("empirical")
    if options.get("method") == "exact" or not options.get("batchnorm_batches", 20):
        found.append("batch_statistics")
    if options.get("batch_statistics"):
        found.append("auxiliary_vectorize")
    if options.get("mode") == "one-shot":
        found.append("schedule")
    return [*found, "auxiliary_groups"] if options.get("auxiliary_sub_batch") else found


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


def test_none_switches_the_trust_region_off(tmp_path: Path):
    recipe = make_recipe({"mode": "gradual", "max_kl": "none"})
    assert recipe.fine_tuning.max_kl is None
    assert make_recipe({"mode": "gradual", "max_kl": None}) == recipe
    assert 'max_kl = "none"' in recipe.to_toml()
    (tmp_path / "a.toml").write_text(recipe.to_toml())
    assert make_recipe(load_recipe(tmp_path / "a.toml")) == recipe
    with pytest.raises(RecipeError, match="momentum must be a number in"):
        make_recipe({"mode": "gradual", "momentum": "none"})


def test_options_of_the_auxiliary_learning_have_a_section_of_their_own():
    assert make_recipe({}).pruning.auxiliary is None
    recipe = make_recipe(
        flatten({"auxiliary": {"lr": 0.5}, "fine_tuning": {"lr": 0.25}, "schedule": {"mode": "gradual"}})
    )
    assert recipe.pruning.auxiliary == AuxiliaryOptions(lr=0.5)
    assert recipe.fine_tuning == FineTuningOptions(lr=0.25)
    with pytest.raises(RecipeError, match=r"\[auxiliary\] lr must be a number > 0, got 0"):
        make_recipe({"auxiliary_lr": 0})


@pytest.mark.parametrize("suffix", ["toml", "json", "yaml", "yml"])
def test_forms(tmp_path: Path, suffix: str):
    text = {
        "toml": '[model]\nmodel = "net.py:make"\n[schedule]\nsparsity = 0.8\n[pruning]\nexclude = ["^fc"]\n',
        "json": '{"model": {"model": "net.py:make"}, "schedule": {"sparsity": 0.8}, '
        '"pruning": {"exclude": ["^fc"]}}',
        "yaml": "model:\n  model: net.py:make\nschedule:\n  sparsity: 0.8\npruning:\n  exclude: [^fc]\n",
    }[suffix.replace("yml", "yaml")]
    path = tmp_path / f"recipe.{suffix}"
    path.write_text(text)
    assert load_recipe(path) == {"model": "net.py:make", "sparsity": 0.8, "exclude": ["^fc"]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"schedule": {"sparsty": 0.5}},
            r"unknown key 'sparsty' in \[schedule\] .*did you mean 'sparsity'\?",
        ),
        (
            {"fine_tuning": {"learning_rate": 0.5}},
            r"unknown key 'learning_rate' in \[fine_tuning\] \(keys are optimizer",
        ),
        ({"run": {"sed": 1}}, "did you mean 'seed'"),
        (
            {"pruning": {"sparsities": []}},
            r"unknown key 'sparsities' in \[pruning\].*it belongs under \[schedule\]",
        ),
        ({"pruning": {"momentun": 0.5}}, r"did you mean 'momentum'\? It belongs under \[fine_tuning\]"),
        ({"weights": "a.pt"}, r"unknown key 'weights' in the recipe; it belongs under \[model\]"),
        ({"lr": 0.1}, r"'lr' in the recipe; it belongs under \[auxiliary\] or \[fine_tuning\]"),
        ({"prunning": {}}, r"unknown section 'prunning'.*sections are model, .*did you mean 'pruning'"),
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


def test_a_budget_of_multiply_adds_is_recorded_with_what_it_implies() -> None:
    recipe = make_recipe({"max_flops": "40%"})
    assert recipe.pruning.mask_search_across_layers is False
    assert "mask_search_across_layers = false" in recipe.to_toml()
    assert make_recipe({"sparsity": 0.5}).pruning.mask_search_across_layers is True
