"""Every option is declared once; help, flags, recipe keys and checks follow from the declaration."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from option_values import NEEDED, another_value, value_in

from fishleg import AuxiliaryOptions, PruningOptions
from fishleg.cli.commands import main
from fishleg.cli.flags import flag_name, help_text
from fishleg.options.declaration import is_list, plain_types, rule_text
from fishleg.runs.recipe import FIELDS, KEYS, SECTIONS, Recipe, load_recipe, make_recipe

# Texts that name a function, a file, a device or a pattern; other rooms judge them.
FREE_TEXTS = {
    "model", "weights", "forward", "data", "train_data", "eval_data", "metric", "max_drop", "max_flops",
    "pattern", "include", "exclude", "wandb",
}  # fmt: skip
# The pattern's limit and the order of the list are checked with the pattern.
CHECKED_LATER = {"sparsities"}


def help_of(command: str) -> str:
    result = CliRunner().invoke(main, [command, "--help"])
    assert result.exit_code == 0
    return " ".join(result.output.split())


def test_every_field_is_a_declared_option() -> None:
    for section, options in SECTIONS.items():
        undeclared = {f.name for f in dataclasses.fields(options)} - set(KEYS[section])
        assert undeclared == ({"auxiliary"} if section == "pruning" else set())
    assert len(FIELDS) == sum(len(keys) for keys in KEYS.values())  # no two sections share a name


@pytest.mark.parametrize("name", list(FIELDS))
def test_an_option_has_help_and_a_rule(name: str) -> None:
    declared = FIELDS[name][1]
    kinds = plain_types(declared)
    assert declared.metadata["help"].endswith((".", "..."))
    assert len(declared.metadata["help"]) <= 160
    assert kinds
    ruled = bool(declared.metadata["rule"] or tuple(declared.metadata["choices"]))
    expected = name not in CHECKED_LATER | FREE_TEXTS and kinds != ["bool"]
    assert ruled is expected
    assert rule_text(declared)


@pytest.mark.parametrize("name", list(FIELDS))
def test_the_default_obeys_the_rule(name: str) -> None:
    section, declared = FIELDS[name]
    options = SECTIONS[section](**{declared.name: declared.default})
    assert getattr(options, declared.name) == declared.default


def test_every_option_is_a_flag_and_its_help_is_shown() -> None:
    shown = help_of("prune")
    for name, (_, declared) in FIELDS.items():
        if name == "model":
            continue  # an argument
        assert f"{flag_name(name)} " in shown or f"{flag_name(name)} /" in shown, name
        # a line may be broken within a word that has a hyphen
        assert help_text(declared).replace(" ", "") in shown.replace(" ", ""), name


def test_a_command_shows_the_flags_that_it_needs() -> None:
    compared, looked_at = help_of("compare"), help_of("sensitivity")
    assert "--method TEXT" not in compared
    assert "--methods TEXT" in compared
    assert "--auxiliary-lr " in looked_at
    assert "--epochs " not in looked_at
    assert "--measure-batches " not in looked_at
    assert "--samples " not in help_of("eval")


@pytest.mark.parametrize("name", list(FIELDS))
def test_an_option_is_read_back_from_a_recipe(tmp_path: Path, name: str) -> None:
    value = another_value(name)
    recipe = make_recipe({name: value, **NEEDED.get(name, {})})
    assert value_in(recipe, name) == value != FIELDS[name][1].default
    assert read_back(recipe, tmp_path) == recipe
    assert recipe.replace() == recipe
    assert make_recipe(NEEDED.get(name, {})).replace(**{name: value}) == recipe


def read_back(recipe: Recipe, folder: Path) -> Recipe:
    (folder / "a.toml").write_text(recipe.to_toml(), encoding="utf-8")
    return make_recipe(load_recipe(folder / "a.toml"))


def as_flags(name: str, value: Any) -> list[str]:
    """The words on the command line that set an option."""
    flag = flag_name(name)
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, tuple) and plain_types(FIELDS[name][1]) == ["str"]:
        return [word for item in value for word in (flag, item)]
    return [flag, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "model"])
def test_a_flag_ends_in_the_recipe_and_is_read_back(tmp_path: Path, name: str) -> None:
    value = another_value(name)
    needed = {"model": "net.py:make", **NEEDED.get(name, {})}
    flags = [word for key, text in needed.items() if key != "model" for word in as_flags(key, text)]
    command = ["prune", "net.py:make", *flags, *as_flags(name, value), "--print-recipe"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    (tmp_path / "b.toml").write_text(result.output, encoding="utf-8")
    recipe = make_recipe(load_recipe(tmp_path / "b.toml"))
    expected = str(value) if name == "max_flops" else value  # a percentage is a text, too
    assert recipe == make_recipe({**needed, name: expected})
    assert read_back(recipe, tmp_path) == recipe


def test_lists_are_kept_as_tuples() -> None:
    options = PruningOptions(include=["a", "b"], auxiliary=AuxiliaryOptions(betas=[0.5, 0.75]))
    assert options.include == ("a", "b")
    assert options.auxiliary is not None
    assert options.auxiliary.betas == (0.5, 0.75)
    assert hash(options) == hash(PruningOptions(include=("a", "b"), auxiliary=options.auxiliary))
    for name, (_, declared) in FIELDS.items():
        assert not is_list(declared) or isinstance(declared.default, tuple), name
