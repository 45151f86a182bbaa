"""Several processes at one experiment: who does which unit, and how they are started."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_LOCKS = sys.platform != "win32"  # there nothing is locked, and there must be one process at a time
if _LOCKS:
    import fcntl


class Claims:
    """Locks on the units of one file: given back when a process ends, however it ends.

    They hold among the processes of one user on one machine (they lie in the directory for temporary files).
    """

    def __init__(self, path: Path) -> None:
        name = hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:16]
        user = os.getuid() if hasattr(os, "getuid") else 0
        self._file = (Path(tempfile.gettempdir()) / f"fishleg-{user}-{name}.lock").open("ab")

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def take(self, key: str, *, wait: bool = False) -> bool:
        """Whether the unit is this process's now; with `wait`, it is as soon as no other one has it."""
        if not _LOCKS:
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, _place(key))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def release(self, key: str) -> None:
        if _LOCKS:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _place(key))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One process at a time reads the results, adds to them and writes them."""
        self.take("", wait=True)
        try:
            yield
        finally:
            self.release("")


def _place(key: str) -> int:
    """The byte of the lock file that stands for a unit."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big")


def run_workers(arguments: Sequence[str], jobs: int) -> int:
    """`jobs` processes of `fishleg ARGUMENTS`, which share the cores and, by their claims, the units.

    Returns 0, or the exit code of one that failed; the others may have done its share.
    """
    if not _LOCKS:
        raise ValueError(f"jobs must be 1 on Windows, got {jobs}")
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    command = [sys.executable, "-m", "fishleg", *arguments]
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(jobs):
            workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        codes = [worker.wait() for worker in workers]
    except BaseException:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()
        raise
    return next(filter(None, codes), 0)
