"""What a step costs, in SGD steps: `python benchmarks/cost.py`.

ResNet20, batch 128. All variants take turns in one process, so that a noisy machine slows them alike; the
figures are ratios of medians over the rounds, never times.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from fishleg import FishLeg
from reproduction.workloads.networks import resnet20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cost.json")
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(arguments.batch, 3, 32, 32, generator=generator).contiguous(
        memory_format=torch.channels_last
    )
    y = torch.randint(10, (arguments.batch,), generator=generator)

    def trainer(k: int | None) -> tuple[Callable[[], None], torch.optim.Optimizer]:
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

    sgd, _ = trainer(None)
    every_step, fishleg_1 = trainer(1)
    every_tenth, fishleg_10 = trainer(10)
    assert isinstance(fishleg_1, FishLeg)
    assert isinstance(fishleg_10, FishLeg)

    def ten_steps(step: Callable[[], None]) -> Callable[[], None]:
        return lambda: [step() for _ in range(10)] and None

    print("warming up: past the warm start of Q, where a step costs what it costs for good", flush=True)
    for _ in range(fishleg_1.warmup + 2):
        every_step()
        every_tenth()
    variants: dict[str, tuple[Callable[[], object], int]] = {
        "SGD step": (sgd, 1),
        "SGD step, of ten in a row": (ten_steps(sgd), 10),
        "auxiliary step": (lambda: fishleg_1.auxiliary.step((x, y)), 1),
        "FishLeg step, k=1": (every_step, 1),
        "FishLeg step, k=10": (ten_steps(every_tenth), 10),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(arguments.rounds):
        for name, (run, count) in variants.items():
            started = time.perf_counter()
            run()
            seconds[name].append((time.perf_counter() - started) / count)
        if (i + 1) % 5 == 0:
            print(f"round {i + 1} of {arguments.rounds}", flush=True)
    # ten steps in a row are compared with ten in a row: single ones run into caches that others have filled
    single, row = (statistics.median(seconds[name]) for name in list(variants)[:2])
    ratios = {
        name: statistics.median(values) / (single if variants[name][1] == 1 else row)
        for name, values in seconds.items()
    }
    for name, ratio in ratios.items():
        print(f"{name:<20} {ratio:.3f} SGD steps")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "ratios": ratios,
        "rounds": arguments.rounds,
        "batch": arguments.batch,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
