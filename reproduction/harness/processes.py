"""Start processes: several that share the units of an experiment, or one that measures its own cost."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from reproduction.harness.locks import CAN_LOCK


def run_workers(arguments: Sequence[str], jobs: int) -> int:
    """Run `jobs` processes of `python -m reproduction ARGUMENTS`, which share the cores and the units.

    Returns 0, or the exit code of a process that failed. The others may have done its units.
    """
    if not CAN_LOCK:
        raise ValueError(f"jobs must be 1 on Windows, got {jobs}")
    environment = limit_threads(max(1, (os.cpu_count() or 1) // jobs))
    command = [sys.executable, "-m", "reproduction", *arguments]
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


def limit_threads(count: int) -> dict[str, str]:
    """The environment of a process that uses `count` threads for its computations."""
    return {**os.environ, "OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count)}


def run_measured(run: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """The result of `run(*arguments)` from a new process, with its own seconds, CPU seconds and peak memory.

    `run` must be a function of a module, so that the new process can import it.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(sender, run, arguments))
    process.start()
    sender.close()
    try:
        result: dict[str, Any] = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"{run.__module__}.{run.__name__} ended with code {process.exitcode}") from None
    finally:
        process.join()
    return result


def _measure(sender: Any, run: Callable[..., dict[str, Any]], arguments: Sequence[Any]) -> None:
    """In the new process: run, measure, send."""
    import resource  # which Windows does not have

    started, cpu = time.perf_counter(), time.process_time()
    result = run(*arguments)
    result["seconds"] = round(time.perf_counter() - started, 1)
    result["cpu_seconds"] = round(time.process_time() - cpu, 1)
    result["peak_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    sender.send(result)
    sender.close()
