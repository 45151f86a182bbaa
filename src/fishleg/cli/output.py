"""Standard output is for results alone: what a model or a loader prints goes to standard error."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

import click

from fishleg.options.text import printable

_results: list[TextIO] = []


def show(text: str) -> None:
    """Print a result of a command; characters that could control the terminal are escaped.

    Args:
        text: The text.
    """
    click.echo(printable(text), file=_results[-1] if _results else None)


@contextlib.contextmanager
def results_only() -> Iterator[None]:
    """Send everything but `show` to standard error inside the `with` block, from child processes as well.

    Yields:
        Nothing.
    """
    stdout = sys.stdout
    try:
        inherited = stdout.fileno()
        sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # replaced by an object without a file, as tests do
        inherited = -1
    with contextlib.ExitStack() as stack:
        if inherited == 1:
            stdout = stack.enter_context(_moved_aside())
        _results.append(stdout)
        stack.callback(_results.pop)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


@contextlib.contextmanager
def _moved_aside() -> Iterator[TextIO]:
    """Move the file of standard output aside; standard error takes its place.

    Yields:
        A stream that writes to the file.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    stream = os.fdopen(os.dup(kept), "w", encoding=sys.stdout.encoding, errors="backslashreplace")
    try:
        yield stream
    finally:
        with contextlib.suppress(BrokenPipeError):
            stream.close()
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


class ResultsCommand(click.Command):
    """A command whose standard output holds its result and nothing else."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

        Args:
            ctx: The context of the command.

        Returns:
            What the command returns.
        """
        with results_only():
            return super().invoke(ctx)
