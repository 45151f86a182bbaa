"""The directory of a run: what its files are called, who may use it, what its record says."""

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
except ImportError:  # not on Windows: there, two processes on one run are not noticed
    fcntl = None  # type: ignore[assignment]


RUN, RECIPE, DENSE, LOCK, CHECKPOINTS = "run.json", "recipe.toml", "dense.ckpt", "lock", "checkpoints"
MODEL, PACKED, REPORT, LOG = "model.safetensors", "packed.safetensors", "report.html", "log.jsonl"
SMALL = "small.safetensors"


def check_unused(directory: Path) -> None:
    """A directory that holds a run is never overwritten."""
    try:
        used = (directory / RUN).exists()
    except OSError as error:  # such as a name that is too long
        raise ToolError(f"out: {directory} cannot be written: {error.strerror or error}") from None
    if used:
        status = read_record(directory).get("status")
        go_on = "" if status == "finished" else f", go on with it (fishleg resume {directory})"
        raise ToolError(f"{directory} holds a run already ({status}): choose another out{go_on} or delete it")
    parent = next(p for p in (directory, *directory.parents) if p.exists())
    if not parent.is_dir():
        raise ToolError(f"out: {directory} cannot be written, {parent} is a file, not a directory")
    written = [MODEL, PACKED, REPORT]
    if not (directory / DENSE).exists():  # else it is a run of ours that was killed before it had a record
        written.append(RECIPE)
    taken = [name for name in written if (directory / name).exists()]
    if taken:
        raise ToolError(f"out: {directory} holds {taken[0]}, which a run would overwrite: choose another out")
    if not os.access(parent, os.W_OK):
        raise ToolError(f"out: {directory} cannot be written, {parent} is read-only")


def read_record(directory: Path) -> dict[str, Any]:
    """The run.json of a directory."""
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
    """Two processes must not work on one run; the lock goes with the process, however it ends."""
    with open(path, "a") as file:
        if fcntl is not None:
            try:
                # not flock: workers of a DataLoader would inherit that, and outlive a killed run for seconds
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ToolError(f"another process is working on {path.parent}") from None
        yield
