"""`python -m fishleg.cli.demo`: train a small network on real digits, learn Q, look at its health, prune.

Everything is embedded; it takes one or two minutes. With matplotlib installed it also draws the picture.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fishleg.inverse.auxiliary import Auxiliary, AuxiliaryStats
from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.inverse.options import AuxiliaryOptions
from fishleg.optim.fishleg import FishLeg
from fishleg.pruning.gradual import gradual
from fishleg.pruning.surgeon import PruneStep, Surgeon
from fishleg.pruning.tuning import FineTuningOptions
from fishleg.workloads.digits import Batches, split_digits
from fishleg.workloads.digits_net import DigitsNet

Curve = list[tuple[int, float]]
Point = tuple[float, float]
TARGETS = (0.9, 0.95)
GRADUAL = (0.5, 0.7, 0.8, 0.87, 0.9, 0.93, 0.95)
SAMPLES = 128  # gradients per estimate of Q
# name → (options of the Surgeon, optimizer between the prunings), as the paper pairs them
METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "magnitude": ({"method": "magnitude", "compensation": "none"}, "sgd"),
    "OBS (oBERT)": ({"method": "obert", "compensation": "sum"}, "sgd"),
    "M-FAC": ({"method": "mfac", "compensation": "sum"}, "sgd"),
    "FLS": ({}, "fishleg"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fishleg.cli.demo", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="where results go (default: demo-out)"
    )
    parser.add_argument("--steps", type=int, default=150, help="training steps (default: 150)")
    parser.add_argument("--aux-steps", type=int, default=200, help="most auxiliary steps (default: 200)")
    parser.add_argument(
        "--tune-steps", type=int, default=40, help="training steps after each gradual pruning (default: 40)"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    for name in ("steps", "aux_steps", "tune_steps"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be >= 1, got {getattr(arguments, name)}")
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"cannot write to --out {arguments.out}: {error.strerror}")

    x, y, x_test, y_test = split_digits()
    print(f"digits: {len(x)} training and {len(x_test)} test images, 8x8 pixels, 10 classes\n", flush=True)
    print(f"1. training a small convolutional network, {arguments.steps} steps of 128 images", flush=True)
    curves: dict[str, Curve] = {}
    models: dict[str, nn.Module] = {}
    for name in ("SGD with momentum", "Adam", "FishLeg"):
        started = time.perf_counter()
        models[name], curves[name] = train(name, x, y, arguments.steps, arguments.seed)
        seconds = time.perf_counter() - started
        print(
            f"   {name:<18} loss {curves[name][-1][1]:.4f}   test accuracy "
            f"{accuracy(models[name], x_test, y_test):.1%}   {seconds:.1f} s",
            flush=True,
        )

    print(
        "\n2. learning Q, the inverse of the damped Fisher matrix, from images alone (no labels)", flush=True
    )
    stats, inverse, gamma = learn_q(models["FishLeg"], x, arguments.aux_steps, arguments.seed)
    verdict = "good enough, stopped by itself" if stats[-1].converged else "step limit reached"
    print(f"   gamma {gamma:.2e} (chosen from the mean diagonal of F)")
    print(f"   gauge {stats[-1].gauge_smoothed:+.3f} after {stats[-1].step} steps: {verdict}\n")
    print(inverse.describe())

    print(
        "\n3. pruning to 90 and 95 %: one shot (no labels, no training), and gradually with "
        f"{arguments.tune_steps} training steps after each of {len(GRADUAL)} prunings",
        flush=True,
    )
    dense = models["SGD with momentum"]
    pruned = prune(dense, (x, y), (x_test, y_test), arguments.tune_steps, arguments.seed)
    print(f"\n{table(pruned, accuracy(dense, x_test, y_test))}")

    result = {
        "pruning": pruned,
        "training": curves,
        "gauge": [(s.step, s.gauge_smoothed) for s in stats],
        "loss": [(s.step, s.loss) for s in stats],
        "gamma": gamma,
        "converged": stats[-1].converged,
    }
    path = arguments.out / "demo.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result))
    temporary.replace(path)
    print(f"\nwrote {path}")
    picture = draw(result, arguments.out / "demo.png")
    print(f"wrote {picture}" if picture else "no picture: install matplotlib (pip install 'fishleg[plot]')")
    return 0


def train(name: str, x: Tensor, y: Tensor, steps: int, seed: int) -> tuple[nn.Module, Curve]:
    """Train from the same start on the same batches; the curve is a running mean of the training loss."""
    torch.manual_seed(seed)
    model = DigitsNet()
    optimizer: torch.optim.Optimizer
    if name == "FishLeg":
        optimizer = FishLeg(model, "categorical", generator=torch.Generator().manual_seed(seed))
    elif name == "Adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    curve: Curve = []
    smoothed = 0.0
    for step, (images, labels) in zip(range(steps), _forever(x, y, seed), strict=False):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        smoothed = 0.9 * smoothed + 0.1 * float(loss.detach())
        curve.append((step + 1, smoothed / (1 - 0.9 ** (step + 1))))
    return model, curve


def learn_q(
    model: nn.Module, x: Tensor, steps: int, seed: int
) -> tuple[list[AuxiliaryStats], InverseFisher, float]:
    """Learn Q for the model and keep what every step reported."""
    inverse = InverseFisher.from_model(model)
    auxiliary = Auxiliary(
        model,
        inverse,
        "categorical",
        options=AuxiliaryOptions(groups=4),
        generator=torch.Generator().manual_seed(seed),
    )
    stats: list[AuxiliaryStats] = []

    def watch(s: AuxiliaryStats) -> None:
        stats.append(s)
        if s.step % 40 == 0:
            print(f"   step {s.step:>4}   gauge {s.gauge_smoothed:+.3f} (tends to 0)", flush=True)

    auxiliary.learn((images for images, _ in _forever(x, torch.zeros(len(x)), seed)), steps, callback=watch)
    assert auxiliary.gamma is not None
    return stats, inverse, auxiliary.gamma


def prune(
    dense: nn.Module,
    train_data: tuple[Tensor, Tensor],
    test_data: tuple[Tensor, Tensor],
    tune_steps: int,
    seed: int,
) -> dict[str, list[Point]]:
    """Test accuracy against sparsity for each method, one shot and gradual."""
    found: dict[str, list[Point]] = {}
    for name, (options, optimizer) in METHODS.items():
        started = time.perf_counter()
        points = []
        for sparsity in TARGETS:  # each from the dense model again
            surgeon = _surgeon(dense, train_data, seed, options)
            surgeon.prune(sparsity)
            points.append((sparsity, accuracy(surgeon.model, *test_data)))
        found[f"{name}, one shot"] = points
        surgeon = _surgeon(dense, train_data, seed, options)
        gradually: list[Point] = []
        tuning = FineTuningOptions(optimizer=optimizer, steps=tune_steps)
        loader = Batches(*train_data, 128, seed=seed, normalized=False)

        def stage_done(
            step: PruneStep, model: nn.Module = surgeon.model, points: list[Point] = gradually
        ) -> None:
            points.append((step.target, accuracy(model, *test_data)))

        gradual(surgeon, GRADUAL, loader, tuning, on_stage=stage_done)
        found[f"{name}, gradual"] = gradually
        shown = "   ".join(f"{s:.0%}: {a:.1%}" for s, a in gradually if s in TARGETS)
        print(
            f"   {name:<10} gradual, with {optimizer:<8} {shown}   {time.perf_counter() - started:.0f} s",
            flush=True,
        )
    return found


def _surgeon(dense: nn.Module, data: tuple[Tensor, Tensor], seed: int, options: dict[str, Any]) -> Surgeon:
    loader = Batches(*data, 128, seed=seed, normalized=False)
    return Surgeon(
        copy.deepcopy(dense),
        list(loader),
        samples=SAMPLES,
        generator=torch.Generator().manual_seed(seed),
        **options,
    )


def table(found: dict[str, list[Point]], dense: float) -> str:
    """Test accuracy by method, one shot and gradual, at the reported sparsities."""
    modes = ("one shot", "gradual")
    heads = [f"{mode} {target:.0%}" for mode in modes for target in TARGETS]
    lines = [f"   {'test accuracy, %':<18}" + "".join(f"{head:>15}" for head in heads)]
    lines.append(f"   {'dense':<18}" + f"{100 * dense:>15.1f}")
    for name in METHODS:
        cells = [dict(found[f"{name}, {mode}"])[target] for mode in modes for target in TARGETS]
        lines.append(f"   {name:<18}" + "".join(f"{100 * cell:>15.1f}" for cell in cells))
    return "\n".join(lines)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The fraction of images that are classified rightly."""
    model.eval()
    return float((model(x).argmax(1) == y).float().mean())


def draw(result: dict[str, object], path: Path) -> Path | None:
    """The training curves and the gauge, side by side; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(14, 4), layout="constrained")
    left, right, last = figure.subplots(1, 3)
    curves = result["training"]
    assert isinstance(curves, dict)
    for name, curve in curves.items():
        left.plot(*zip(*curve, strict=True), label=name)
    left.set(title="Training on digits", xlabel="step", ylabel="cross entropy (smoothed)", yscale="log")
    left.legend(frameon=False)
    gauge = result["gauge"]
    assert isinstance(gauge, list)
    right.plot(*zip(*gauge, strict=True), color="tab:red")
    right.axhline(0, color="grey", linewidth=0.8)
    right.set(
        title="Health of Q: the gauge tends to 0", xlabel="auxiliary step", ylabel="Tr(QF$_γ$Q) / Tr(Q) − 1"
    )
    right.set_yscale("symlog", linthresh=0.1)
    pruning = result["pruning"]
    assert isinstance(pruning, dict)
    for i, name in enumerate(METHODS):
        for mode, style in (("one shot", ":"), ("gradual", "-")):
            sparsity, correct = zip(*pruning[f"{name}, {mode}"], strict=True)
            last.plot(
                [100 * s for s in sparsity], [100 * a for a in correct],
                style, marker="o", markersize=4, color=f"C{i}", label=f"{name}, {mode}",
            )  # fmt: skip
    last.set(title="Pruned digits network", xlabel="sparsity, %", ylabel="test accuracy, %")
    last.legend(frameon=False, fontsize=7, loc="lower left")
    figure.savefig(path, dpi=130)
    return path


def _forever(x: Tensor, y: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    batches = Batches(x, y, 128, seed=seed, normalized=False)
    while True:
        yield from batches


if __name__ == "__main__":
    sys.exit(main())
