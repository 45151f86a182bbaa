"""New files that the user has named: errors say what is wrong with the name."""

from __future__ import annotations

import os
from pathlib import Path

from fishleg.formats.files import write_atomically


def check_new_file(path: Path) -> None:
    """Check that a new file can be written.

    Args:
        path: The file.

    Raises:
        ValueError: If there is a file or a link of that name, or its directory cannot be written to.
    """
    if not path.name:
        raise ValueError(f"{str(path)!r} does not name a file")
    try:
        path.lstat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path} cannot be written: {reason}") from None
    else:
        raise ValueError(f"{path} is there already and is not written over: delete it or choose another name")
    parent = path.parent
    if not parent.is_dir():
        raise ValueError(f"{path} cannot be written, its directory does not exist")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"{path} cannot be written, {parent} is read-only")


def write_new_file(path: Path, data: bytes) -> None:
    """Write a new file: under its name it appears when it is complete.

    Args:
        path: The file. A symbolic link of this name is not followed.
        data: Its content.

    Raises:
        ValueError: If the file exists, or cannot be written. Nothing is left behind.
    """
    try:
        write_atomically(path, data, new=True)
    except FileExistsError:
        raise ValueError(f"{path} is there already and is not written over") from None
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error
