"""The directory of a run: the names of its files, its record, its lock, and whose files they are.

A run owns the names of `FILES`. A new run takes a directory only if none of them is there, and writes its
record first of all. From then on files of these names are its own, and it never touches a file of another
name.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fishleg.formats.files import NO_FOLLOW
from fishleg.runs.errors import ToolError

try:
    import fcntl
except ImportError:  # on Windows there is no lock, and two processes on one run are not detected
    fcntl = None  # type: ignore[assignment]


RUN, RECIPE, DENSE, CHECKPOINTS = "run.json", "recipe.toml", "dense.ckpt", "checkpoints"
MODEL, PACKED, SMALL, REPORT = "model.safetensors", "packed.safetensors", "small.safetensors", "report.html"
LOG, LOG_TABLE, TENSORBOARD, WANDB = "log.jsonl", "log.csv", "tensorboard", "wandb"
LOCK = ".fishleg.lock"
FILES = (
    RUN, RECIPE, DENSE, CHECKPOINTS, MODEL, PACKED, SMALL, REPORT, LOG, LOG_TABLE, TENSORBOARD, WANDB,
)  # fmt: skip
"""Every name that a run may write, beside its empty lock file."""
_MOST_RECORD_BYTES = 1 << 28
_claimed_here = threading.Lock()
_claims: set[Path] = set()  # directories that runs of this process work on


def check_unused(directory: Path) -> None:
    """Check that a new run can write to a directory without overwriting anything.

    Args:
        directory: The directory; it need not exist.

    Raises:
        ToolError: It holds a run or a file of a run's names already, or it cannot be written to.
    """
    try:
        os.lstat(directory)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # such as a name that is too long
        raise ToolError(f"out: {directory} cannot be written: {error.strerror or error}") from None
    taken = [name for name in FILES if os.path.lexists(directory / name)]
    if RUN in taken:
        raise ToolError(_occupied(directory, read_record(directory)))
    parent = next(p for p in (directory, *directory.parents) if p.exists())
    if not parent.is_dir():
        raise ToolError(f"out: {directory} cannot be written, {parent} is a file, not a directory")
    if taken:
        raise ToolError(
            f"out: {directory} holds {taken[0]}, which is not of a run and which a run would overwrite: "
            "choose another directory (--out NAME)"
        )
    if not os.access(parent, os.W_OK):
        raise ToolError(f"out: {directory} cannot be written, {parent} is read-only")


def _occupied(directory: Path, record: dict[str, Any]) -> str:
    """Return why a new run cannot take the directory of another one, and what to do."""
    status, error = record.get("status"), record.get("error")
    end = "choose another directory (--out NAME), or delete this one"
    if status == "failed":
        cause = f"mend the cause and continue it (fishleg resume {directory})"
        return f"{directory} holds a run already (failed: {error}): {cause}, {end}"
    if status != "finished":
        end = f"continue it (fishleg resume {directory}), {end}"
    return f"{directory} holds a run already ({status}): {end}"


def check_no_links(directory: Path) -> None:
    """Check that no file of a run is a symbolic link, which could lead a run to files that are not its own.

    Args:
        directory: The directory of the run.

    Raises:
        ToolError: There is a link.
    """
    link = next((name for name in (*FILES, LOCK) if (directory / name).is_symlink()), None)
    if link is not None:
        raise ToolError(
            f"{directory / link} is a symbolic link, which a run neither follows nor replaces: "
            "put the file itself there"
        )


def read_record(directory: Path) -> dict[str, Any]:
    """Return the record of a run.

    Args:
        directory: The directory of the run.

    Returns:
        The content of run.json.

    Raises:
        ToolError: There is no run.json, or it cannot be read.
    """
    path = directory / RUN
    record = None
    try:
        if stat.S_ISREG(path.stat().st_mode) and path.stat().st_size <= _MOST_RECORD_BYTES:
            record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ToolError(f"there is no run in {directory} (no {RUN})") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ToolError(f"{path} cannot be read: {error}") from None
    if not isinstance(record, dict):
        raise ToolError(f"{path} holds no record of a run")
    return record


@contextlib.contextmanager
def claimed(directory: Path, *, new: bool) -> Iterator[None]:
    """Hold the directory of a run inside the `with` block, so that no second process works on it.

    The operating system releases the lock when the process ends, however it ends. If nothing was written by
    the end of the block, the lock file and the directories that were made for it are removed.

    Args:
        directory: The directory. It is made if it does not exist and the run is new.
        new: Whether the run is new. The directory is checked again then, because another process may have
            used it in the meantime.

    Yields:
        Nothing.

    Raises:
        ToolError: Another run holds the directory, or it is in use.
    """
    with _claimed_here:
        if directory in _claims:  # a lock of the operating system belongs to the whole process
            raise ToolError(f"another run of this process is working on {directory}")
        _claims.add(directory)
    try:
        with _locked(directory, new):
            yield
    finally:
        with _claimed_here:
            _claims.discard(directory)


@contextlib.contextmanager
def _locked(directory: Path, new: bool) -> Iterator[None]:
    """Lock a directory against other processes.

    Yields:
        Nothing.
    """
    made = _make_directories(directory) if new else []
    try:
        file = _open_lock(directory / LOCK)
        try:
            (check_unused if new else check_no_links)(directory)
            yield
        finally:
            if not os.path.lexists(directory / RUN):
                with contextlib.suppress(OSError):
                    (directory / LOCK).unlink()
            os.close(file)
    finally:
        for folder in reversed(made):
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


def _make_directories(directory: Path) -> list[Path]:
    missing = [p for p in (directory, *directory.parents) if not p.exists()][::-1]
    for count, folder in enumerate(missing):
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            for made in reversed(missing[:count]):
                with contextlib.suppress(OSError):
                    made.rmdir()
            raise ToolError(f"out: {directory} cannot be made: {error.strerror or error}") from None
    return missing


def _open_lock(path: Path) -> int:
    """Open and lock the lock file.

    Returns:
        The open file; closing it releases the lock.

    Raises:
        ToolError: Another process holds the lock, or the file is not a lock of this program.
    """
    busy = ToolError(f"another process is working on {path.parent}")
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o666)
    except OSError as error:
        raise ToolError(f"cannot lock {path.parent}: {path.name}: {error.strerror or error}") from None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size:
            raise ToolError(
                f"{path} is not a lock of fishleg: move it away, or choose another directory (--out NAME)"
            )
        if fcntl is not None:
            # not flock: DataLoader workers inherit such a lock and outlive a killed run by seconds
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(found, os.stat(path)):  # its owner has removed it at its end
                raise busy
    except BaseException as error:
        os.close(file)
        raise (busy if isinstance(error, OSError) else error) from None
    return file
