"""Reference runs whose weights and masks are hashed, to see whether a change of the code changes any bit.

The bits depend on the processor and on the build of torch: two machines, or two versions of torch, may round
differently. So this is a command (`python -m reproduction golden record FILE` and `compare FILE`), to be run
before and after a change on one machine, and not a test. reproduction/results/golden.json is such a record.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fishleg
from fishleg import FineTuningOptions
from fishleg.formats.results import write_json
from fishleg.workloads.registry import WORKLOADS

State = dict[str, Tensor]
Hashes = dict[str, dict[str, str]]
RIVALS = ("magnitude", "diagonal", "obert", "mfac", "kfac", "ekfac")
DISTILLED_SGD = FineTuningOptions(steps=15, optimizer="sgd", distill=True)
GRADUAL = {
    "api-gradual": (0.95, {"stages": 3, "fine_tuning": FineTuningOptions(steps=15)}),
    "api-gradual-sgd": (0.9, {"stages": 2, "fine_tuning": DISTILLED_SGD}),
    "api-gradual-obert": (0.9, {"stages": 2, "fine_tuning": FineTuningOptions(steps=15), "method": "obert"}),
}
COMMAND_LINES = {
    "cli-staged": "--sparsity 0.9",
    "cli-gradual": "--sparsity 0.95 --mode gradual --stages 3 --steps 15",
    "cli-2:4": "--pattern 2:4",
    "cli-rows": "--pattern rows --sparsity 0.4 --stages 3",
    "cli-max-drop": "--max-drop 1% --stages 4 --samples 64",
    "cli-max-flops": "--max-flops 30% --stages 2",
    "cli-obert": "--method obert --compensation sum --sparsity 0.8 --stages 2",
}


def runs() -> dict[str, Callable[[], State]]:
    """Every reference run by name; each returns the state of a pruned model."""
    found: dict[str, Callable[[], State]] = {
        "api-staged": lambda: _pruned(0.9),
        "api-one-shot": lambda: _pruned(0.8, mode="one-shot"),
        "api-2:4": lambda: _pruned(None, pattern="2:4"),
        "api-rows": lambda: _pruned(0.4, pattern="rows", stages=3),
        "api-block": lambda: _pruned(0.6, pattern="block:4", stages=2),
    }
    for method in RIVALS:
        found[f"api-{method}"] = lambda method=method: _pruned(0.8, method=method, stages=2)
    for name, (sparsity, options) in GRADUAL.items():
        found[name] = lambda sparsity=sparsity, options=options: _pruned(sparsity, mode="gradual", **options)
    found["attach"] = _attached
    for name, flags in COMMAND_LINES.items():
        found[name] = lambda flags=flags: _from_command_line(flags.split())
    found["resnet20-stage"] = _resnet20_stage
    return found


def _pruned(sparsity: float | None, **options: Any) -> State:
    workload = WORKLOADS["digits"]
    calibration, _, _ = workload.data()
    pruned = fishleg.prune(workload.model(True), calibration, sparsity, progress=lambda _: None, **options)
    return pruned.state_dict()


def _attached() -> State:
    """Pruned by `fishleg.attach` in a training loop."""
    calibration, training, _ = WORKLOADS["digits"].data()
    model = WORKLOADS["digits"].model(True).train()
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    sparsities = fishleg.schedule("exponential", 0.9, 3)
    fishleg.attach(model, calibration, optimizer, sparsities, every=10)
    for _, (x, y) in zip(range(35), training, strict=False):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.state_dict()


def _from_command_line(flags: Sequence[str]) -> State:
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fishleg", "prune", "workload:digits", "--out", f"{folder}/run"]
        command += ["--threads", "1", "--quiet", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command[2:])} failed:\n{done.stderr}")
        return load_file(f"{folder}/run/model.safetensors")


def _resnet20_stage() -> State:
    """One stage on a trained ResNet20 with CIFAR-10; needs $FISHLEG_DATA and $FISHLEG_RESNET20."""
    from reproduction.workloads.resnet20 import RESNET20

    model, (calibration, _, _) = RESNET20.model(True), RESNET20.data()
    pruned = fishleg.prune(model, calibration, 0.8, mode="one-shot", progress=lambda _: None)
    return pruned.state_dict()


def digest(state: State) -> dict[str, str]:
    """SHA-256 of all values, and of where they are not zero."""
    weights, masks = hashlib.sha256(), hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous()
        for found, content in ((weights, value), (masks, value != 0)):
            found.update(name.encode())
            found.update(content.numpy().tobytes())
    return {"weights": weights.hexdigest(), "masks": masks.hexdigest()}


def hashes(only: Sequence[str], progress: Callable[[str], None]) -> Iterator[tuple[str, dict[str, str]]]:
    """Name and hashes of every run, on one thread. A run whose data are missing is left out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, run in runs().items():
            if only and not name.startswith(tuple(only)):
                continue
            try:
                found = digest(run())
            except FileNotFoundError as error:
                progress(f"{name}: left out, {error}")
                continue
            yield name, found
    finally:
        torch.set_num_threads(threads)


def record(path: Path, only: Sequence[str], progress: Callable[[str], None]) -> Hashes:
    """Write the hashes of the runs."""
    found: Hashes = {}
    for name, made in hashes(only, progress):
        found[name] = made
        progress(f"{name}: weights {made['weights'][:12]}, masks {made['masks'][:12]}")
        write_json(path, found)
    return found


def compare(path: Path, only: Sequence[str], progress: Callable[[str], None]) -> list[str]:
    """The names of the runs whose hashes differ from those in the file."""
    expected: Hashes = json.loads(path.read_text("utf-8"))
    different = []
    for name, made in hashes(only, progress):
        if name not in expected:
            progress(f"{name}: not in {path.name}")
            continue
        parts = [part for part in made if made[part] != expected[name][part]]
        progress(f"{name}: {'other ' + ' and '.join(parts) if parts else 'the same bits'}")
        different += [name] if parts else []
    return different
