"""Runs of the command line in child processes whose file system fails at a chosen moment."""

import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from click.testing import CliRunner
from killing import in_child

from fishleg.cli.commands import main
from fishleg.runs.directory import RUN, read_record
from fishleg.runs.recipe import Recipe

Action = Callable[[Path], None]


@dataclass(frozen=True)
class Ended:
    """How a command has ended."""

    code: int
    output: str

    @property
    def told(self) -> bool:
        """Whether a failure was one clear message, and a success needs none."""
        errors = [line for line in self.output.splitlines() if line.startswith("error: ")]
        return "Traceback" not in self.output and (self.code == 0 or (self.code == 1 and len(errors) == 1))


def failing(number: int) -> Action:
    def fail(_: Path) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def linking(name: str, target: Path) -> Action:
    """Put a link to a file of the user's where the run has, or will have, a file."""

    def link(directory: Path) -> None:
        path = directory / name
        if path.is_dir() and not path.is_symlink():
            return
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return link


def removing(directory: Path) -> None:
    shutil.rmtree(directory)


def slow(_: Path) -> None:
    time.sleep(0.05)


FAULTS: dict[str, Action] = {
    "full": failing(errno.ENOSPC),
    "read-only": failing(errno.EROFS),
    "broken": failing(errno.EIO),
    "removed": removing,
    "slow": slow,
}


def fail_in_call(name: str, at: int, action: Action, directory: Path, *, for_good: bool = False) -> None:
    """From now on, the at-th call of os.name has the fault; with `for_good`, every call after it as well."""
    function, count = getattr(os, name), 0

    def faulty(*arguments: object, **more: object) -> object:
        nonlocal count
        count += 1
        if count == at or (for_good and count > at):
            action(directory)
        return function(*arguments, **more)

    setattr(os, name, faulty)


def command(
    recipe: Recipe, base: Path, before: Callable[[], None] = lambda: None, *, write_recipe: bool = True
) -> Ended:
    """Start the run or go on with it by the command line, in a process of its own."""
    directory = base / recipe.run.out
    with tempfile.NamedTemporaryFile() as answer:

        def act() -> None:
            os.chdir(base)
            torch.set_num_threads(1)
            if write_recipe:
                (base / "recipe.toml").write_text(recipe.to_toml())
            going_on = (directory / RUN).exists()
            line = ["resume", str(directory)] if going_on else ["prune", "--recipe", "recipe.toml"]
            before()
            result = CliRunner().invoke(main, [*line, "--quiet"])
            Path(answer.name).write_text(json.dumps([result.exit_code, result.output]))

        code = in_child(act)
        assert code == 0, "the test itself has failed"
        return Ended(*json.loads(Path(answer.name).read_text()))


def finish(recipe: Recipe, base: Path) -> Ended:
    """Go on, on a sound file system, until the run is finished."""
    directory = base / recipe.run.out
    if (directory / RUN).exists() and read_record(directory)["status"] == "finished":
        return Ended(0, "")
    return command(recipe, base)
