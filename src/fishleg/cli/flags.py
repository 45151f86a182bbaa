"""Flags of the commands: made from the declarations of the options, and read back as their values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import click

from fishleg.cli.output import ResultsCommand
from fishleg.options.declaration import as_share, is_list, plain_types, type_text
from fishleg.runs.errors import ToolError
from fishleg.runs.recipe import FIELDS, SECTIONS

F = TypeVar("F", bound=Callable[..., Any])
_TITLES = {
    "model": "Model",
    "data": "Data",
    "schedule": "Sparsity and stages",
    "pruning": "Pruning",
    "auxiliary": "Learning Q (--method fishleg)",
    "fine_tuning": "Fine-tuning (--mode gradual)",
    "run": "Run",
}


class Sections(ResultsCommand):
    """A command whose help shows the options under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, section by section.

        Args:
            ctx: The context of the command.
            formatter: Where the help is written to.
        """
        groups: dict[str, list[tuple[str, str]]] = {section: [] for section in SECTIONS}
        rest: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            if not isinstance(parameter, click.Option):
                continue
            record = parameter.get_help_record(ctx)
            if record is not None:
                known = FIELDS.get(parameter.name or "")
                (rest if known is None else groups[known[0]]).append(record)
        for section, records in groups.items():
            if records:
                with formatter.section(_TITLES[section]):
                    formatter.write_dl(records, col_max=26)
        if rest:
            with formatter.section("Other"):
                formatter.write_dl(rest, col_max=26)


def recipe_options(
    *sections: str, without: tuple[str, ...] = (), only: tuple[str, ...] = ()
) -> Callable[[F], F]:
    """Add a flag for every option of these sections; one that is not given stays unset.

    Args:
        sections: Sections of a recipe.
        without: Options that get no flag.
        only: Options of other sections that get a flag, too.

    Returns:
        A decorator of a click command.
    """

    def decorate(function: F) -> F:
        for name, (section, declared) in reversed(FIELDS.items()):
            wanted = (section in sections and name not in without) or name in only
            if wanted and name != "model":
                function = _flag(name, declared)(function)
        return function

    return decorate


def flag_name(name: str) -> str:
    """Return the flag of an option.

    Args:
        name: The unique name of the option.

    Returns:
        For instance `--mask-search-rounds`.
    """
    return f"--{name.replace('_', '-')}"


def help_text(declared: dataclasses.Field[Any]) -> str:
    """Return the help of an option with its choices and default.

    Args:
        declared: The declaration.

    Returns:
        One paragraph.
    """
    text = str(declared.metadata["help"])
    if choices := tuple(declared.metadata["choices"]):
        text += f" One of: {', '.join(choices)}."
    default = declared.default
    if default not in (None, "", False, ()):
        shown = ", ".join(map(str, default)) if isinstance(default, tuple) else default
        text += f" [default: {shown}]"
    return text


def _flag(name: str, declared: dataclasses.Field[Any]) -> Callable[[F], F]:
    dash, kinds = flag_name(name), plain_types(declared)
    text = help_text(declared)
    if kinds == ["bool"]:
        return click.option(f"{dash}/--no-{dash[2:]}", name, default=None, help=text)
    repeated = is_list(declared) and kinds == ["str"]
    metavar = {"int": "N", "float": "X"}.get(kinds[0], "TEXT")
    if is_list(declared) and not repeated:
        metavar = "X,X,..."
    flags = [*declared.metadata["flags"], dash]
    return click.option(*flags, name, metavar=metavar, multiple=repeated, help=text)


def flags_given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that were given, as values for a recipe.

    Args:
        options: What click has read, by option name.

    Returns:
        Values by unique option name.
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        if value is None or value == () or name not in FIELDS:
            continue
        declared = FIELDS[name][1]
        kinds = plain_types(declared)
        if isinstance(value, tuple):
            found[name] = list(value)
        elif is_list(declared):
            found[name] = [_number(name, part, declared) for part in value.split(",")]
        elif isinstance(value, str) and "str" not in kinds and value.lower() != "none":
            found[name] = _number(name, value, declared)
        else:
            found[name] = value
    return found


def _number(name: str, text: str, declared: dataclasses.Field[Any]) -> int | float:
    whole = "float" not in plain_types(declared)
    try:
        return int(text) if whole else float(as_share(text) if declared.metadata["share"] else text)
    except ValueError:
        raise ToolError(f"{flag_name(name)} must be {type_text(declared)}, got {text!r}") from None
