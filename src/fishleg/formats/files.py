"""Files that are written completely or not at all, that replace nothing by accident, and that follow no link.

This module does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import math
import os
import re
from pathlib import Path
from typing import Any

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
"""The flag with which opening a symbolic link is an error; 0 where there is none."""
PARTIAL = ".partial"
"""The ending of files that are being written."""
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_numbers = itertools.count()


def write_atomically(path: Path, data: bytes, *, new: bool = False) -> None:
    """Write a file completely or not at all.

    The data are written to a temporary file beside it, forced to disk, and renamed. The temporary file is
    created exclusively under a name that no other process and no other thread uses. A symbolic link at `path`
    is itself replaced; its target is not touched.

    Args:
        path: The file.
        data: Its content.
        new: Whether the file must not exist yet; a FileExistsError is raised then instead of replacing it.
    """
    file, temporary = _create_beside(path)
    try:
        with os.fdopen(file, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
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


def _create_beside(path: Path) -> tuple[int, Path]:
    """Create a temporary file that did not exist.

    Returns:
        The open file and its path.
    """
    while True:
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{next(_numbers)}{PARTIAL}")
        with contextlib.suppress(FileExistsError):  # left by a killed process that had the same number
            return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW, 0o666), temporary


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


def remove_leftovers(directory: Path, names: tuple[str, ...] | list[str]) -> None:
    """Remove the temporary files that a killed process has left behind.

    Args:
        directory: A directory that no other process writes to now.
        names: The names of the files that were being written.
    """
    for name in names:
        for leftover in directory.glob(f".{_escaped(name)}.*{PARTIAL}"):
            if re.fullmatch(rf"\.{re.escape(name)}\.\d+-\d+{re.escape(PARTIAL)}", leftover.name):
                leftover.unlink(missing_ok=True)


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def to_json(value: Any, *, indent: int | None = 1) -> str:
    """Return a value as JSON. NaN and infinities, which JSON does not have, become null.

    >>> to_json({"loss": float("nan"), "steps": [1, 2]}, indent=None)
    '{"loss": null, "steps": [1, 2]}'

    Args:
        value: A value that JSON can represent.
        indent: The indentation; None: everything on one line.

    Returns:
        The text; lists of plain values stand on one line.
    """
    text = json.dumps(_finite(value), indent=indent, allow_nan=False)
    # JSON strings hold no raw line break, so this changes only the layout.
    return re.sub(r"\[\n[^\[\]{}]*\n *\]", lambda found: re.sub(r"\n *", " ", found[0]), text)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def write_json(path: Path, value: Any, *, new: bool = False) -> None:
    """Write a JSON file completely or not at all.

    Args:
        path: The file.
        value: A value that JSON can represent.
        new: Whether the file must not exist yet.
    """
    write_atomically(path, f"{to_json(value)}\n".encode(), new=new)


def write_figure(path: Path, figure: Any, *, new: bool = False) -> None:
    """Write a picture completely or not at all.

    Args:
        path: The file; its ending gives the format.
        figure: A figure of matplotlib.
        new: Whether the file must not exist yet.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix[1:].lower(), dpi=130)
    write_atomically(path, buffer.getvalue(), new=new)


def foreign_file(results: Path, maker: str, *others: Path) -> Path | None:
    """Find a file that a command would replace and that is not from an earlier call of it.

    Args:
        results: The JSON file in which the command names itself under "made_by".
        maker: That name.
        others: Files that it writes beside it.

    Returns:
        The first such file; None if all may be written.
    """
    try:
        content = json.loads(results.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        content = None
    if isinstance(content, dict) and content.get("made_by") == maker:
        return None
    return next((path for path in (results, *others) if os.path.lexists(path)), None)
