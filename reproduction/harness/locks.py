"""Locks that divide the units of one result file among several processes."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CAN_LOCK = sys.platform != "win32"  # without locks, only one process may write to a result file
if CAN_LOCK:
    import fcntl


class UnitLocks:
    """One lock per unit of a result file. The operating system releases the locks of a process that ends.

    The locks hold among the processes of one user on one machine. The lock file is in the directory for
    temporary files.
    """

    def __init__(self, path: Path) -> None:
        name = hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:16]
        user = os.getuid() if hasattr(os, "getuid") else 0
        self._file = (Path(tempfile.gettempdir()) / f"fishleg-{user}-{name}.lock").open("ab")

    def __enter__(self) -> UnitLocks:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def take(self, key: str, *, wait: bool = False) -> bool:
        """Lock a unit. Returns False if another process holds the lock; `wait` waits for it instead."""
        if not CAN_LOCK:
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, _offset(key))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def release(self, key: str) -> None:
        if CAN_LOCK:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _offset(key))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock of the result file itself, to read it, add to it and write it."""
        self.take("", wait=True)
        try:
            yield
        finally:
            self.release("")


def _offset(key: str) -> int:
    """The byte of the lock file that belongs to a unit."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big")
