"""The cost of FishLeg steps and of auxiliary steps, in SGD steps.

ResNet20, batch 128. All variants take turns in one process, so that a noisy machine slows them alike. The
numbers are ratios of medians over the rounds, not times.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from fishleg import FishLeg
from fishleg.formats.results import write_json
from reproduction.workloads.networks import resnet20

Step = Callable[[], object]


def trainer(k: int | None, x: Tensor, y: Tensor) -> tuple[Step, torch.optim.Optimizer]:
    """One training step of SGD (k None), or of FishLeg with an auxiliary step at every k-th."""
    torch.manual_seed(0)
    model = resnet20().to(memory_format=torch.channels_last)
    optimizer: torch.optim.Optimizer
    if k is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    else:
        optimizer = FishLeg(model, lr=0.01, update_every=k)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step, optimizer


def variants_of(batch: int) -> dict[str, tuple[Step, int]]:
    """What is timed, and how many steps each consists of. The warm start of Q is over."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 3, 32, 32, generator=generator).contiguous(memory_format=torch.channels_last)
    y = torch.randint(10, (batch,), generator=generator)
    sgd, _ = trainer(None, x, y)
    every_step, fishleg_1 = trainer(1, x, y)
    every_tenth, _ = trainer(10, x, y)
    assert isinstance(fishleg_1, FishLeg)
    print("warming up: until the warm start of Q is over", flush=True)
    for _ in range(fishleg_1.warmup + 2):
        every_step()
        every_tenth()

    def ten_steps(step: Step) -> Step:
        return lambda: [step() for _ in range(10)] and None

    return {
        "SGD step": (sgd, 1),
        "SGD step, of ten in a row": (ten_steps(sgd), 10),
        "auxiliary step": (lambda: fishleg_1.auxiliary.step((x, y)), 1),
        "FishLeg step, k=1": (every_step, 1),
        "FishLeg step, k=10": (ten_steps(every_tenth), 10),
    }


def main(out: Path, rounds: int = 20, batch: int = 128) -> None:
    variants = variants_of(batch)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(rounds):
        for name, (run, count) in variants.items():
            started = time.perf_counter()
            run()
            seconds[name].append((time.perf_counter() - started) / count)
        if (i + 1) % 5 == 0:
            print(f"round {i + 1} of {rounds}", flush=True)
    # ten steps in a row are compared with ten in a row: before a single step, other variants fill the caches
    single, row = (statistics.median(seconds[name]) for name in list(variants)[:2])
    ratios = {
        name: statistics.median(values) / (single if variants[name][1] == 1 else row)
        for name, values in seconds.items()
    }
    for name, ratio in ratios.items():
        print(f"{name:<20} {ratio:.3f} SGD steps")
    result = {
        "ratios": ratios,
        "rounds": rounds,
        "batch": batch,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "cost.json", result)
    print(f"wrote {out / 'cost.json'}")
