"""FishLeg against SGD with momentum and Adam, each tuned with the same number of trials.

`python benchmarks/training.py digits` (a deep autoencoder on the embedded digits, seconds) and
`python benchmarks/training.py cifar` (ResNet20 on a slice of CIFAR-10 in $FISHLEG_DATA, minutes). Every trial
is kept as soon as it is done, so that a stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fishleg import Bernoulli, Categorical, FishLeg, Likelihood
from fishleg.workloads.digits import Batches, split_digits
from reproduction.workloads.datasets import cifar10
from reproduction.workloads.networks import autoencoder, resnet20

RESULTS = Path(__file__).parent / "results"
# One knob each, the same number of trials each. FishLeg's is its trust region; its learning rate stays at the
# default.
KNOBS = {"SGD": "lr", "Adam": "lr", "FishLeg k=10": "max_kl", "FishLeg k=1": "max_kl"}


@dataclass(frozen=True)
class Task:
    model: Callable[[], nn.Module]
    batches: Callable[[], Iterator[tuple[Tensor, Tensor]]]
    evaluation: tuple[Tensor, Tensor]
    likelihood: Likelihood
    steps: int
    every: int
    trials: dict[str, tuple[float, ...]]


def digits_task() -> Task:
    x, _, _, _ = split_digits()
    x = x.flatten(1)
    kl = (0.03, 0.1, 0.3)
    trials = {"SGD": (0.03, 0.1, 0.3), "Adam": (0.01, 0.03, 0.1), "FishLeg k=10": kl, "FishLeg k=1": kl}

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        return _forever(Batches(x, x, 128, normalized=False))

    return Task(lambda: autoencoder(64), batches, (x, x), Bernoulli(), 600, 20, trials)


def cifar_task() -> Task:
    images, labels = cifar10("train")
    images, labels = images[:5120], labels[:5120]
    evaluation = next(iter(Batches(images, labels, 1024, seed=99)))
    return Task(
        lambda: resnet20().to(memory_format=torch.channels_last),
        lambda: _forever(Batches(images, labels, 128, augmented=True)),
        evaluation,
        Categorical(),
        150,
        10,
        {"SGD": (0.003, 0.01, 0.03), "Adam": (3e-4, 1e-3, 3e-3), "FishLeg k=10": (0.001, 0.003, 0.01)},
    )


def run_trial(task: Task, method: str, value: float) -> dict[str, object]:
    """One training run: [step, seconds, full training loss] at regular steps; evaluation is not timed."""
    torch.manual_seed(0)
    model = task.model()
    optimizer: torch.optim.Optimizer
    if method == "SGD":
        optimizer = torch.optim.SGD(model.parameters(), lr=value, momentum=0.9)
    elif method == "Adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=value)
    else:
        optimizer = FishLeg(model, task.likelihood, max_kl=value, update_every=int(method.split("=")[1]))
    curve, spent = [], 0.0
    for step, (x, y) in zip(range(1, task.steps + 1), task.batches(), strict=False):
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = task.likelihood.nll(model(x), y)
        loss.backward()
        optimizer.step()
        spent += time.perf_counter() - started
        if step % task.every == 0:
            curve.append((step, spent, evaluate(model, task)))
    return {"method": method, "value": value, "curve": curve}


@torch.no_grad()
def evaluate(model: nn.Module, task: Task) -> float:
    """The loss on fixed training data, normalised as in training (BatchNorm by the batch, buffers kept)."""
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    x, y = task.evaluation
    loss = float(task.likelihood.nll(model(x), y))
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return loss


def best_trials(results: list[dict]) -> dict[str, dict]:
    """The trial of each method with the lowest final loss (non-finite ones lose)."""
    best: dict[str, dict] = {}
    for result in results:
        final = result["curve"][-1][2]
        if final == final and (
            result["method"] not in best or final < best[result["method"]]["curve"][-1][2]
        ):
            best[result["method"]] = result
    return best


def report(name: str, results: list[dict]) -> None:
    best = best_trials(results)
    target = best["SGD"]["curve"][-1][2]
    total = best["SGD"]["curve"][-1][0]
    print(f"\n{name}: best of the same number of trials each; SGD's final training loss is {target:.4f}")
    for method, result in best.items():
        reached = next((step for step, _, loss in result["curve"] if loss <= target), None)
        when = f"after {reached / total:.0%} of SGD's steps" if reached else "never"
        step_cost = result["curve"][-1][1] / best["SGD"]["curve"][-1][1]
        print(
            f"  {method:<13} {KNOBS[method]}={result['value']:<6} final {result['curve'][-1][2]:.4f}   "
            f"reaches SGD's final loss {when}   (one step = {step_cost:.2f} SGD steps)"
        )


def plot(name: str, results: list[dict]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    best = best_trials(results)
    sgd_seconds = best["SGD"]["curve"][-1][1] / best["SGD"]["curve"][-1][0]
    for method, result in best.items():
        steps, seconds, losses = zip(*result["curve"], strict=True)
        label = f"{method} ({KNOBS[method]}={result['value']})"
        axes[0].plot(steps, losses, label=label)
        axes[1].plot([s / sgd_seconds for s in seconds], losses, label=label)
    axes[0].set(xlabel="step", ylabel="training loss", title=f"{name}: loss per step")
    axes[1].set(xlabel="time, in SGD steps", title=f"{name}: loss per time")
    for axis in axes:
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.savefig(RESULTS / f"training_{name}.png", dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=["digits", "cifar"])
    parser.add_argument("--again", action="store_true", help="forget the trials that are there")
    arguments = parser.parse_args()
    task = {"digits": digits_task, "cifar": cifar_task}[arguments.task]()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"training_{arguments.task}.json"
    results = json.loads(path.read_text()) if path.exists() and not arguments.again else []
    done = {(r["method"], r["value"]) for r in results}
    for method, values in task.trials.items():
        for value in values:
            if (method, value) in done:
                continue
            results.append(run_trial(task, method, value))
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(results) + "\n")
            temporary.replace(path)
            print(
                f"{method} {KNOBS[method]}={value}: final loss {results[-1]['curve'][-1][2]:.4f}", flush=True
            )
    report(arguments.task, results)
    plot(arguments.task, results)


def _forever(batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from batches


if __name__ == "__main__":
    main()
