"""How well Q is estimated where the truth is known: the paper's 100-parameter toys, and one real layer.

    toy-a       full Q against F_γ⁻¹: the paper's estimator, ours, baselines
    isotropic   structured Q: isotropic probes, and probes u ~ N(0, F⁻¹)
    family      D(LLᵀ⊗RRᵀ)D of a trained layer against the best Q of that structure

Each prints a table and writes JSON and a picture; a few minutes on one core.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fishleg import Auxiliary, AuxiliaryOptions, Categorical, Gaussian, InverseFisher
from fishleg.curvature.samples import sample_h
from fishleg.formats.results import write_json
from fishleg.workloads.digits import split_digits
from reproduction.figures.problems import Problem, Projection, approximate_then_invert, exponential
from reproduction.harness import save_picture

N, GAMMA, BATCH = 100, 0.01, 100
CHECKPOINTS = (100, 500, 2000)


class Toy(Problem):
    """A random 100×100 Fisher matrix with eigenvalues e^{−i/30}, and minibatches of its samples."""

    def __init__(self, seed: int) -> None:
        super().__init__(exponential(N, 30), GAMMA, seed)
        self.generator = torch.Generator().manual_seed(1000 + seed)

    def batch(self) -> Tensor:
        z = torch.randn(BATCH, N, generator=self.generator, dtype=torch.float64)
        return z @ self.root.mT


def learn(
    toy: Toy,
    structure: str,
    options: AuxiliaryOptions,
    *,
    steps: int,
    scale: float,
    shape: tuple[int, int] = (1, N),
    decay: bool = False,
    block_size: int = 20,
    watch: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Learn Q on the toy through the library's own path; returns it as a dense matrix."""
    model = Projection(*shape)
    inverse = InverseFisher.from_model(model, structure, scale=scale, block_size=block_size)
    auxiliary = Auxiliary(model, inverse, Gaussian(), gamma=GAMMA, options=options, generator=toy.generator)
    for t in range(1, steps + 1):
        auxiliary.step(toy.batch(), lr_factor=1 - (t - 1) / steps if decay else 1.0)
        if watch is not None and t in CHECKPOINTS:
            watch(t, inverse.operator("weight").dense().detach())
    return inverse.operator("weight").dense().detach()


def toy_a(seeds: int) -> dict[str, object]:
    """R at 100, 500 and 2000 minibatches."""
    every = {"groups": BATCH, "vectorize": True}
    scale_mean = N / float(Toy(0).F_gamma.trace())
    variants: dict[str, tuple[str, AuxiliaryOptions, float, bool]] = {
        "default (natural)": ("full", AuxiliaryOptions(**every), 1 / GAMMA, False),
        "trace, Adam": ("full", AuxiliaryOptions(estimator="trace", lr=1e-2, **every), scale_mean, True),
    }
    for P in (False, True):
        for structure, scale, label, rates in (
            ("triangular", 1 / GAMMA, "triangular, 1/γ", (0.1, 0.3)),
            ("full", 1 / GAMMA, "square, 1/γ", (0.03, 0.1)),
            ("full", scale_mean, "square, n/Tr(F_γ)", (3e-3, 1e-2, 3e-2)),
        ):
            for lr in rates:
                options = AuxiliaryOptions(estimator="probe", lr=lr, precondition=P, betas=(0.9, 0.999))
                variants[f"paper, P={'Q' if P else 'I'}, {label}, lr {lr}"] = (
                    structure,
                    options,
                    scale,
                    True,
                )
    result: dict[str, list[list[float]]] = {}
    for name, (structure, options, scale, decay) in variants.items():
        count = seeds if not name.startswith("paper") else 1  # the paper's grid on one seed, its best on all
        result[name] = [_distances(Toy(s), structure, options, scale, decay) for s in range(count)]
        print(f"{name:<48} " + "  ".join(f"{_column(result[name], i):6.3f}" for i in range(3)), flush=True)
    best = min((n for n in result if n.startswith("paper")), key=lambda n: _finite(result[n][0][-1]))
    structure, options, scale, decay = variants[best]
    result[f"best of the {best}"] = [
        _distances(Toy(s), structure, options, scale, decay) for s in range(seeds)
    ]
    result["average of inverses"] = [_average_of_inverses(Toy(s)) for s in range(seeds)]
    result["average, then invert"] = [_invert_average(Toy(s)) for s in range(seeds)]
    for name in (f"best of the {best}", "average of inverses", "average, then invert"):
        print(f"{name:<48} " + "  ".join(f"{_column(result[name], i):6.3f}" for i in range(3)), flush=True)
    return {"checkpoints": CHECKPOINTS, "distance": result, "best": best, "seeds": seeds}


def _distances(toy: Toy, structure: str, options: AuxiliaryOptions, scale: float, decay: bool) -> list[float]:
    found: list[float] = []
    learn(
        toy, structure, options, steps=max(CHECKPOINTS), scale=scale, decay=decay,
        watch=lambda _, Q: found.append(toy.distance(Q)),
    )  # fmt: skip
    return found


def _average_of_inverses(toy: Toy) -> list[float]:
    total, found = torch.zeros(N, N, dtype=torch.float64), []
    for t in range(1, max(CHECKPOINTS) + 1):
        x = toy.batch()
        total += torch.linalg.inv(x.mT @ x / BATCH + GAMMA * torch.eye(N, dtype=torch.float64))
        if t in CHECKPOINTS:
            found.append(toy.distance(total / t))
    return found


def _invert_average(toy: Toy) -> list[float]:
    total, found = torch.zeros(N, N, dtype=torch.float64), []
    for t in range(1, max(CHECKPOINTS) + 1):
        x = toy.batch()
        total += x.mT @ x / BATCH
        if t in CHECKPOINTS:
            found.append(
                toy.distance(torch.linalg.inv(total / t + GAMMA * torch.eye(N, dtype=torch.float64)))
            )
    return found


def isotropic(seeds: int) -> dict[str, object]:
    """Structured Q: approximate-then-invert, isotropic learning, and learning with u ~ N(0, F⁻¹)."""
    rows: dict[str, list[dict[str, float]]] = {"diagonal": [], "block": [], "kronecker": []}
    for seed in range(seeds):
        toy = Toy(seed)

        for structure in rows:
            model_shape = (5, 20) if structure == "kronecker" else (1, N)
            exact = approximate_then_invert(toy.F_gamma, structure)
            natural = AuxiliaryOptions(groups=BATCH, vectorize=True)
            learned = learn(toy, structure, natural, steps=2000, scale=1 / GAMMA, shape=model_shape)
            draw = aimed_probe(toy, model_shape)
            probe = AuxiliaryOptions(estimator="probe", lr=1e-2, probe=draw, betas=(0.9, 0.999))
            aimed = learn(
                toy,
                structure,
                probe,
                steps=4000,
                scale=float(exact.trace()) / N,
                shape=model_shape,
                decay=True,
            )
            rows[structure].append(
                {
                    "isotropic optimum vs approximate-then-invert": float(
                        (learned - exact).norm() / exact.norm()
                    ),
                    "error, approximate-then-invert": toy.action_error(exact),
                    "error, learned with u ~ N(0, F⁻¹)": toy.action_error(aimed),
                }
            )
            row = rows[structure][-1]
            print(
                f"seed {seed} {structure:<10} " + "  ".join(f"{k}: {v:.3f}" for k, v in row.items()),
                flush=True,
            )
    for structure, values in rows.items():
        ratio = _mean(values, "error, learned with u ~ N(0, F⁻¹)") / _mean(
            values, "error, approximate-then-invert"
        )
        print(f"{structure:<10} learned error = {ratio:.3f} × approximate-then-invert")
    return {"rows": rows, "seeds": seeds}


def aimed_probe(toy: Toy, shape: tuple[int, int]) -> Callable[[torch.Generator], dict[str, Tensor]]:
    """Draws u ~ N(0, F⁻¹)."""

    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        z = torch.randn(N, generator=generator, dtype=torch.float64)
        return {"weight": (toy.inverse_root @ z).view(shape)}

    return draw


def family(seeds: int) -> dict[str, object]:
    """The gap to the family's optimum after 200 minibatches, for three initial scales and two dampings."""
    x, y, _, _ = split_digits()
    x = x.flatten(1).double()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 10)
    ).double()
    adam = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(15):
        for index in torch.randperm(len(x)).split(64):
            adam.zero_grad()
            nn.functional.cross_entropy(net(x[index]), y[index]).backward()
            adam.step()
    F = _layer_fisher(net, x, "2")
    mean = float(F.diagonal().mean())
    rows = []
    for relative in (0.1, 1.0):
        gamma = relative * mean
        F_gamma = F + gamma * torch.eye(len(F), dtype=F.dtype)
        optimum = _family_optimum(net, F_gamma, 1 / (mean + gamma))
        for scale in (1.0, 100.0, 1e4):
            gaps = []
            for seed in range(seeds):
                inverse = InverseFisher.from_model(net, "scaled-kronecker", scale=scale)
                generator = torch.Generator().manual_seed(seed)
                auxiliary = Auxiliary(net, inverse, Categorical(), gamma=gamma, generator=generator)
                batches = [x[torch.randint(0, len(x), (128,), generator=generator)] for _ in range(200)]
                auxiliary.learn(batches, steps=200, min_steps=200)
                gaps.append(float(_dense_loss(inverse, F_gamma).detach()) / optimum)
            rows.append({"relative damping": relative, "scale": scale, "gaps": [1 - gap for gap in gaps]})
            print(f"γ = {relative} × mean diag F, initial scale {scale:>7}: gap "
                  f"{statistics.mean(rows[-1]['gaps']):.2%}", flush=True)  # fmt: skip
    return {"rows": rows, "seeds": seeds, "minibatches": 200}


def _layer_fisher(net: nn.Module, x: Tensor, layer: str) -> Tensor:
    """The exact Fisher block of a layer: one h per example and class, without randomness."""

    class EachClass(Categorical):
        def cotangent(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
            p = f.detach().softmax(-1)
            unit = nn.functional.one_hot(torch.tensor(self.index), f.shape[-1]).to(f)
            return p.sqrt()[..., self.index : self.index + 1] * (unit - p)

    likelihood, total = EachClass(), 0.0
    for likelihood.index in range(10):  # Σ_k p_k (e_k − p)(e_k − p)ᵀ = diag(p) − ppᵀ
        h = sample_h(net, x, likelihood, groups=len(x), vectorize=True)
        H = torch.cat([h[f"{layer}.weight"], h[f"{layer}.bias"].unsqueeze(-1)], -1).flatten(1)
        total = total + H.mT @ H / len(x)
    return total


def _family_optimum(net: nn.Module, F_gamma: Tensor, scale: float) -> float:
    inverse = InverseFisher.from_model(net, "scaled-kronecker", scale=scale)
    parameters = list(inverse.operator("2").parameters())
    reference = float(torch.linalg.inv(F_gamma).trace())
    solver = torch.optim.LBFGS(
        parameters, max_iter=1500, history_size=30, line_search_fn="strong_wolfe", tolerance_grad=1e-10
    )

    def closure() -> Tensor:
        solver.zero_grad()
        loss = _dense_loss(inverse, F_gamma) / reference
        loss.backward()
        return loss

    solver.step(closure)
    return float(_dense_loss(inverse, F_gamma).detach())


def _dense_loss(inverse: InverseFisher, F_gamma: Tensor) -> Tensor:
    Q = inverse.operator("2").dense()
    return 0.5 * (Q * (F_gamma @ Q)).sum() - Q.trace()


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _column(rows: list[list[float]], index: int) -> float:
    return statistics.mean(row[index] for row in rows)


def _mean(rows: list[dict[str, float]], key: str) -> float:
    return statistics.mean(row[key] for row in rows)


def draw(name: str, result: dict) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axis = figure.subplots()
    if name == "toy-a":
        shown = {k: v for k, v in result["distance"].items() if not k.startswith("paper")}
        for label, rows in shown.items():
            axis.loglog(CHECKPOINTS, [_column(rows, i) for i in range(3)], marker="o", label=label)
        axis.set(xlabel="minibatches", ylabel="Riemannian distance to $F_γ^{-1}$", title="Full Q, n = 100")
        axis.legend(frameon=False, fontsize=8)
    elif name == "isotropic":
        keys = ["error, approximate-then-invert", "error, learned with u ~ N(0, F⁻¹)"]
        for i, key in enumerate(keys):
            heights = [_mean(rows, key) for rows in result["rows"].values()]
            axis.bar([x + 0.4 * i - 0.2 for x in range(3)], heights, width=0.4, label=key)
        axis.set_xticks(range(3), list(result["rows"]))
        axis.set(
            ylabel="relative error of Q u, u ~ N(0, F⁻¹)",
            title="Structured Q: the probes' covariance matters",
        )
        axis.legend(frameon=False)
    else:
        for relative in (0.1, 1.0):
            rows = [row for row in result["rows"] if row["relative damping"] == relative]
            gaps = [100 * statistics.mean(row["gaps"]) for row in rows]
            axis.semilogx(
                [row["scale"] for row in rows], gaps, marker="o", label=f"γ = {relative} × mean diag F"
            )
        axis.axhline(5, color="grey", linestyle="--", linewidth=0.8)
        axis.set(xlabel="initial scale of Q", ylabel="gap to the family's optimum, %", ylim=(0, 6),
                 title="D(LLᵀ⊗RRᵀ)D of a trained layer, 200 minibatches")  # fmt: skip
        axis.legend(frameon=False)
    return figure


def main(name: str, out: Path, seeds: int = 5) -> None:
    result = {"toy-a": toy_a, "isotropic": isotropic, "family": family}[name](seeds)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name.replace('-', '_')}.json"
    write_json(path, result)
    save_picture(draw(name, result), path.with_suffix(".png"))
    print(f"wrote {path}")
