"""The directory of a run: the names of its files, its record, and its lock."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fishleg.runs.errors import ToolError

try:
    import fcntl
except ImportError:  # on Windows there is no lock, and two processes on one run are not detected
    fcntl = None  # type: ignore[assignment]


RUN, RECIPE, DENSE, LOCK, CHECKPOINTS = "run.json", "recipe.toml", "dense.ckpt", "lock", "checkpoints"
MODEL, PACKED, REPORT, LOG = "model.safetensors", "packed.safetensors", "report.html", "log.jsonl"
SMALL = "small.safetensors"


def check_unused(directory: Path) -> None:
    """Check that a new run can write to a directory without overwriting anything.

    Args:
        directory: The directory; it need not exist.

    Raises:
        ToolError: It holds a run or files of that name already, or it cannot be written to.
    """
    try:
        used = (directory / RUN).exists()
    except OSError as error:  # such as a name that is too long
        raise ToolError(f"out: {directory} cannot be written: {error.strerror or error}") from None
    if used:
        status = read_record(directory).get("status")
        other = "" if status == "finished" else f", continue it (fishleg resume {directory})"
        raise ToolError(f"{directory} holds a run already ({status}): choose another out{other} or delete it")
    parent = next(p for p in (directory, *directory.parents) if p.exists())
    if not parent.is_dir():
        raise ToolError(f"out: {directory} cannot be written, {parent} is a file, not a directory")
    written = [MODEL, PACKED, REPORT]
    if not (directory / DENSE).exists():  # otherwise a run was killed here before it wrote its record
        written.append(RECIPE)
    taken = [name for name in written if (directory / name).exists()]
    if taken:
        raise ToolError(f"out: {directory} holds {taken[0]}, which a run would overwrite: choose another out")
    if not os.access(parent, os.W_OK):
        raise ToolError(f"out: {directory} cannot be written, {parent} is read-only")


def read_record(directory: Path) -> dict[str, Any]:
    """Return the record of a run.

    Args:
        directory: The directory of the run.

    Returns:
        The content of run.json.

    Raises:
        ToolError: There is no run.json, or it cannot be read.
    """
    try:
        record = json.loads((directory / RUN).read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise ToolError(f"there is no run in {directory} (no {RUN})") from None
    except (OSError, ValueError) as error:
        raise ToolError(f"{directory / RUN} cannot be read: {error}") from None
    if not isinstance(record, dict):
        raise ToolError(f"{directory / RUN} holds no record of a run")
    return record


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a run inside the `with` block, so that no second process works on it.

    The operating system releases the lock when the process ends, however it ends.

    Args:
        path: The lock file.

    Yields:
        Nothing.

    Raises:
        ToolError: Another process holds the lock.
    """
    with open(path, "a") as file:
        if fcntl is not None:
            try:
                # not flock: DataLoader workers inherit such a lock and outlive a killed run by seconds
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ToolError(f"another process is working on {path.parent}") from None
        yield
