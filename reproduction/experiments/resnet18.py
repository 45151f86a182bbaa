"""All that docs/reproduction.md reports of ResNet18 on one dataset, on two cores, and how long it takes.

`FISHLEG_DATA=DIR python experiments/resnet18.py cifar10 --out paper-out`, or `tiny-imagenet`: some two hours.
Two processes of one thread each go through the same experiments from opposite ends and take the units that
are left, so that neither waits for the other's last unit. A stopped run goes on where it
was.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

from reproduction.paper.config import REPORTED, load
from reproduction.paper.dense import load_data


def run_in_order(experiments: list[tuple[str, str]], out: Path, failures: list[str]) -> None:
    """One process after the other; stops at the first that fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    for name, config in experiments:
        command = [sys.executable, "-m", "fishleg", "reproduce", name, "--config", config, "--out", str(out)]
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            failures.append(f"{' '.join(command[2:])}: exit code {done.returncode}")
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("dataset", choices=REPORTED)
    parser.add_argument("--out", type=Path, default=Path("paper-out"), help="directory of the results")
    given = parser.parse_args()
    experiments, out = REPORTED[given.dataset], given.out
    try:
        load_data(load(given.dataset), None, print, download=True)
    except (FileNotFoundError, ConnectionError, ValueError) as error:
        parser.exit(1, f"error: {error}\n")
    start, failures = time.perf_counter(), list[str]()
    workers = [
        threading.Thread(target=run_in_order, args=(order, out, failures))
        for order in (experiments, experiments[::-1])
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{given.dataset}: {seconds / 3600:.2f} hours, {(used.ru_utime + used.ru_stime) / 3600:.2f} of CPU")
    for failure in failures:
        print(failure, file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
