"""All runs with ResNet18 that docs/reproduction.md reports of one dataset, on two cores: about two hours.

Two processes of one thread each go through the same experiments from opposite ends, so that neither waits for
the last unit of the other. A stopped run goes on where it stopped.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

from reproduction.figures.resnet18.config import REPORTED, load
from reproduction.figures.resnet18.dense import load_data
from reproduction.harness import Progress, limit_threads


def run(dataset: str, out: Path, progress: Progress = print) -> list[str]:
    """Run them; returns a line for every process that failed."""
    load_data(load(dataset), None, progress, download=True)
    start, failures = time.perf_counter(), list[str]()
    workers = [
        threading.Thread(target=_run_in_order, args=(order, out, failures))
        for order in (REPORTED[dataset], REPORTED[dataset][::-1])
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = used.ru_utime + used.ru_stime
    progress(f"{dataset}: {seconds / 3600:.2f} hours, {cpu_seconds / 3600:.2f} CPU hours")
    return failures


def _run_in_order(experiments: list[tuple[str, str]], out: Path, failures: list[str]) -> None:
    """One process after the other; stops at the first that fails."""
    for name, config in experiments:
        arguments = ["reproduction", "figure", name, "--config", config, "--out", str(out)]
        command = [sys.executable, "-m", *arguments]
        done = subprocess.run(command, env=limit_threads(1), stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            failures.append(f"{' '.join(arguments)}: exit code {done.returncode}")
            return
