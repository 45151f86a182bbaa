"""What all commands share: the group that turns errors into exit codes, common options, the recipe."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any

import click

from fishleg.cli.flags import flag_name, flags_given
from fishleg.options.declaration import nearest
from fishleg.options.text import printable
from fishleg.runs.errors import Interrupted, ToolError
from fishleg.runs.recipe import Recipe, load_recipe, make_recipe

ERROR, INTERRUPTED = 1, 130

recipe_option = click.option(
    "--recipe",
    "recipe_file",
    metavar="FILE",
    help="Read options from a .toml, .yaml or .json file. Flags override it.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
trust_option = click.option(
    "--trust",
    is_flag=True,
    help="Run the code that the run names even if it is neither below the current directory nor installed.",
)
quiet_option = click.option("--quiet", is_flag=True, help="Show no progress, only warnings.")


class _SafeFormatter(logging.Formatter):
    """Escapes characters that could control the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class CommandGroup(click.Group):
    """The group of all commands. Errors become one line and an exit code; --debug adds the traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. Its errors become one line on standard error and an exit code.

        Args:
            ctx: The context of the group.

        Returns:
            The result of the command.

        Raises:
            Exit: The command has ended with an exit code.
            ClickException: An argument or a flag is wrong; click prints it.
            Abort: The user has ended the command.
        """
        handler = logging.StreamHandler()
        handler.setFormatter(_SafeFormatter("warning: %(message)s"))
        logging.basicConfig(handlers=[handler], level=logging.WARNING)
        try:
            _check_single_process()
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except (Interrupted, KeyboardInterrupt) as error:
            say(str(error) or "interrupted before anything was written")
            ctx.exit(INTERRUPTED)
        except (Exception, SystemExit) as error:  # an exit of the user's code must not look like success
            if ctx.params.get("debug"):
                traceback.print_exc()
            click.echo(f"error: {_message(error)}", err=True)
            ctx.exit(ERROR)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find a command, and suggest a similar name if there is none.

        Args:
            ctx: The context of the group.
            args: The name of the command and its arguments.

        Returns:
            The name, the command and the other arguments.
        """
        if args and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"there is no command {args[0]!r}{nearest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in the order in which they were added.

        Args:
            ctx: The context of the group.

        Returns:
            The names.
        """
        return list(self.commands)


def _check_single_process() -> None:
    """Refuse to run in several processes, which would all write into one directory.

    Raises:
        ToolError: torchrun has started several processes.
    """
    processes = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and processes != "1":
        raise ToolError(
            f"torchrun has started {processes} processes, but the command line works in one: start it "
            "without torchrun. To prune a model that several processes train, wrap it in "
            "DistributedDataParallel in a script of your own, and call fishleg.prune or fishleg.attach there"
        )


def _message(error: BaseException) -> str:
    text = str(error).strip()
    if "Traceback" in text:  # a worker of a DataLoader sends its whole traceback
        from fishleg.runtime.batch_errors import (
            error_text,  # needs torch, which such an error has needed, too
        )

        text = error_text(error)
    text = printable(text)
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{printable(str(error.filename))}: {error.strerror}"
    if isinstance(error, (ToolError, ValueError)):
        return text
    return f"{type(error).__name__}: {text} (for the traceback: fishleg --debug ...)"


def recipe_of(model: str | None, recipe_file: str | None, options: dict[str, Any]) -> Recipe:
    """Return the recipe that a command's arguments describe.

    Args:
        model: The argument MODEL.
        recipe_file: The file that --recipe names.
        options: All flags, by unique option name.

    Returns:
        The recipe.

    Raises:
        ToolError: No model is named.
    """
    given = flags_given(options)
    if model is not None:
        given["model"] = model
    recipe = make_recipe(load_recipe(recipe_file) if recipe_file else {}, given)
    if not recipe.model.model:
        raise ToolError("MODEL is missing: name the function that returns the model, for example net.py:make")
    return recipe


def run_directory(
    source: str | None,
    recipe_file: str | None,
    options: dict[str, Any],
    allowed: Collection[str] = ("device", "threads"),
) -> Path | None:
    """Return the directory of the run that an argument names.

    Args:
        source: The argument: the directory of a run, or a model such as net.py:make.
        recipe_file: The file that --recipe names.
        options: All flags, by unique option name.
        allowed: The options that may be given beside a run.

    Returns:
        The directory; None if a model is named.

    Raises:
        ToolError: The argument names neither, or other arguments contradict a run.
    """
    if not source and not recipe_file:
        raise ToolError(
            "MODEL is missing: name the directory of a run, for example fishleg-run, or the function that "
            "returns the model, for example net.py:make"
        )
    if not source or (":" in source and not Path(source).is_dir()):
        return None
    directory = Path(source)
    if not directory.is_dir():
        raise ToolError(
            f"{source} is neither the directory of a run nor a model: "
            "a model must be file.py:function or package.module:function"
        )
    others = [flag_name(name) for name in flags_given(options) if name not in allowed]
    others += ["--recipe"] if recipe_file else []
    if others:
        raise ToolError(
            f"the run in {source} names the model, its data and all options: leave out {others[0]}"
        )
    return directory


def say(message: str) -> None:
    """Print what a command is doing, on standard error.

    Args:
        message: The text.
    """
    click.echo(printable(message), err=True)
