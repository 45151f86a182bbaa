"""A real layer whose exact F is known: structures of Q, KFAC for comparison, and refining Q.

The layer is the hidden one of a small classifier of digits, 16 × 65 parameters. The gap of Q is
its auxiliary loss minus that of F_γ⁻¹, relative to the size of the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fishleg import AuxiliaryOptions, PruningOptions
from fishleg.inverse import estimate_inverse, make_problem
from fishleg.inverse.auxiliary import Auxiliary
from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.inverse.operators import Operator
from fishleg.pruning.compensation import compensate
from fishleg.pruning.saliency import saliency
from fishleg.workloads.digits import split_digits
from reproduction.figures.problems import DTYPE, paper_options, riemannian
from reproduction.harness import Progress, Results, Unit, band, columns, mean_sem, run_figure

NAME = "layer"
STRUCTURES = ("diagonal", "kronecker", "scaled-kronecker", "ekfac", "eigen-kronecker")
INVERTED = {"kfac": "KFAC, inverted", "ekfac": "EKFAC, inverted"}  # F approximated, then inverted
ESTIMATORS = ("ours", "paper")
STARTS = ("refined", "anew")
_BATCH, _GROUPS = 128, 16


def run(out: Path, *, smoke: bool = False, progress: Progress = print) -> Results:
    """Structures on one layer, and Q after a pruning: refined or learned anew."""
    settings: dict[str, Any] = {
        "examples": 60 if smoke else 500,
        "width": 3 if smoke else 16,
        "seeds": 1 if smoke else 2,
        "steps": 4 if smoke else 300,
        "iterations": 3 if smoke else 200,  # of L-BFGS, towards a structure's optimum
        "rates": [0.03] if smoke else [0.003, 0.01, 0.03, 0.1],  # of the paper's estimator
        "checks": [1, 4] if smoke else [1, 4, 16, 64, 256],  # auxiliary steps after the pruning
        "version": 1,
    }
    units: list[Unit] = []
    for seed in range(settings["seeds"]):
        for structure in STRUCTURES:
            key = f"{structure}, seed {seed}"
            units.append(Unit(f"learned, {key}", _learned(settings, structure, seed), 2))
            units.append(Unit(f"optimum, {key}", _optimum(settings, structure, seed), 3))
        units += [
            Unit(f"inverted, {method}, seed {seed}", _inverted(settings, method, seed), 2)
            for method in INVERTED
        ]
        units.append(Unit(f"pruned, ours, seed {seed}", _pruned(settings, "ours", seed), 4))
        units.append(Unit(f"pruned, paper, seed {seed}", _pruned(settings, "paper", seed), 10))
    return run_figure(
        out / f"{NAME}.json",
        settings,
        units,
        summary=lambda results: _summary(settings, results),
        draw=lambda record: {"": _draw(settings, record["units"], record["summary"])},
        smoke=smoke,
        progress=progress,
    )


class Digits(nn.Module):
    """A small classifier; all but its hidden layer is frozen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, width, dtype=DTYPE)
        self.last = nn.Linear(width, 10, dtype=DTYPE)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, 64] → logits."""
        logits: Tensor = self.last(torch.tanh(self.hidden(x)))
        return logits


class RealLayer:
    """A trained classifier, its inputs, and a damping: a tenth of F's mean diagonal after the training."""

    def __init__(self, examples: int, seed: int = 0, width: int = 16) -> None:
        images, labels, _, _ = split_digits()
        self.x, y = images.flatten(1).to(DTYPE)[:examples], labels[:examples]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = Digits(width)
        adam = torch.optim.Adam(self.model.parameters(), lr=0.01)
        for _ in range(100):
            adam.zero_grad()
            nn.functional.cross_entropy(self.model(self.x), y).backward()
            adam.step()
        self.model.last.requires_grad_(False)
        self.gamma = 0.1 * float(self.fisher().diagonal().mean())

    @torch.no_grad()
    def fisher(self) -> Tensor:
        """The exact F of the hidden layer at the current weights; rows are packed as (W, b)."""
        x, model = self.x, self.model
        h = torch.tanh(model.hidden(x))
        p = model.last(h).softmax(-1)
        # ∂f/∂(W x + b) = V diag(1 − h²); the layer's Jacobian is that ⊗ [x, 1]
        A = model.last.weight[None] * (1 - h.square())[:, None, :]
        inputs = torch.cat([x, torch.ones(len(x), 1, dtype=DTYPE)], 1)
        J = torch.einsum("bko,bi->bkoi", A, inputs).flatten(2)
        centred = J - torch.einsum("bk,bkn->bn", p, J)[:, None]
        rows = (p.sqrt()[:, :, None] * centred).flatten(0, 1)
        F: Tensor = rows.mT @ rows / len(x)
        return F

    def damped(self) -> Tensor:
        """F_γ."""
        F = self.fisher()
        return F + self.gamma * torch.eye(len(F), dtype=DTYPE)

    def gap(self, Q: Tensor, kept: Tensor | None = None) -> float:
        """The gap of Q [n, n] at the current weights, or of Q [kept, kept] for the kept weights alone."""
        F_gamma = self.damped() if kept is None else self.damped()[kept][:, kept]
        optimum = -0.5 * float(torch.linalg.inv(F_gamma).trace())
        return 1 - float(_loss(Q, F_gamma)) / optimum

    def judge(self, operator: Operator) -> dict[str, float]:
        """Gap and distance of Q to the inverse."""
        Q = operator.dense().detach()
        return {"gap": self.gap(Q), "distance": riemannian(Q, self.damped())}

    def learner(self, structure: str, options: AuxiliaryOptions, scale: float | None = None) -> Auxiliary:
        """A new Q of the layer, with the object that learns it."""
        return Auxiliary(
            self.model, InverseFisher.from_model(self.model, structure, scale=scale), "categorical",
            gamma=self.gamma, generator=torch.Generator().manual_seed(0), options=options,
        )  # fmt: skip

    def batches(self, count: int, seed: int = 1) -> list[Tensor]:
        """Minibatches of the inputs."""
        generator = torch.Generator().manual_seed(seed)
        return [self.x[torch.randint(len(self.x), (_BATCH,), generator=generator)] for _ in range(count)]

    @torch.no_grad()
    def prune(self, operator: Operator, share: float = 0.5) -> Tensor:
        """Remove that share of the hidden weights, those of the least saliency, with joint compensation.

        Says which are kept [width, inputs + 1].
        """
        hidden = self.model.hidden
        w = torch.cat([hidden.weight, hidden.bias[:, None]], 1)
        scores = saliency(w, operator)
        scores[:, -1] = torch.inf  # the biases stay
        removed = torch.zeros_like(w, dtype=torch.bool).flatten()
        removed[scores.flatten().argsort()[: round(share * hidden.weight.numel())]] = True
        new = w + compensate(w, operator, removed.view_as(w)).delta
        hidden.weight.copy_(new[:, :-1])
        hidden.bias.copy_(new[:, -1])
        return ~removed.view_as(w)


def _layer(settings: dict[str, Any], seed: int) -> RealLayer:
    return RealLayer(settings["examples"], seed, settings["width"])


def _loss(Q: Tensor, F_gamma: Tensor) -> Tensor:
    return 0.5 * (Q * (F_gamma @ Q)).sum() - Q.trace()


def _ours() -> AuxiliaryOptions:
    return AuxiliaryOptions(groups=_GROUPS, vectorize=True)


def _teach(learning: Auxiliary, batches: Sequence[Tensor]) -> Operator:
    for batch in batches:
        learning.step(batch)
    return learning.inverse.operator("hidden")


def _learned(settings: dict[str, Any], structure: str, seed: int) -> Callable[[Results], Any]:
    """Q learned as the library does it."""

    def compute(_: Results) -> Any:
        layer = _layer(settings, seed)
        return layer.judge(_teach(layer.learner(structure, _ours()), layer.batches(settings["steps"])))

    return compute


def _optimum(settings: dict[str, Any], structure: str, seed: int) -> Callable[[Results], Any]:
    """The best Q of the structure: L-BFGS on the exact loss, from the learned one."""

    def compute(_: Results) -> Any:
        layer = _layer(settings, seed)
        operator = _teach(layer.learner(structure, _ours()), layer.batches(settings["steps"]))
        F_gamma = layer.damped()
        parameters = [p for p in operator.parameters() if p.requires_grad]
        descent = torch.optim.LBFGS(
            parameters, max_iter=settings["iterations"], history_size=50, tolerance_change=1e-12,
            line_search_fn="strong_wolfe",
        )  # fmt: skip

        def closure() -> float:
            descent.zero_grad()
            loss = _loss(operator.dense(), F_gamma)
            loss.backward()
            return float(loss.detach())

        descent.step(closure)
        return layer.judge(operator)

    return compute


def _inverted(settings: dict[str, Any], method: str, seed: int) -> Callable[[Results], Any]:
    """F in Kronecker form from as many gradients as the learned Q had, then inverted."""

    def compute(_: Results) -> Any:
        layer = _layer(settings, seed)
        samples = {"samples": _GROUPS * settings["steps"], "sub_batch": _BATCH // _GROUPS}
        options = PruningOptions(method=method, gamma=layer.gamma, **samples)
        batches = layer.batches(settings["steps"])
        inverse, _ = estimate_inverse(make_problem(layer.model, batches, "categorical", options=options))
        return layer.judge(inverse.operator("hidden"))

    return compute


def _pruned(settings: dict[str, Any], who: str, seed: int) -> Callable[[Results], Any]:
    """Gaps at the pruned model by the number of auxiliary steps there, for the old Q and for a new one.

    What counts is the inverse for the kept weights, (F_MM + γI)⁻¹. The paper's estimator minimises its loss
    over the masked Q; ours goes on with all weights, and Q is conditioned on the removed ones being zero.
    """
    structure = "eigen-kronecker" if who == "ours" else "scaled-kronecker"

    def learner(layer: RealLayer, rate: float | None) -> Auxiliary:
        options = _ours() if rate is None else paper_options(rate, precondition=True)
        return layer.learner(structure, options, None if rate is None else 1 / layer.gamma)

    def gap(layer: RealLayer, learning: Auxiliary, keep: Tensor | None = None) -> float:
        Q = learning.inverse.operator("hidden").dense().detach()
        if keep is None:
            return layer.gap(Q)
        kept = keep.flatten()
        # the conditioned Q is the inverse of Q's inverse among the kept
        Q = torch.linalg.inv(torch.linalg.inv(Q)[kept][:, kept]) if who == "ours" else Q[kept][:, kept]
        return layer.gap(Q, kept)

    def restrict(learning: Auxiliary, keep: Tensor) -> None:
        if who == "paper":
            learning.inverse.restrict({"hidden.weight": keep[:, :-1]})  # the biases stay

    def gaps(layer: RealLayer, learning: Auxiliary, keep: Tensor) -> list[float]:
        restrict(learning, keep)
        found, batches = [], layer.batches(settings["checks"][-1], seed=2)
        for step, batch in enumerate(batches, 1):
            learning.step(batch)
            if step in settings["checks"]:
                found.append(gap(layer, learning, keep))
        return found

    def compute(_: Results) -> Any:
        layer = _layer(settings, seed)
        reference = _teach(layer.learner("eigen-kronecker", _ours()), layer.batches(settings["steps"]))
        rates: list[float | None] = [None] if who == "ours" else list(settings["rates"])
        taught = {rate: learner(layer, rate) for rate in rates}
        for learning in taught.values():
            _teach(learning, layer.batches(settings["steps"]))
        before = {rate: gap(layer, learning) for rate, learning in taught.items()}
        keep = layer.prune(reference)  # the same for all
        for learning in taught.values():
            restrict(learning, keep)
        after = {rate: gap(layer, learning, keep) for rate, learning in taught.items()}
        kept = min(rates, key=lambda rate: before[rate])  # the rate that was best before the pruning
        if who == "ours":
            taught[kept].reconfigure(eta_floor=0.05)
        found = {"refined": gaps(layer, taught[kept], keep), "rate": kept}
        fresh = {rate: gaps(layer, learner(layer, rate), keep) for rate in rates}
        found["anew"] = fresh[min(rates, key=lambda rate: fresh[rate][-1])]  # the rate that ended best
        return {**found, "before": before[kept], "right after": after[kept]}

    return compute


def _summary(settings: dict[str, Any], results: Results) -> Results:
    seeds = range(settings["seeds"])

    def over_seeds(key: str) -> Results:
        found = [results[f"{key}, seed {seed}"] for seed in seeds]
        return {kind: mean_sem([one[kind] for one in found]) for kind in ("gap", "distance")}

    structures = {
        name: {"learned": over_seeds(f"learned, {name}"), "optimum": over_seeds(f"optimum, {name}")}
        for name in STRUCTURES
    }
    pruned: Results = {}
    for who in ESTIMATORS:
        units = [results[f"pruned, {who}, seed {seed}"] for seed in seeds]
        pruned[who] = {kind: mean_sem([unit[kind] for unit in units]) for kind in ("before", "right after")}
        for start in STARTS:
            rows = columns([unit[start] for unit in units])
            pruned[who][start] = {
                str(step): mean_sem(row) for step, row in zip(settings["checks"], rows, strict=True)
            }
    inverted = {INVERTED[method]: over_seeds(f"inverted, {method}") for method in INVERTED}
    return {"structures": structures, "inverted": inverted, "pruned": pruned}


def _draw(settings: dict[str, Any], results: Results, found: Results) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.2), layout="constrained")
    structures, pruned = figure.subplots(1, 2)
    bars = {
        name: (value["learned"]["gap"], value["optimum"]["gap"])
        for name, value in found["structures"].items()
    }
    bars |= {name: (value["gap"], None) for name, value in found["inverted"].items()}
    for place, (learned, optimum) in enumerate(bars.values()):
        structures.errorbar(learned["mean"], place, xerr=learned["sem"], marker="o", color="tab:blue")
        if optimum is not None:
            structures.plot(optimum["mean"], place, marker="|", markersize=14, color="black")
    structures.set_yticks(range(len(bars)), list(bars))
    structures.invert_yaxis()
    structures.set_xlim(left=0)
    structures.grid(alpha=0.3, axis="x")
    structures.set(xlabel="auxiliary loss above its minimum, relative (line: the structure's optimum)")
    structures.set_title("Q of a real layer")
    for who, colour in zip(ESTIMATORS, ("tab:green", "tab:red"), strict=True):
        for start, style in zip(STARTS, ("-", "--"), strict=True):
            rows = [results[f"pruned, {who}, seed {seed}"][start] for seed in range(settings["seeds"])]
            band(
                pruned, settings["checks"], rows, f"{who}, {start}", color=colour, linestyle=style, marker="o"
            )
    pruned.set(xscale="log", yscale="log", xlabel="auxiliary steps after half of the weights were pruned")
    pruned.set(ylabel="auxiliary loss above its minimum, relative", title="Q after a pruning")
    pruned.grid(alpha=0.3)
    pruned.legend(frameon=False, fontsize=8)
    return figure
