"""How declared options are checked: types, rules, choices and the messages."""

# ruff: noqa: RUF009

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from fishleg.options import OptionError, nearest, option
from fishleg.options.declaration import check_fields, differing, holds, is_list, is_optional, plain_types
from fishleg.options.names import Names

FRUIT = Names("fruit", {"apple": "", "pear": ""})


@dataclass(frozen=True, kw_only=True)
class Basket:
    """One option of every kind. Annotations are texts, as in modules that import annotations."""

    fruit: "str" = option("apple", "Which fruit.", choices=FRUIT)
    count: "int" = option(1, "How many.", rule=">= 1")
    most: "int | None" = option(None, "At most.", rule="> 0")
    weight: "float" = option(1.0, "In kilograms.", rule="> 0")
    share: "float" = option(0.5, "Of the ripe ones.", rule="[0, 1)")
    ripe: "bool" = option(True, "Whether they are ripe.")
    name: "str | None" = option(None, "Of the owner.")
    limit: "str | float | None" = option(None, "A number or a percentage.")
    words: "Sequence[str]" = option((), "Any words.")
    pair: "tuple[float, float]" = option((0.0, 1.0), "Two shares.", rule="[0, 1]")
    maker: "str" = option("apple", "A name or a function.", choices=FRUIT, accepts=callable)

    def __post_init__(self) -> None:
        check_fields(self)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fruit": "aple"}, "fruit must be one of apple, pear, got 'aple'; did you mean 'apple'?"),
        ({"fruit": 3}, "fruit must be one of apple, pear, got 3"),
        ({"fruit": None}, "fruit must be one of apple, pear, got None"),
        ({"count": 0}, "count must be a whole number >= 1, got 0"),
        ({"count": 1.0}, "count must be a whole number >= 1, got 1.0"),
        ({"count": True}, "count must be a whole number >= 1, got True"),
        ({"count": "3"}, "count must be a whole number >= 1, got '3'; write 3 without quotes"),
        ({"count": None}, "count must be a whole number >= 1, got None"),
        ({"count": 10**400}, "count must be a whole number >= 1, got 1000"),
        ({"most": 0}, "most must be a whole number > 0, got 0"),
        ({"weight": 0}, "weight must be a number > 0, got 0"),
        ({"weight": math.nan}, "weight must be a number > 0, got nan"),
        ({"weight": math.inf}, "weight must be a number > 0, got inf"),
        ({"weight": 10**400}, "weight must be a number > 0, got 1000"),
        ({"weight": "1e-3"}, "weight must be a number > 0, got '1e-3'; write 0.001"),
        ({"weight": 1j}, "weight must be a number > 0, got 1j"),
        ({"weight": np.ones(2)}, "weight must be a number > 0, got [1.0, 1.0]"),
        ({"share": 1}, "share must be in [0, 1), got 1"),
        ({"share": 50}, "share must be in [0, 1), got 50; for 50 % write 0.5"),
        ({"share": -0.1}, "share must be in [0, 1), got -0.1"),
        ({"share": "half"}, "share must be a number in [0, 1), got 'half'"),
        ({"share": False}, "share must be a number in [0, 1), got False"),
        ({"ripe": 1}, "ripe must be true or false, got 1"),
        ({"ripe": "yes"}, "ripe must be true or false, got 'yes'"),
        ({"name": 3}, "name must be a text, got 3"),
        ({"name": "a\0b"}, "name must be UTF-8 text without null characters, got 'a\\x00b'"),
        ({"name": "a\udcff"}, "name must be UTF-8 text without null characters"),
        ({"limit": True}, "limit must be a text or a number, got True"),
        ({"words": "one"}, "words must be a list of texts, got 'one'"),
        ({"words": ["one", 2]}, "words must be a list of texts, got ['one', 2]"),
        ({"words": {"one": 1}}, "words must be a list of texts, got {'one': 1}"),
        ({"words": 3}, "words must be a list of texts, got 3"),
        ({"words": None}, "words must be a list of texts, got None"),
        ({"pair": [0.5]}, "pair must be 2 numbers in [0, 1], got [0.5]"),
        ({"pair": [0.5, 2]}, "pair must be 2 numbers in [0, 1], got [0.5, 2]"),
        ({"pair": [0.5, math.nan]}, "pair must be 2 numbers in [0, 1], got [0.5, nan]"),
        ({"pair": [0.5, True]}, "pair must be 2 numbers in [0, 1], got [0.5, True]"),
        ({"maker": "aple"}, "maker must be one of apple, pear, got 'aple'"),
    ],
)
def test_wrong_values(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        Basket(**given)
    assert str(caught.value).startswith(message)


def test_right_values() -> None:
    basket = Basket(
        fruit="pear", count=2**70, most=3, weight=1, share=0, ripe=False, name="", limit="1%",
        words=["one"], pair=[1, 0], maker=len,
    )  # fmt: skip
    assert isinstance(basket.weight, float)
    assert isinstance(basket.share, float)
    assert basket.words == ("one",)
    assert basket.pair == (1, 0)
    assert basket.maker is len


@pytest.mark.parametrize("number", [np.float32(0.25), np.array(0.25), torch.tensor(0.25)])
def test_scalars_of_other_libraries_become_plain_numbers(number: Any) -> None:
    basket = Basket(share=number, count=np.int64(3), pair=np.array([0.0, 0.5]))
    assert (type(basket.share), basket.share) == (float, 0.25)
    assert (type(basket.count), basket.count) == (int, 3)
    assert basket.pair == (0.0, 0.5)


def test_what_an_annotation_says() -> None:
    fields = {field.name: field for field in dataclasses.fields(Basket)}
    assert plain_types(fields["limit"]) == ["str", "float"]
    assert plain_types(fields["words"]) == ["str"]
    assert [name for name, field in fields.items() if is_list(field)] == ["words", "pair"]
    assert [name for name, field in fields.items() if is_optional(field)] == ["most", "name", "limit"]


@pytest.mark.parametrize(
    ("rule", "inside", "outside"),
    [
        ("", [0, -1e9], []),
        ("> 0", [1e-300], [0, -1]),
        (">= 1", [1, 7], [0.999]),
        ("(0, 1)", [0.5], [0, 1]),
        ("[0, 1)", [0, 0.5], [1, -0.1]),
        ("[0, 1]", [0, 1], [1.001]),
    ],
)
def test_rules(rule: str, inside: list[float], outside: list[float]) -> None:
    assert all(holds(rule, value) for value in inside)
    assert not any(holds(rule, value) for value in [*outside, math.nan, math.inf, -math.inf])


def test_a_hint_names_the_nearest_word() -> None:
    assert nearest("pera", FRUIT) == "; did you mean 'pear'?"
    assert nearest("melon", FRUIT) == ""


def test_names_that_are_added_later_are_accepted() -> None:
    with pytest.raises(OptionError, match="one of apple, pear, got 'plum'"):
        Basket(fruit="plum")
    FRUIT.add("plum")
    try:
        assert Basket(fruit="plum").fruit == "plum"
        assert len(FRUIT) == 3
        for wrong in ("plum", ""):
            with pytest.raises(ValueError, match="the name of a new fruit must be new and not empty"):
                FRUIT.add(wrong)
    finally:
        FRUIT.remove("plum")
    assert "plum" not in FRUIT


def test_what_differs_from_the_defaults() -> None:
    assert differing(Basket()) == {}
    assert differing(Basket(count=2, words=["one"])) == {"count": 2, "words": ("one",)}
