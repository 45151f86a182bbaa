"""Files that are written completely or not at all, and read only up to a limit. Does not import torch."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
"""The flag with which opening a symbolic link is an error; 0 where there is none."""
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_TOKEN = 16  # hexadecimal digits in the name of a temporary file


def write_atomically(path: Path, data: bytes, *, new: bool = False) -> None:
    """Write a file completely or not at all. An OSError names the file.

    The data are written to a new file `.NAME.TOKEN.partial`, forced to disk, and renamed over the old file.
    That file is created exclusively under a random name, so no link is followed and nothing that this call
    did not create is changed or deleted; a symbolic link at the name of the file is replaced itself, and its
    target stays as it is. What a killed process left behind is deleted by `remove_leftovers`.

    Args:
        path: The file.
        data: Its content.
        new: Whether the file must not exist yet; a FileExistsError is raised then instead of replacing it.

    Raises:
        OSError: It cannot be written.
    """
    try:
        _write(path, data, new)
    except OSError as error:
        raise type(error)(error.errno, error.strerror or str(error), str(path)) from error


def _write(path: Path, data: bytes, new: bool) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(_TOKEN // 2)}.partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW | getattr(os, "O_BINARY", 0)
    descriptor = os.open(temporary, flags, 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if new:
            _rename_exclusively(temporary, path)
        else:
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # force the rename to disk; not every file system supports this
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _rename_exclusively(source: Path, target: Path) -> None:
    try:
        os.link(source, target)  # unlike a rename, this does not replace a file
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        with open(target, "xb"):  # takes the name
            pass
        try:
            os.replace(source, target)
        except BaseException:
            target.unlink()
            raise
    else:
        source.unlink()


def remove_leftovers(paths: Iterable[Path]) -> None:
    """Delete temporary files that `write_atomically` left behind because its process was killed.

    Only the owner of the files may call this, while no other process writes them.

    Args:
        paths: The files whose temporary files are deleted.
    """
    by_folder: dict[Path, set[str]] = {}
    for path in paths:
        by_folder.setdefault(path.parent, set()).add(path.name)
    for folder, names in by_folder.items():
        if folder.is_dir():
            for found in folder.glob(".*.partial"):
                name = re.fullmatch(rf"\.(.+)\.[0-9a-f]{{{_TOKEN}}}\.partial", found.name, re.DOTALL)
                if name is not None and name[1] in names:
                    found.unlink(missing_ok=True)


def check_regular(path: Path) -> None:
    """Check that a path names a regular file: reading a device or a pipe may never end.

    Args:
        path: The file. Links are followed.

    Raises:
        OSError: It does not exist, or is a directory, a device or a pipe.
    """
    _check_mode(os.stat(path).st_mode)


def read_limited(path: Path, limit: int) -> bytes:
    """Read a regular file of limited size.

    Args:
        path: The file. Links are followed.
        limit: The largest size in bytes.

    Returns:
        Its content.

    Raises:
        OSError: It cannot be read, is no regular file, or is larger.
    """
    # without O_NONBLOCK, opening a pipe waits for a writer
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb") as file:
        _check_mode(os.fstat(descriptor).st_mode)
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(f"it is larger than {limit:,} bytes")
    return data


def _check_mode(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError("it is not a regular file")
