"""What the pruning benchmarks share: the trained ResNet20, accuracy, and units that are kept when done.

A unit is one (method, seed) run. It runs in a process of its own, so that its CPU seconds and peak memory are
its own too, and its result is in the JSON file before the next one starts: a stopped benchmark goes on where
it was.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.workloads.digits import normalize
from reproduction.workloads.datasets import cifar10, data_directory
from reproduction.workloads.networks import resnet20

RESULTS = Path(__file__).parent / "results"
Unit = dict[str, Any]


def trained_resnet20() -> nn.Module:
    """The ResNet20 whose state lies at $FISHLEG_RESNET20 or in the data directory, in evaluation mode."""
    path = Path(os.environ.get("FISHLEG_RESNET20") or data_directory() / "resnet20-cifar10.pt")
    if not path.is_file():
        raise SystemExit(f"no trained ResNet20 at {path}: point FISHLEG_RESNET20 at its state dict")
    model = resnet20()
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval().to(memory_format=torch.channels_last)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Per cent of images (uint8) that are classified rightly."""
    model.eval()
    parts = zip(images.split(500), labels.split(500), strict=True)
    return 100 * sum(int((model(normalize(x)).argmax(1) == y).sum()) for x, y in parts) / len(labels)


def test_accuracy(model: nn.Module) -> float:
    """On all 10 000 test images of CIFAR-10."""
    return accuracy(model, *cifar10("test"))


def run_unit(run: Callable[[Unit], dict[str, Any]], unit: Unit, out: Path) -> None:
    """In the child: run one unit and write what it returned, with what it cost."""
    started, cpu = time.perf_counter(), time.process_time()
    result = {**unit, **run(unit)}
    result["seconds"] = round(time.perf_counter() - started, 1)
    result["cpu_seconds"] = round(time.process_time() - cpu, 1)
    result["peak_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    out.write_text(json.dumps(result))


def run_units(name: str, units: list[Unit], run: Callable[[Unit], dict[str, Any]]) -> list[dict[str, Any]]:
    """Every unit that is not in results/NAME.json yet, each in its own process; all results, in order.

    The script is called again with `--unit JSON --unit-out FILE`, which this function answers itself.
    """
    if "--unit" in sys.argv:
        place = sys.argv.index("--unit")
        run_unit(run, json.loads(sys.argv[place + 1]), Path(sys.argv[place + 3]))
        raise SystemExit(0)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    results = [] if "--again" in sys.argv or not path.exists() else json.loads(path.read_text())
    done = 0
    for i, unit in enumerate(units):
        if find(results, unit) is not None:
            continue
        print(f"[{i + 1}/{len(units)}] {describe(unit)}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "result.json"
            command = [sys.executable, sys.argv[0], "--unit", json.dumps(unit), "--unit-out", str(out)]
            subprocess.run(command, check=True)
            # another process may have added units of its own meanwhile: read again before writing
            fresh = "--again" in sys.argv and not done
            results = [] if fresh or not path.exists() else json.loads(path.read_text())
            done += 1
            results.append(json.loads(out.read_text()))
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(results, indent=1) + "\n")
        temporary.replace(path)
    return [result for unit in units if (result := find(results, unit)) is not None]


def find(results: list[dict[str, Any]], unit: Unit) -> dict[str, Any] | None:
    """The result of a unit, if it is there."""
    return next((r for r in results if all(r.get(key) == value for key, value in unit.items())), None)


def describe(unit: Unit) -> str:
    return ", ".join(f"{key}={value}" for key, value in unit.items())


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
