"""FishLeg against SGD with momentum and Adam, each tuned with the same number of trials.

Two tasks: a deep autoencoder on the embedded digits (seconds), and ResNet20 on a slice of CIFAR-10 (minutes).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fishleg import Bernoulli, Categorical, FishLeg, Likelihood
from fishleg.workloads.digits import Batches, split_digits
from reproduction.harness import run_benchmark, save_picture
from reproduction.workloads.datasets import cifar10
from reproduction.workloads.networks import autoencoder, resnet20

# The one setting of each method that is tuned. FishLeg's is its trust region; its learning rate stays at the
# default.
TUNED = {"SGD": "lr", "Adam": "lr", "FishLeg k=10": "max_kl", "FishLeg k=1": "max_kl"}


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


def run(unit: dict[str, Any], name: str) -> dict[str, Any]:
    """One training run: [step, seconds, full training loss] at regular steps; evaluation is not timed."""
    task, method, value = TASKS[name](), unit["method"], unit["value"]
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
    return {"curve": curve}


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
            f"  {method:<13} {TUNED[method]}={result['value']:<6} final {result['curve'][-1][2]:.4f}   "
            f"reaches SGD's final loss {when}   (one step = {step_cost:.2f} SGD steps)"
        )


def draw(name: str, results: list[dict]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    best = best_trials(results)
    sgd_seconds = best["SGD"]["curve"][-1][1] / best["SGD"]["curve"][-1][0]
    for method, result in best.items():
        steps, seconds, losses = zip(*result["curve"], strict=True)
        label = f"{method} ({TUNED[method]}={result['value']})"
        axes[0].plot(steps, losses, label=label)
        axes[1].plot([s / sgd_seconds for s in seconds], losses, label=label)
    axes[0].set(xlabel="step", ylabel="training loss", title=f"{name}: loss per step")
    axes[1].set(xlabel="time, in SGD steps", title=f"{name}: loss per time")
    for axis in axes:
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    return figure


def main(name: str, out: Path, again: bool = False) -> None:
    trials = TASKS[name]().trials
    units = [{"method": method, "value": value} for method, values in trials.items() for value in values]
    results = run_benchmark(out / f"training_{name}.json", units, run, name, again=again)
    report(name, results)
    save_picture(draw(name, results), out / f"training_{name}.png")


def _forever(batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from batches


TASKS = {"digits": digits_task, "cifar": cifar_task}
