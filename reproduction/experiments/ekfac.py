"""Is a learned Q better than EKFAC? The auxiliary loss on held-out data, layer by layer.

A convolutional network trained on the embedded digits; all methods get the same minibatches. EKFAC reads each
twice, once for its bases and once for its eigenvalues. `two passes` learns from the same vectors, `one pass`
(the default settings) from the first half of them. Positive numbers: the learned Q is better.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fishleg import Auxiliary, AuxiliaryOptions, Categorical, InverseFisher
from fishleg.curvature.samples import mean_diagonal, sample_h
from fishleg.formats.results import write_json
from fishleg.workloads.digits import Batches, split_digits
from fishleg.workloads.digits_net import DigitsNet
from reproduction.harness import save_picture


class Replay(Auxiliary):
    """An Auxiliary that receives vectors h instead of inputs, so that all methods use the same vectors."""

    def _sub_batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch

    def _samples(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch


def trained_network(x: Tensor, y: Tensor, seed: int) -> DigitsNet:
    torch.manual_seed(seed)
    model = DigitsNet(width=12)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(4):
        for images, labels in Batches(x, y, 64, seed=epoch, normalized=False):
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def held_out_loss(inverse: InverseFisher, held: dict[str, Tensor], gamma: float) -> dict[str, float]:
    """(½E‖Qh‖² + ½γ‖Q‖² − Tr Q) · γ/n per layer: −½ would mean that F is negligible beside γ."""
    losses = {}
    for name, H in inverse.pack(held).items():
        q = inverse.operator(name)
        quad = q.matvec(H).square().sum() / len(H) + gamma * q.frobenius_sq()
        losses[name] = float((0.5 * quad - q.trace()) * gamma / q.n)
    return losses


def compare(seed: int, relative: float, count: int) -> dict[str, dict[str, float]]:
    x, y, _, _ = split_digits()
    model = trained_network(x[:1000], y[:1000], seed)
    generator = torch.Generator().manual_seed(seed)

    def draw(pool: Tensor, groups: int) -> dict[str, Tensor]:
        index = torch.randint(0, len(pool), (64,), generator=generator)
        return sample_h(model, pool[index], Categorical(), groups=groups, generator=generator)

    parts = [draw(x[1000:], 16) for _ in range(60)]
    held = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    gamma = relative * mean_diagonal(held)
    minibatches = [x[torch.randint(0, 1000, (64,), generator=generator)] for _ in range(count)]
    passes = [
        [sample_h(model, b, Categorical(), groups=4, generator=generator) for b in minibatches]
        for _ in range(2)
    ]

    def start(**options: int) -> tuple[InverseFisher, Replay]:
        inverse = InverseFisher.from_model(model, scale=1 / gamma)
        seeded = torch.Generator().manual_seed(seed)
        return inverse, Replay(
            model, inverse, Categorical(), gamma=gamma, options=AuxiliaryOptions(**options), generator=seeded
        )

    ekfac, auxiliary = start(warm_start=count)
    for h in passes[0]:
        auxiliary.step(h)  # only the bases
    for t, h in enumerate(passes[1]):
        for name, H in ekfac.pack(h).items():
            ekfac.operator(name).natural_step_(H, gamma, 1 / (t + 1))
    losses = {"EKFAC": held_out_loss(ekfac, held, gamma)}
    for method, sequence, warm_start in (
        ("one pass", passes[0], 60),
        ("two passes", passes[0] + passes[1], count),
    ):
        learned, auxiliary = start(warm_start=warm_start)
        for i, h in enumerate(sequence):
            auxiliary.step(h, lr_factor=0.5 * (1 + math.cos(math.pi * i / len(sequence))))
        losses[method] = held_out_loss(learned, held, gamma)
    return losses


def main(out: Path, seeds: int = 3, minibatches: int = 200) -> None:
    rows = []
    for relative in (0.01, 0.1, 1.0):
        for seed in range(seeds):
            losses = compare(seed, relative, minibatches)
            rows.append({"relative damping": relative, "seed": seed, "losses": losses})
            for method in ("one pass", "two passes"):
                gains = {n: (e - losses[method][n]) / abs(e) for n, e in losses["EKFAC"].items()}
                text = "  ".join(f"{name} {gain:+.2%}" for name, gain in gains.items())
                print(f"γ = {relative} × mean diag F, seed {seed}, {method:<10}  {text}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "ekfac.json", {"rows": rows, "minibatches": minibatches})
    save_picture(draw(rows), out / "ekfac.png")
    print(f"wrote {out / 'ekfac.json'}")


def draw(rows: list[dict]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    dampings = sorted({row["relative damping"] for row in rows})
    for axis, relative in zip(figure.subplots(1, len(dampings)), dampings, strict=True):
        chosen = [row["losses"] for row in rows if row["relative damping"] == relative]
        names = list(chosen[0]["EKFAC"])
        for i, method in enumerate(("one pass", "two passes")):
            gains = [
                100 * sum((c["EKFAC"][n] - c[method][n]) / abs(c["EKFAC"][n]) for c in chosen) / len(chosen)
                for n in names
            ]
            axis.barh([j + 0.4 * i for j in range(len(names))], gains, height=0.4, label=method)
        axis.axvline(0, color="grey", linewidth=0.8)
        axis.set_yticks([j + 0.2 for j in range(len(names))], names)
        axis.set(title=f"γ = {relative} × mean diag F", xlabel="better than EKFAC by, %")
    axis.legend(frameon=False)
    return figure
