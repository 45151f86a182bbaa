"""Standard output is for results alone: what a model or a loader prints goes to standard error."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

import click

from fishleg.options.text import printable
from fishleg.runs.errors import ToolError

_results: list[TextIO] = []
_ends_with_command = False  # whether the process ends with the command


def end_with_command() -> None:
    """Leave standard output as it is after a command: functions that run at exit may print, too."""
    global _ends_with_command
    _ends_with_command = True


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
        if not _ends_with_command:
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

        Raises:
            ToolError: Something has ended the command as if it had succeeded.
            Exit: The command has ended with another exit code.
        """
        with results_only():
            try:
                return super().invoke(ctx)
            except click.exceptions.Exit as error:
                if error.exit_code == 0:  # of the user's code, which may use click itself
                    raise ToolError(
                        "the work was ended by click.exceptions.Exit(0), without a result"
                    ) from error
                raise
