"""The reference pages of the options and of the command line, written from their declarations.

The pages are files of the repository. `python docs/generate_reference.py` writes them; a test compares them
with the declarations.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

WIDTH = 88  # of the help texts
NOTE = "<!-- Written by docs/generate_reference.py: change the declarations, not this page. -->"
PAGES = ("reference/options.md", "reference/cli.md")


def pages() -> dict[str, str]:
    """{path under docs/: Markdown} of every generated page."""
    return dict(zip(PAGES, (options_page(), cli_page()), strict=True))


def options_page() -> str:
    """A table for every option class: name, flag, type, default, rule, meaning."""
    from fishleg.cli.flags import flag_name
    from fishleg.runs.recipe import KEYS, SECTIONS, flat_key

    parts = [
        NOTE,
        "# Options",
        "Every option is declared once, in `fishleg.options`. The Python keyword, the command-line flag,\n"
        "the recipe key and this page are derived from the declaration.",
    ]
    for section, kind in SECTIONS.items():
        about = (inspect.getdoc(kind) or "").partition("\n\nArgs:")[0]
        parts += [f"## {kind.__name__}", f"{about}", f"Section `[{section}]` of a recipe."]
        rows = [
            "| option | flag | type | default | rule | meaning |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for key, field in KEYS[section].items():
            flag = "first argument" if key == "model" else f"`{flag_name(flat_key(section, key))}`"
            cells = [
                f"`{key}`",
                flag,
                _type(field),
                f"`{_default(field)}`",
                _rule(field),
                field.metadata["help"],
            ]
            rows.append("| " + " | ".join(map(_cell, cells)) + " |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _rule(field: dataclasses.Field[Any]) -> str:
    return ", ".join(field.metadata["choices"]) or str(field.metadata["rule"])


def _type(field: dataclasses.Field[Any]) -> str:
    """The annotation with "or" between its parts: a table cannot show a vertical bar in code."""
    return " or ".join(f"`{part.strip()}`" for part in str(field.type).split("|"))


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    return "required"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def cli_page() -> str:
    """The help of every command, as `fishleg COMMAND --help` prints it."""
    import click

    from fishleg.cli.commands import main

    parts = [
        NOTE,
        "# Command line",
        "The text that `fishleg COMMAND --help` prints. Flags are derived from the [options](options.md).",
        "Exit codes: 0 success, 1 an error (one line on standard error; `fishleg --debug COMMAND ...` adds\n"
        "the traceback), 2 an unknown flag or command, 130 interrupted.",
    ]
    sizes = {**main.context_settings, "max_content_width": WIDTH, "terminal_width": WIDTH}
    context = click.Context(main, info_name="fishleg", **sizes)
    parts += ["## fishleg", _help(main, context)]
    for name, command in main.commands.items():
        child = click.Context(command, info_name=name, parent=context, **sizes)
        parts += [f"## fishleg {name}", _help(command, child)]
    return "\n\n".join(parts) + "\n"


def _help(command: Any, context: Any) -> str:
    return f"```text\n{command.get_help(context)}\n```"


if __name__ == "__main__":
    for path, text in pages().items():
        (Path(__file__).parent / path).write_text(text, encoding="utf-8")
