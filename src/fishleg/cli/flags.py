"""Options of a recipe as flags of a command: made from its fields, under headings, read back as values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from fishleg.runs.errors import ToolError
from fishleg.runs.recipe import FIELDS, SECTIONS

F = TypeVar("F", bound=Callable[..., Any])
_TITLES = {
    "model": "Model",
    "data": "Data",
    "target": "How sparse",
    "method": "Method",
    "tuning": "Fine-tuning (--mode gradual)",
    "run": "Run",
}
# short names on the command line for options whose name in a recipe is longer
_EXTRA_FLAGS = {"sparsity": ["-s"], "out": ["-o"], "schedule": []}


class Sections(click.Command):
    """Help with the options under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {section: [] for section in SECTIONS}
        rest: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            if not isinstance(parameter, click.Option):
                continue
            record = parameter.get_help_record(ctx)
            if record is not None:
                known = FIELDS.get(parameter.name or "")
                (rest if known is None else groups[known.metadata["section"]]).append(record)
        for section, records in groups.items():
            if records:
                with formatter.section(_TITLES[section]):
                    formatter.write_dl(records, col_max=26)
        if rest:
            with formatter.section("Other"):
                formatter.write_dl(rest, col_max=26)


def recipe_options(*sections: str, without: tuple[str, ...] = ()) -> Callable[[F], F]:
    """A flag for every option of a recipe in these sections; one that is not given stays unset."""

    def decorate(function: F) -> F:
        for name, f in reversed(FIELDS.items()):
            if f.metadata["section"] not in sections or name in ("model", *without):
                continue
            function = _flag(name, f)(function)
        return function

    return decorate


def _flag(name: str, f: Any) -> Callable[[F], F]:
    kind, dash = str(f.type), f"--{name.replace('_', '-')}"
    text = f.metadata["help"]
    if f.metadata["choices"]:
        text += f" One of: {', '.join(f.metadata['choices'])}."
    default = f.default
    if default not in (None, "", False) and not str(default).startswith("<dataclasses"):
        text += f" [default: {default}]"
    if kind == "bool":
        return click.option(f"{dash}/--no-{dash[2:]}", name, default=None, help=text)
    many = kind.startswith("list")
    metavar = {"int": "N", "float": "X"}.get(kind.split(" ")[0].removeprefix("list[").rstrip("]"), "TEXT")
    if many and "float" in kind:
        metavar, many = "X,X,...", False
    return click.option(*_EXTRA_FLAGS.get(name, []), dash, name, metavar=metavar, multiple=many, help=text)


def flags_given(options: dict[str, Any]) -> dict[str, Any]:
    """The flags that were given, as values for a recipe."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if value is None or value == () or name not in FIELDS:
            continue
        kind = str(FIELDS[name].type)
        if isinstance(value, tuple):
            found[name] = list(value)
        elif kind.startswith("list"):
            found[name] = [_number(name, part, "float") for part in value.split(",")]
        elif isinstance(value, str) and "str" not in kind:
            found[name] = _number(name, value, kind)
        else:
            found[name] = value
    return found


def _number(name: str, text: str, kind: str) -> int | float:
    try:
        return int(text) if "int" in kind and "float" not in kind else float(text)
    except ValueError:
        what = "a whole number" if "int" in kind and "float" not in kind else "a number"
        rule = FIELDS[name].metadata["rule"]
        told = f" {'in ' if rule[0] in '([' else ''}{rule}" if rule else ""
        hint = ""
        if name == "sparsity" and text.endswith("%") and text[:-1].replace(".", "", 1).isdigit():
            hint = f"; for {text[:-1]} % write {float(text[:-1]) / 100:g}"
        raise ToolError(f"--{name.replace('_', '-')} must be {what}{told}, got {text!r}{hint}") from None
