"""The command line: commands, flags made from the options, the display of a run, the demo."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "main":
        raise AttributeError(f"module 'fishleg.cli' has no attribute {name!r}")
    from fishleg.cli.commands import main  # needs click, which the demo does not

    return main


__all__ = ["main"]  # noqa: F822
