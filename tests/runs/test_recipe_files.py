"""Recipes are read from regular files of limited size and depth only."""

import os
import time
from pathlib import Path

import pytest

from fishleg.runs.recipe import RecipeError, load_recipe

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghij", "bcdefghijk", strict=True)
)
DEEP = {
    "brackets.json": '{"model": ' + "[" * 30_000 + "]" * 30_000 + "}",
    "levels.json": '{"model": ' + "[" * 50 + "]" * 50 + "}",
    "brackets.toml": "[model]\nmodel = " + "[" * 30_000 + "]" * 30_000,
    "levels.toml": "[model]\nmodel = " + "[" * 50 + "]" * 50,
    "dots.toml": ".".join(["a"] * 30_000) + " = 1\n",
    "quotes.toml": ".".join(['"a"', "'b c'"] * 5_000) + " = 1\n",
    "tables.toml": f"[{'.'.join(['a'] * 30_000)}]\n",
    "inline.toml": "model = " + "{a = " * 5_000 + "1" + "}" * 5_000,
    "brackets.yaml": "model: " + "[" * 5_000 + "]" * 5_000,
    "levels.yaml": "model: " + "[" * 50 + "]" * 50,
    "dashes.yaml": "- " * 2_000 + "a",
}


@pytest.mark.parametrize("name", DEEP)
def test_deep_nesting_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(DEEP[name])
    started = time.monotonic()
    with pytest.raises(RecipeError, match=r"cannot be read: it is nested too deeply$"):
        load_recipe(tmp_path / name)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("text", [LAUGHS, "run: &r {seed: 1}\nmodel: *r", "run:\n  <<: *x", "a: &a [*a]"])
def test_aliases_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(RecipeError, match=r"cannot be read: aliases such as \*\w are not allowed"):
        load_recipe(tmp_path / "a.yaml")


@pytest.mark.parametrize("suffix", [".toml", ".json", ".yaml"])
def test_endless_and_huge_files_are_refused_at_once(tmp_path: Path, suffix: str) -> None:
    endless, pipe, huge = (tmp_path / f"{name}{suffix}" for name in ("endless", "pipe", "huge"))
    endless.symlink_to("/dev/zero")
    os.mkfifo(pipe)
    with open(huge, "wb") as file:
        file.truncate(10 * 2**30)
    started = time.monotonic()
    for path in (endless, pipe):
        with pytest.raises(RecipeError, match=rf"cannot read recipe {path}: it is not a regular file"):
            load_recipe(path)
    with pytest.raises(RecipeError, match=r"cannot read recipe .*: it is larger than 65,536 bytes"):
        load_recipe(huge)
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("suffix", [".toml", ".yaml"])
def test_numbers_that_cannot_be_printed_are_refused(tmp_path: Path, suffix: str) -> None:
    number = "0x" + "f" * 5000
    text = f"[run]\nseed = {number}" if suffix == ".toml" else f"run: {{seed: {number}}}"
    (tmp_path / f"a{suffix}").write_text(text)
    with pytest.raises(RecipeError, match="it holds a whole number of 20,000 bits"):
        load_recipe(tmp_path / f"a{suffix}")


@pytest.mark.parametrize("suffix", [".toml", ".json", ".yaml"])
def test_the_largest_file_is_read_in_seconds(tmp_path: Path, suffix: str) -> None:
    values = ", ".join(['"a"'] * 13_000)
    text = {
        ".toml": f"[pruning]\nexclude = [{values}]",
        ".json": f'{{"pruning": {{"exclude": [{values}]}}}}',
        ".yaml": f"pruning:\n  exclude: [{values}]\n",
    }[suffix]
    (tmp_path / f"a{suffix}").write_text(text)
    assert 65_000 < len(text) <= 65_536
    started = time.monotonic()
    assert load_recipe(tmp_path / f"a{suffix}") == {"exclude": ["a"] * 13_000}
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "text",
    ["a" * 65_000, '"' * 65_000, "a." * 20 + "\n" + "a " * 30_000, "a" + " " * 65_000, "a.\n" * 20_000],
)
def test_odd_toml_is_refused_in_seconds(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    started = time.monotonic()
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path / "a.toml")
    assert time.monotonic() - started < 5


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="null"):
        load_recipe(f"{tmp_path}/a\0.toml")
