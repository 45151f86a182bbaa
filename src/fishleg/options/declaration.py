"""How an option is declared: name, type, default, rule and one line of help, once.

Python keywords, command-line flags, recipe keys, `--help`, error messages and the reference pages are all
derived from these declarations. This package must not import torch: `fishleg --help` is made from it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

_KINDS = {"str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false"}


NOT_EMPTY = "that is not empty"  # the rule of a text


class OptionError(ValueError):
    """An option has a value that breaks its rule; the message names the option, the value and the rule."""


def option(
    default: Any,
    help: str,
    *,
    rule: str = "",
    choices: Iterable[str] = (),
    accepts: Callable[[Any], bool] | None = None,
    flags: tuple[str, ...] = (),
    share: bool = False,
) -> Any:
    """Declare a field of an option dataclass.

    Args:
        default: The default value.
        help: One line that says what the option does. `--help` and the reference page show it.
        rule: `NOT_EMPTY` for texts, or a bound such as `> 0`, `>= 1`, `[0, 1)` or `[0, 1]`. Numbers must also
            be finite.
        choices: The texts that are allowed. A registry of names may grow after the declaration.
        accepts: Tells which values are accepted beside those of the annotated plain types, for instance
            a `Pattern` object where the plain type is a text.
        flags: Short flags of the command line, for instance `("-s",)`.
        share: Whether the number is a share, which may also be written as a percentage, for instance `90%`.

    Returns:
        A dataclass field with the declaration as its metadata.
    """
    metadata = {
        "help": help, "rule": rule, "choices": choices, "accepts": accepts, "flags": flags, "share": share,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


def plain_types(field: dataclasses.Field[Any]) -> list[str]:
    """Return the plain types that a field's annotation names.

    Args:
        field: A field that was declared with `option`.

    Returns:
        Those of `str`, `int`, `float` and `bool` that occur in the annotation, in its order.
    """
    inner = _annotation(field).replace("Sequence[", "").replace("tuple[", "").replace("]", "")
    return [part for part in inner.replace(",", "|").replace(" ", "").split("|") if part in _KINDS]


def is_list(field: dataclasses.Field[Any]) -> bool:
    """Tell whether a field holds several values.

    Args:
        field: A field that was declared with `option`.

    Returns:
        True for annotations such as `Sequence[str]` and `tuple[float, float]`.
    """
    return _annotation(field).startswith(("Sequence[", "tuple["))


def is_optional(field: dataclasses.Field[Any]) -> bool:
    """Tell whether a field may be None.

    Args:
        field: A field that was declared with `option`.

    Returns:
        True where the annotation allows None.
    """
    return "None" in _annotation(field)


def _annotation(field: dataclasses.Field[Any]) -> str:
    """Return the annotation of a field as text, also where annotations are evaluated."""
    if isinstance(field.type, str):
        return field.type
    plain = isinstance(field.type, type) and not hasattr(field.type, "__args__")
    return field.type.__name__ if plain else str(field.type).replace("collections.abc.", "")


def rule_text(field: dataclasses.Field[Any]) -> str:
    """Return the type and the rule of a field as words, for messages and help.

    Args:
        field: A field that was declared with `option`.

    Returns:
        A phrase such as `a whole number >= 1` or `in (0, 1)`.
    """
    rule, kinds = field.metadata["rule"], plain_types(field)
    if choices := tuple(field.metadata["choices"]):
        return f"one of {', '.join(choices)}"
    within = f"in {rule}" if rule.startswith(("(", "[")) else rule
    if is_list(field):
        count = _fixed_length(field)
        words = "a list of texts" if "str" in kinds else f"{count or 'a list of'} numbers"
        return f"{words} {within}".strip()
    words = "" if within.startswith("in") else " or ".join(_KINDS[kind] for kind in kinds)
    return f"{words} {within}".strip()


def type_text(field: dataclasses.Field[Any]) -> str:
    """Return the type and the rule of a field as words, for a value of another type.

    Args:
        field: A field that was declared with `option`.

    Returns:
        As `rule_text`, with the type before an interval: `a number in (0, 1)`.
    """
    text = rule_text(field)
    kinds = " or ".join(_KINDS[kind] for kind in plain_types(field))
    return f"{kinds} {text}" if text.startswith("in ") else text


def _fixed_length(field: dataclasses.Field[Any]) -> int | None:
    """Return the number of values of a field such as `tuple[float, float]`; None: any number."""
    return len(plain_types(field)) if str(field.type).startswith("tuple[") else None


def check_options(options: object, expected: type, name: str) -> None:
    """Check that an argument is an option object or None.

    Args:
        options: The argument.
        expected: The class of options.
        name: The name of the argument.

    Raises:
        OptionError: It is something else, for instance a dictionary.
    """
    if options is not None and not isinstance(options, expected):
        raise OptionError(f"{name} must be {expected.__name__} or None, got {type(options).__name__}")


def check_fields(options: Any) -> None:
    """Check every declared field of an option object, and turn lists into tuples.

    Args:
        options: An instance of a frozen dataclass whose fields were declared with `option`.

    Raises:
        OptionError: A value has the wrong type or breaks its rule.
    """
    for field in dataclasses.fields(options):
        if "rule" in field.metadata:
            value = check_value(field, getattr(options, field.name))
            object.__setattr__(options, field.name, value)


def check_value(field: dataclasses.Field[Any], value: Any) -> Any:
    """Check one value against the declaration of its field.

    Args:
        field: A field that was declared with `option`.
        value: The value to check.

    Returns:
        The value; a list as a tuple, and a number that is a scalar of NumPy or torch as Python's own.

    Raises:
        OptionError: The value has the wrong type or breaks the rule.
    """
    accepts = field.metadata["accepts"]
    if (value is None and is_optional(field)) or (accepts is not None and accepts(value)):
        return value
    kinds = plain_types(field)
    if field.metadata["share"]:
        several = is_list(field) and isinstance(value, (list, tuple))
        value = [as_share(item) for item in value] if several else as_share(value)
    if is_list(field):
        return _check_list(field, value, kinds)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not _has_kind(value, kinds):
        raise OptionError(
            f"{field.name} must be {type_text(field)}, got {value!r}{_number_hint(value, kinds)}"
        )
    choices = tuple(field.metadata["choices"])
    if choices and value not in choices:
        raise OptionError(f"{field.name} must be {rule_text(field)}, got {value!r}{nearest(value, choices)}")
    if isinstance(value, str):
        _check_text(field.name, value)
        if field.metadata["rule"] == NOT_EMPTY and not value.strip():
            raise OptionError(f"{field.name} must be {rule_text(field)}, got {value!r}")
    elif not isinstance(value, bool) and not holds(field.metadata["rule"], _as_float(value)):
        raise OptionError(
            f"{field.name} must be {rule_text(field)}, got {value!r}{_percent_hint(field, value)}"
        )
    return float(value) if kinds == ["float"] else value


def as_share(value: Any) -> Any:
    """Read a share that is written as a percentage.

    >>> as_share("90%"), as_share(0.9), as_share("ninety")
    (0.9, 0.9, 'ninety')

    Args:
        value: A number, or a text such as `90%`.

    Returns:
        The share as a number; any other value as it is.
    """
    if not isinstance(value, str) or not value.strip().endswith("%"):
        return value
    try:
        # 58 / 100 and 0.58 are the same number; 58 * 0.01 is not
        return float(value.strip()[:-1]) / 100
    except ValueError:
        return value


def _check_list(field: dataclasses.Field[Any], value: Any, kinds: list[str]) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        raise OptionError(f"{field.name} must be {rule_text(field)}, got {value!r}")
    values = tuple(item.tolist() if hasattr(item, "tolist") else item for item in value)
    rule = field.metadata["rule"]
    if "" in values:
        raise OptionError(f"{field.name} must not hold an empty text, got {list(values)!r}")
    right = all(_has_kind(item, kinds) and (not rule or holds(rule, _as_float(item))) for item in values)
    if not right or _fixed_length(field) not in (None, len(values)):
        raise OptionError(f"{field.name} must be {rule_text(field)}, got {list(values)!r}")
    return values


def _has_kind(value: Any, kinds: list[str]) -> bool:
    if isinstance(value, bool):
        return "bool" in kinds
    if isinstance(value, str):
        return "str" in kinds
    if isinstance(value, int):
        return "int" in kinds or "float" in kinds
    return isinstance(value, Real) and "float" in kinds


def _check_text(name: str, value: str) -> None:
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise OptionError(f"{name} must be UTF-8 text without null characters, got {value!r}")


def holds(rule: str, value: float) -> bool:
    """Tell whether a number satisfies a rule.

    Args:
        rule: A rule as `option` takes it; the empty text allows every finite number.
        value: The number.

    Returns:
        True where the number is finite and within the rule's bounds.
    """
    if not math.isfinite(value):
        return False
    if not rule:
        return True
    if rule[0] in "([":
        low, high = (float(part) for part in rule[1:-1].split(","))
        above = low < value if rule[0] == "(" else low <= value
        return above and (value < high if rule[-1] == ")" else value <= high)
    sign, bound = rule.split()
    return value >= float(bound) if sign == ">=" else value > float(bound)


def nearest(word: object, known: Iterable[str]) -> str:
    """Return a hint with the most similar known word.

    Args:
        word: What was given.
        known: The words that are allowed.

    Returns:
        A text `; did you mean ...?`, or the empty text where no known word is similar.
    """
    found = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""


def _number_hint(value: Any, kinds: list[str]) -> str:
    """Return a hint on how to write a number that was given as a text, for instance 1e-3 in YAML."""
    if not isinstance(value, str) or "str" in kinds or "bool" in kinds:
        return ""
    try:
        number = float(value)
    except ValueError:
        return ""
    if not math.isfinite(number):
        return ""
    return f"; write {number!r}" if "e" in value.lower() else f"; write {value} without quotes"


def _percent_hint(field: dataclasses.Field[Any], value: Any) -> str:
    """Return a hint on how to write a percentage where a fraction is expected."""
    if field.metadata["rule"] in ("(0, 1)", "[0, 1)") and 1 < _as_float(value) < 100:
        return f"; for {value:g} % write {float(value) / 100:g} or {value:g}%"
    return ""


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def differing(options: Any) -> Mapping[str, Any]:
    """Return the fields of an option object that differ from their defaults.

    Args:
        options: An instance of a dataclass whose fields were declared with `option`.

    Returns:
        The values by field name.
    """
    return {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if getattr(options, field.name) != field.default
    }
