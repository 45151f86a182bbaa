"""All that docs/reproduction.md reports of ResNet18 on one dataset, on two cores, and how long it takes.

`FISHLEG_DATA=DIR python experiments/resnet18.py cifar10 --out paper-out`, or `tiny-imagenet`: some two hours.
Two processes of one thread each go through the same experiments from opposite ends and take the units that
are left, so that none waits for a dense model or for the other's last unit. A stopped run goes on where it
was. `timing-DATASET.json` has wall-clock and CPU seconds of a run that started from nothing, only of such.
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

from fishleg.checkpoint import write_json
from fishleg.paper.config import load
from fishleg.paper.dense import load_data

EXPERIMENTS = {
    "cifar10": [
        ("unstructured", "cifar10"),
        ("semi_structured", "cifar10"),
        ("unstructured", "cifar10-preset"),
        ("unstructured", "cifar10-obs16"),
        ("unstructured", "cifar10-short"),
        ("semi_structured", "cifar10-short"),
    ],
    "tiny-imagenet": [
        ("unstructured", "tiny-imagenet"),
        ("semi_structured", "tiny-imagenet"),
        ("unstructured", "tiny-imagenet-obs16"),
        ("unstructured", "tiny-imagenet-preset"),
        ("semi_structured", "tiny-imagenet-preset"),
    ],
}


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
    parser.add_argument("dataset", choices=EXPERIMENTS)
    parser.add_argument("--out", type=Path, default=Path("paper-out"), help="directory of the results")
    given = parser.parse_args()
    experiments, out = EXPERIMENTS[given.dataset], given.out
    try:
        load_data(load(given.dataset), None, print, download=True)
    except (FileNotFoundError, ConnectionError, ValueError) as error:
        parser.exit(1, f"error: {error}\n")
    # the dense models are units, too: where none is there, nothing is
    from_nothing = not list(out.glob(f"dense-{given.dataset}-*.pt"))
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
    if from_nothing and not failures:
        timing = {"seconds": seconds, "cpu_seconds": used.ru_utime + used.ru_stime, "processes": len(workers)}
        write_json(out / f"timing-{given.dataset}.json", timing)
    for failure in failures:
        print(failure, file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
