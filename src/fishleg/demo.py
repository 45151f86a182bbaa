"""`python -m fishleg.demo`: train a small network on real digits, learn Q, look at its health, prune.

Everything is embedded; it takes well under a minute. With matplotlib installed it also draws the picture.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from fishleg.auxiliary import Auxiliary, AuxStats
from fishleg.inverse import InverseFisher
from fishleg.optimizer import FishLeg
from fishleg.patterns import schedule
from fishleg.surgeon import Surgeon
from fishleg.warmstart import AuxiliaryOptions
from fishleg.workloads.data import Batches, split_digits
from fishleg.workloads.models import DigitsNet

Curve = list[tuple[int, float]]


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fishleg.demo", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="where results go (default: demo-out)"
    )
    parser.add_argument("--steps", type=int, default=150, help="training steps (default: 150)")
    parser.add_argument("--aux-steps", type=int, default=200, help="most auxiliary steps (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.steps < 1 or arguments.aux_steps < 1:
        parser.error(f"--steps and --aux-steps must be >= 1, got {arguments.steps} and {arguments.aux_steps}")
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
        "\n3. pruning without labels or training: stages of score, remove, compensate, refresh BatchNorm",
        flush=True,
    )
    pruned = prune(models["SGD with momentum"], x, x_test, y_test, arguments.seed)

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
) -> tuple[list[AuxStats], InverseFisher, float]:
    """Learn Q for the model and keep what every step reported."""
    inverse = InverseFisher.from_model(model)
    auxiliary = Auxiliary(
        model,
        inverse,
        "categorical",
        options=AuxiliaryOptions(groups=4),
        generator=torch.Generator().manual_seed(seed),
    )
    stats: list[AuxStats] = []

    def watch(s: AuxStats) -> None:
        stats.append(s)
        if s.step % 40 == 0:
            print(f"   step {s.step:>4}   gauge {s.gauge_smoothed:+.3f} (tends to 0)", flush=True)

    auxiliary.learn((images for images, _ in _forever(x, torch.zeros(len(x)), seed)), steps, callback=watch)
    assert auxiliary.gamma is not None
    return stats, inverse, auxiliary.gamma


def prune(
    dense: nn.Module,
    x: Tensor,
    x_test: Tensor,
    y_test: Tensor,
    seed: int,
    targets: tuple[float, ...] = (0.8, 0.9, 0.95),
) -> dict[str, list[tuple[float, float]]]:
    """Test accuracy at each sparsity, by magnitude and by the learned Q."""
    found: dict[str, list[tuple[float, float]]] = {}
    for method, compensation in (("magnitude", "none"), ("fishleg", "joint")):
        model = copy.deepcopy(dense)
        loader = Batches(x, torch.zeros(len(x)), 128, seed=seed, normalized=False)
        surgeon = Surgeon(
            model, [images for images, _ in loader], method=method, compensation=compensation, samples=128
        )
        sparsities = schedule("exponential", targets[-1], 6)
        for sparsity in sorted({*sparsities, *targets}):
            surgeon.prune(sparsity)
            found.setdefault(method, []).append((sparsity, accuracy(model, x_test, y_test)))
        shown = "   ".join(f"{s:.0%}: {a:.1%}" for s, a in found[method] if s in targets)
        print(f"   {method:<10} test accuracy at sparsity {shown}", flush=True)
    return found


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
    for method, points in pruning.items():
        sparsity, correct = zip(*points, strict=True)
        last.plot([100 * s for s in sparsity], [100 * a for a in correct], marker="o", label=method)
    last.set(title="Pruned without training", xlabel="sparsity, %", ylabel="test accuracy, %")
    last.legend(frameon=False)
    figure.savefig(path, dpi=130)
    return path


def _forever(x: Tensor, y: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    batches = Batches(x, y, 128, seed=seed, normalized=False)
    while True:
        yield from batches


if __name__ == "__main__":
    sys.exit(main())
