"""`fishleg demo`: train a small network on real digits, learn Q, look at its gauge, prune with four methods.

Everything is embedded; it takes one or two minutes. With matplotlib installed it also draws the picture.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fishleg.formats.results import foreign_file, write_figure, write_json
from fishleg.inverse import Auxiliary, AuxiliaryStats, InverseFisher
from fishleg.options import AuxiliaryOptions, FineTuningOptions, PruningOptions
from fishleg.pruning import PruningSession, StageDone
from fishleg.workloads import Batches, DigitsNet, split_digits

Point = tuple[float, float]
_RESULTS, _PICTURE, _MAKER = "demo.json", "demo.png", "fishleg demo"
TARGETS = (0.9, 0.95)
GRADUAL = (0.5, 0.7, 0.8, 0.87, 0.9, 0.93, 0.95)
SAMPLES = 128  # gradients per estimate of Q
# By name: options of the pruning, and the optimizer between two prunings, as the paper pairs them.
METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "magnitude": ({"method": "magnitude", "compensation": "none"}, "sgd"),
    "OBS (oBERT)": ({"method": "obert", "compensation": "sum"}, "sgd"),
    "M-FAC": ({"method": "mfac", "compensation": "sum"}, "sgd"),
    "FLS": ({}, "fishleg"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the demo.

    Args:
        argv: Command-line arguments; default: those of the process.

    Returns:
        The exit code.
    """
    arguments = _arguments(argv)
    x, y, x_test, y_test = split_digits()
    _say(f"digits: {len(x)} training and {len(x_test)} test images, 8x8 pixels, 10 classes\n")
    _say(f"1. training a small convolutional network, {arguments.steps} steps of 128 images")
    dense = train(x, y, arguments.steps, arguments.seed)
    _say(f"   test accuracy {accuracy(dense, x_test, y_test):.1%}")
    _say("\n2. learning Q, the inverse of the damped Fisher matrix, from images alone (no labels)")
    stats, inverse, gamma = learn_q(dense, x, arguments.aux_steps, arguments.seed)
    verdict = "good enough, stopped by itself" if stats[-1].converged else "step limit reached"
    _say(f"   gamma {gamma:.2e} (chosen from the mean diagonal of F)")
    _say(f"   gauge {stats[-1].gauge_smoothed:+.3f} after {stats[-1].step} steps: {verdict}\n")
    _say(inverse.describe())
    _say(
        "\n3. pruning to 90 and 95 %: one shot (no labels, no training), and gradually with "
        f"{arguments.tune_steps} training steps after each of {len(GRADUAL)} prunings"
    )
    pruned = prune(dense, (x, y), (x_test, y_test), arguments.tune_steps, arguments.seed)
    _say(f"\n{table(pruned, accuracy(dense, x_test, y_test))}")
    _say(
        "\n   FLS is the whole method: learned Q, joint compensation, mask search, BatchNorm by the batch."
        "\n   The other rows are as published: fewer ingredients, not only another Q."
    )
    result = {
        "pruning": pruned,
        "dense": accuracy(dense, x_test, y_test),
        "gauge": [(s.step, s.gauge_smoothed) for s in stats],
        "loss": [(s.step, s.loss) for s in stats],
        "gamma": gamma,
        "converged": stats[-1].converged,
    }
    _write(result, arguments.out)
    return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fishleg.cli.demo", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="where results go (default: demo-out)"
    )
    parser.add_argument("--steps", type=int, default=150, help="training steps (default: 150)")
    parser.add_argument("--aux-steps", type=int, default=200, help="most auxiliary steps (default: 200)")
    parser.add_argument(
        "--tune-steps", type=int, default=40, help="training steps after each gradual pruning (default: 40)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default: 0)")
    arguments = parser.parse_args(argv)
    for name in ("steps", "aux_steps", "tune_steps"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be >= 1, got {getattr(arguments, name)}")
    try:
        check_out(arguments.out)
        arguments.out.mkdir(parents=True, exist_ok=True)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"cannot write to --out {arguments.out}: {error.strerror}")
    return arguments


def check_out(out: Path) -> None:
    """Check that the demo would not overwrite a file that is not its own.

    Args:
        out: The directory of the results.

    Raises:
        ValueError: It would.
    """
    foreign = foreign_file(out / _RESULTS, _MAKER, out / _PICTURE)
    if foreign is not None:
        raise ValueError(f"out: {foreign} is there, which the demo would overwrite: choose another directory")


def train(x: Tensor, y: Tensor, steps: int, seed: int) -> nn.Module:
    """Train a small network with SGD.

    Args:
        x: Images, [N, 1, 8, 8].
        y: Labels, [N].
        steps: Training steps of 128 images.
        seed: The seed of weights and batches.

    Returns:
        The trained network.
    """
    torch.manual_seed(seed)
    model = DigitsNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _, (images, labels) in zip(range(steps), _forever(x, y, seed), strict=False):
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model


def learn_q(
    model: nn.Module, x: Tensor, steps: int, seed: int
) -> tuple[list[AuxiliaryStats], InverseFisher, float]:
    """Learn Q for a model.

    Args:
        model: The model.
        x: Images, [N, 1, 8, 8].
        steps: The largest number of auxiliary steps.
        seed: The seed of batches and samples.

    Returns:
        The statistics of every step, Q, and its damping.
    """
    inverse = InverseFisher.from_model(model)
    auxiliary = Auxiliary(
        model, inverse, "categorical", options=AuxiliaryOptions(groups=4),
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    stats: list[AuxiliaryStats] = []

    def watch(s: AuxiliaryStats) -> None:
        stats.append(s)
        if s.step % 40 == 0:
            _say(f"   step {s.step:>4}   gauge {s.gauge_smoothed:+.3f} (tends to 0)")

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
    """Prune with every method, in one shot and gradually.

    Args:
        dense: The trained network.
        train_data: Images and labels to calibrate and train on.
        test_data: Images and labels to measure on.
        tune_steps: Training steps after each gradual pruning.
        seed: The seed of everything random.

    Returns:
        By method and mode, (sparsity, test accuracy).
    """
    found: dict[str, list[Point]] = {}
    for name, (options, optimizer) in METHODS.items():
        started = time.perf_counter()
        points = []
        for sparsity in TARGETS:  # each from the dense model again
            session = _session(dense, train_data, seed, options)
            session.surgeon.prune(sparsity)
            points.append((sparsity, accuracy(session.model, *test_data)))
        found[f"{name}, one shot"] = points
        tuning = FineTuningOptions(optimizer=optimizer, steps=tune_steps)
        session = _session(dense, train_data, seed, options, tuning)
        found[f"{name}, gradual"] = gradual = [
            (event.step.target, accuracy(session.model, *test_data))
            for event in session.run(GRADUAL)
            if isinstance(event, StageDone)
        ]
        shown = "   ".join(f"{s:.0%}: {a:.1%}" for s, a in gradual if s in TARGETS)
        seconds = time.perf_counter() - started
        _say(f"   {name:<12} gradual, with {optimizer:<8} {shown}   {seconds:.0f} s")
    return found


def _session(
    dense: nn.Module,
    data: tuple[Tensor, Tensor],
    seed: int,
    options: dict[str, Any],
    fine_tuning: FineTuningOptions | None = None,
) -> PruningSession:
    loader = Batches(*data, 128, seed=seed, normalized=False)
    return PruningSession(
        copy.deepcopy(dense), list(loader), options=PruningOptions(samples=SAMPLES, **options),
        fine_tuning=fine_tuning, train_loader=None if fine_tuning is None else loader,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip


def table(found: dict[str, list[Point]], dense: float) -> str:
    """Return the test accuracy by method, in one shot and gradually, at the reported sparsities.

    Args:
        found: What `prune` returned.
        dense: The accuracy of the dense network.

    Returns:
        A table for the terminal.
    """
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
    """Return the fraction of images that are classified correctly.

    Args:
        model: The network; it is put into evaluation mode.
        x: Images, [N, 1, 8, 8].
        y: Labels, [N].

    Returns:
        A number in [0, 1].
    """
    model.eval()
    return float((model(x).argmax(1) == y).float().mean())


def _write(result: dict[str, Any], out: Path) -> None:
    check_out(out)  # again: a minute has passed
    path = out / _RESULTS
    write_json(path, {"made_by": _MAKER, **result})
    _say(f"\nwrote {path}")
    picture = draw(result, out / _PICTURE)
    _say(f"wrote {picture}" if picture else "no picture: install matplotlib (pip install 'fishleg[plot]')")


def draw(result: dict[str, Any], path: Path) -> Path | None:
    """Draw the gauge and the accuracy against sparsity, one shot beside gradual.

    Args:
        result: What the demo has found.
        path: The file to write.

    Returns:
        The path, or None without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(14, 4), layout="constrained")
    gauge, one_shot, gradual = figure.subplots(1, 3)
    gauge.plot(*zip(*result["gauge"], strict=True), color="tab:red")
    gauge.axhline(0, color="grey", linewidth=0.8)
    gauge.set(title="Gauge of Q: tends to 0", xlabel="auxiliary step", ylabel="Tr(QF$_γ$Q) / Tr(Q) − 1")
    gauge.set_yscale("symlog", linthresh=0.1)
    for axis, mode, title in (
        (one_shot, "one shot", "One shot: no labels, no training"),
        (gradual, "gradual", "Gradual: training after each pruning"),
    ):
        for i, name in enumerate(METHODS):
            sparsity, correct = zip(*result["pruning"][f"{name}, {mode}"], strict=True)
            percent = [100 * s for s in sparsity], [100 * a for a in correct]
            axis.plot(*percent, marker="o", markersize=4, color=f"C{i}", label=name, clip_on=False)
        axis.axhline(100 * result["dense"], color="grey", linewidth=0.8, linestyle="--", label="dense")
        low, high = axis.get_ylim()
        axis.set_ylim(max(low, 0), min(high, 100))  # the margin may reach above 100 %
        axis.set(title=title, xlabel="sparsity, %", ylabel="test accuracy, %")
        axis.legend(frameon=False, fontsize=8, loc="best")
    write_figure(path, figure)
    return path


def _forever(x: Tensor, y: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    batches = Batches(x, y, 128, seed=seed, normalized=False)
    while True:
        yield from batches


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
