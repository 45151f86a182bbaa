"""Draw the pictures of the concept pages. About two minutes of one core; deterministic on one machine.

Run: OMP_NUM_THREADS=1 python docs/pictures/make_pictures.py [NAME ...]
"""

from __future__ import annotations

import copy
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import nn

matplotlib.use("svg")
from matplotlib import pyplot as plt

import fishleg
from fishleg import Auxiliary, InverseFisher, PruningOptions, Surgeon
from fishleg.workloads.registry import WORKLOADS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SAMPLES = 128  # half of the default: the pictures show tendencies, not results
BLUE, ORANGE, GREEN, RED, GREY = "#3f51b5", "#ef6c00", "#2e7d32", "#c62828", "#9e9e9e"
plt.rcParams.update(
    {
        "svg.hashsalt": "fishleg",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.figsize": (5.6, 3.4),
        "legend.frameon": False,
    }
)


def save(figure: Any, name: str) -> None:
    """Write a picture without a date, so that the same data give the same file."""
    metadata = {"Date": None} if name.endswith(".svg") else {"Software": None}
    figure.savefig(HERE / name, bbox_inches="tight", metadata=metadata, dpi=110)
    plt.close(figure)


def dense_model() -> tuple[nn.Module, Any]:
    """Return the trained digits network and its calibration loader."""
    digits = WORKLOADS["digits"]
    return digits.model(True), digits.data()[0]


def surgeon(model: nn.Module, loader: Any, **options: Any) -> Surgeon:
    """Return a surgeon of a copy of the model."""
    settings = PruningOptions(samples=SAMPLES, batchnorm_batches=5, **options)
    return Surgeon(copy.deepcopy(model), loader, options=settings)


@torch.no_grad()
def outputs(model: nn.Module) -> torch.Tensor:
    """Return the log-probabilities of the model on the test digits."""
    images = torch.cat([x for x, _ in WORKLOADS["digits"].data()[2]])
    return model.eval()(images).log_softmax(1)


def divergence(dense: torch.Tensor, model: nn.Module) -> float:
    """Return the mean KL(dense ‖ sparse) on the test digits."""
    return float((dense.exp() * (dense - outputs(model))).sum(1).mean())


def overview() -> None:
    """ResNet20 without training: the five rows of the benchmark that the first page shows."""
    results = json.loads((ROOT / "reproduction/results/benchmarks/resnet20_oneshot.json").read_text("utf-8"))
    rows = {
        ("one-shot", "magnitude", "none"): ("magnitude", GREY, "--"),
        ("one-shot", "obert", "sum"): ("oBERT, as published", RED, "--"),
        ("one-shot", "ekfac", "joint"): ("EKFAC, no mask search", GREEN, "--"),
        ("one-shot", "fishleg", "joint"): ("fishleg, one shot", ORANGE, "-"),
        ("staged", "fishleg", "joint"): ("fishleg, staged", BLUE, "-"),
    }
    figure, axes = plt.subplots(figsize=(6.4, 3.8))
    axes.axhline(91.7, color="black", linewidth=0.8)
    axes.text(70, 92.6, "dense", fontsize=9)
    for (mode, method, kind), (label, color, line) in rows.items():
        seeds = [r["runs"][kind] for r in results if (r["mode"], r["method"]) == (mode, method)]
        at = [step["sparsity"] for step in seeds[0] if step["sparsity"] in (0.7, 0.8, 0.9, 0.95)]
        means = [
            sum(step["accuracy"] for seed in seeds for step in seed if step["sparsity"] == s) / len(seeds)
            for s in at
        ]
        axes.plot([100 * s for s in at], means, f"o{line}", color=color, label=label)
    axes.set_xlabel("weights removed, %")
    axes.set_ylabel("CIFAR-10 test accuracy, %")
    axes.set_ylim(0, 98)
    axes.legend(loc="lower left")
    save(figure, "overview.svg")


def deletion() -> None:
    """A quadratic loss in two weights: deletion alone, and with compensation."""
    F = torch.tensor([[2.0, 1.3], [1.3, 1.2]])
    w = torch.tensor([1.6, 0.9])
    grid_x, grid_y = torch.meshgrid(
        torch.linspace(-0.9, 3, 200), torch.linspace(-0.4, 3.4, 200), indexing="xy"
    )
    shift = torch.stack([grid_x, grid_y], -1) - w
    loss = 0.5 * torch.einsum("...i,ij,...j->...", shift, F, shift)
    Q = torch.linalg.inv(F)
    compensated = w - Q[:, 0] * w[0] / Q[0, 0]
    alone = torch.tensor([0.0, float(w[1])])
    figure, axes = plt.subplots(figsize=(5.2, 4.2))
    axes.contour(grid_x, grid_y, loss, levels=[0.05, 0.2, 0.5, 1, 1.7, 2.6, 3.7], colors=GREY, linewidths=0.8)
    axes.axvline(0, color="black", linewidth=0.8)
    for point, color, text, place in (
        (alone, RED, "deletion alone", (-0.8, 0.45)),
        (compensated, GREEN, "deletion and\ncompensation", (0.12, 2.75)),
    ):
        cost = float(0.5 * (point - w) @ F @ (point - w))
        arrow = {"arrowstyle": "-|>", "color": color, "linewidth": 1.6}
        axes.annotate("", xy=tuple(point.tolist()), xytext=tuple(w.tolist()), arrowprops=arrow)
        axes.text(*place, f"{text}\nloss +{cost:.2f}", color=color)
    axes.plot(*w.tolist(), "o", color=BLUE)
    axes.text(float(w[0]) + 0.08, float(w[1]) - 0.05, "w (trained)", color=BLUE, va="top")
    axes.set_xlabel("w₁")
    axes.set_ylabel("w₂")
    axes.text(0.04, -0.33, "w₁ = 0", fontsize=9)
    save(figure, "deletion.svg")


def structures() -> None:
    """Q of one small layer in several structures, next to the exact inverse."""
    torch.manual_seed(0)
    model = nn.Linear(4, 5, bias=False)
    mix = torch.randn(4, 4)
    batches = [torch.randn(64, 4) @ mix for _ in range(16)]
    x = torch.cat(batches)
    p = model(x).softmax(1).detach()
    outer = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    F = torch.einsum("nij,na,nb->iajb", outer, x, x).reshape(20, 20) / len(x)
    gamma = 0.1 * float(F.diagonal().mean())
    matrices = {"exact": torch.linalg.inv(F + gamma * torch.eye(20))}
    for name in ("diagonal", "block", "kronecker", "scaled-kronecker", "eigen-kronecker", "full"):
        q = InverseFisher.from_model(model, name, block_size=4)
        Auxiliary(model, q, "categorical", gamma=gamma).learn(batches, steps=400, min_steps=400)
        (layer,) = q.layers
        matrices[name] = q.operator(layer).dense().detach()
    figure, rows = plt.subplots(2, 4, figsize=(8.0, 4.2))
    top = float(matrices["exact"].abs().max()) ** 0.5
    for axes, (name, matrix) in zip(rows.flat, matrices.items(), strict=False):
        error = float((matrix - matrices["exact"]).norm() / matrices["exact"].norm())
        axes.imshow(matrix.abs().sqrt(), vmin=0, vmax=top, cmap="viridis")
        axes.set_title(name if name == "exact" else f"{name}\nerror {error:.2f}", fontsize=9)
    for axes in rows.flat:
        axes.axis("off")
    figure.tight_layout()
    save(figure, "structures.png")


def gauge() -> None:
    """The gauge while Q is learned, from three initial scales."""
    model, loader = dense_model()
    figure, axes = plt.subplots()
    for scale, color in ((1e-2, BLUE), (1.0, ORANGE), (1e4, GREEN)):
        values: list[float] = []
        auxiliary = Auxiliary(
            model, InverseFisher.from_model(model, scale=scale), "categorical", relative_damping=0.1
        )
        auxiliary.learn(loader, 150, min_steps=150, callback=lambda s, v=values: v.append(s.gauge_smoothed))
        axes.plot(range(1, len(values) + 1), values, color=color, label=f"Q₀ = {scale:g} I")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_xlabel("auxiliary steps")
    axes.set_ylabel("gauge, smoothed")
    axes.legend()
    save(figure, "gauge.svg")


def damping() -> None:
    """KL to the dense model after one-shot pruning, against relative damping."""
    model, loader = dense_model()
    dense = outputs(model)
    dampings = [0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0]
    figure, axes = plt.subplots()
    for sparsity, color in ((0.8, BLUE), (0.9, ORANGE)):
        found = []
        for value in dampings:
            pruner = surgeon(model, loader, relative_damping=value)
            pruner.prune(sparsity)
            found.append(divergence(dense, pruner.model))
        axes.plot(dampings, found, "o-", color=color, label=f"{sparsity:.0%} removed")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("relative damping")
    axes.set_ylabel("KL to the dense model")
    axes.legend()
    save(figure, "damping.svg")


def compensation() -> None:
    """KL to the dense model for the four kinds of compensation."""
    model, loader = dense_model()
    dense = outputs(model)
    sparsities = [0.5, 0.7, 0.8, 0.9]
    figure, axes = plt.subplots()
    kinds = {"none": GREY, "sum": RED, "independent": ORANGE, "joint": BLUE}
    for kind, color in kinds.items():
        found = []
        for sparsity in sparsities:
            pruner = surgeon(model, loader, compensation=kind, mask_search_rounds=0, relative_damping=0.1)
            pruner.prune(sparsity)
            found.append(divergence(dense, pruner.model))
        axes.plot([100 * s for s in sparsities], found, "o-", color=color, label=kind)
    axes.set_yscale("log")
    axes.set_xlabel("weights removed, %")
    axes.set_ylabel("KL to the dense model")
    axes.legend()
    save(figure, "compensation.svg")


def mask_search() -> None:
    """Predicted loss increase after up to twelve rounds of the mask search."""
    model, loader = dense_model()
    figure, axes = plt.subplots()
    rounds = [0, 1, 2, 4, 8, 12]
    for sparsity, color in ((0.8, BLUE), (0.9, ORANGE)):
        found = []
        for count in rounds:
            pruner = surgeon(model, loader, mask_search_rounds=count, relative_damping=0.01)
            found.append(pruner.prune(sparsity).predicted)
        axes.plot(rounds, [v / found[0] for v in found], "o-", color=color, label=f"{sparsity:.0%} removed")
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("rounds of the mask search, at most")
    axes.set_ylabel("predicted loss increase,\nrelative to scores alone")
    axes.legend()
    save(figure, "mask_search.svg")


def schedule() -> None:
    """Sparsity after each of ten stages."""
    figure, axes = plt.subplots()
    for kind, color in (("exponential", BLUE), ("cubic", ORANGE), ("linear", GREEN)):
        values = [0.0, *fishleg.schedule(kind, 0.95, 10)]
        axes.step(range(11), [100 * v for v in values], where="post", color=color, label=kind)
        axes.plot(range(11), [100 * v for v in values], "o", color=color, markersize=3)
    axes.set_xlabel("stage")
    axes.set_ylabel("weights removed, %")
    axes.legend(loc="lower right")
    save(figure, "schedule.svg")


def predicted_measured() -> None:
    """Predicted and measured KL of each stage, and of one-shot runs."""
    model, loader = dense_model()
    targets = fishleg.schedule("exponential", 0.95, 11)
    options = PruningOptions(measure_batches=8)
    session = fishleg.PruningSession(copy.deepcopy(model), loader, options=options)
    for _ in session.run(targets):
        pass
    staged = session.surgeon
    shots = [Surgeon(copy.deepcopy(model), loader, options=options).prune(t) for t in targets[2::2]]
    figure, axes = plt.subplots(figsize=(4.6, 4.0))
    for steps, color, marker, label in (
        (staged.history, BLUE, "o", "stages of one run"),
        (shots, ORANGE, "s", "one shot each"),
    ):
        pairs = [(s.predicted, s.measured) for s in steps]
        axes.plot(*zip(*pairs, strict=True), marker, color=color, label=label)
    both = [v for s in [*staged.history, *shots] for v in (s.predicted, s.measured)]
    low, high = min(both) / 2, max(both) * 2
    axes.plot([low, high], [low, high], color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_xlabel("predicted KL")
    axes.set_ylabel("measured KL")
    axes.legend(loc="upper left")
    save(figure, "predicted_measured.svg")


def trust_region() -> None:
    """The bound on a step against the loss that can be regained."""
    loss = torch.linspace(0.001, 1, 200)
    bound = 0.012 * 1.4 * loss.square() / (loss + 0.4)
    figure, axes = plt.subplots()
    axes.plot(loss, bound, color=BLUE)
    axes.set_xlabel("loss L that can be regained")
    axes.set_ylabel("largest KL of one step")
    save(figure, "trust_region.svg")


PICTURES: dict[str, Callable[[], None]] = {
    f.__name__: f
    for f in (
        overview,
        deletion,
        structures,
        gauge,
        damping,
        compensation,
        mask_search,
        schedule,
        predicted_measured,
        trust_region,
    )
}


def main(names: list[str]) -> None:
    """Draw the named pictures, or all."""
    logging.disable(logging.WARNING)
    for name in names or PICTURES:
        PICTURES[name]()
        print(name)


if __name__ == "__main__":
    main(sys.argv[1:])
