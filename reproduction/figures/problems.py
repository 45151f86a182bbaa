"""Problems whose Fisher matrix is known: linear models, Gaussian outputs, inputs of covariance F."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fishleg import AuxiliaryOptions
from fishleg.curvature.layers import register_layer
from fishleg.curvature.likelihoods import Gaussian
from fishleg.curvature.samples import sample_h
from fishleg.inverse.auxiliary import Auxiliary
from fishleg.inverse.inverse_fisher import InverseFisher

DTYPE = torch.float64


class Projection(nn.Module):
    """f = x·vec(W) for W [rows, columns]: with x ~ N(0, F) and unit variance its Fisher matrix is F."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns, dtype=DTYPE))

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, n] → f [batch, 1]."""
        return (x @ self.weight.flatten()).unsqueeze(-1)


register_layer(Projection, [("weight", None)])


class SideBySide(nn.Module):
    """Projections that share nothing: x [batch, count, n] → f [batch, count]."""

    def __init__(self, count: int, shape: tuple[int, int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Projection(*shape) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """All outputs at once: one product instead of one for each layer."""
        weights = torch.stack([layer.weight.flatten() for layer in self.layers])  # type: ignore[operator]
        return torch.einsum("bsn,sn->bs", x, weights)


class Problem:
    """A Fisher matrix with given eigenvalues; its basis is random unless given."""

    def __init__(self, values: Tensor, gamma: float, seed: int, *, basis: Tensor | None = None) -> None:
        n = len(values)
        generator = torch.Generator().manual_seed(seed)
        self.n, self.gamma, self.values = n, gamma, values
        random: Tensor = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=DTYPE))[0]
        self.basis = random if basis is None else basis
        self.w = torch.randn(n, generator=generator, dtype=DTYPE) / math.sqrt(n)  # true weights
        self.root = self.basis * values.sqrt()  # x = root z ~ N(0, F)
        self.inverse_root = self.basis * values.rsqrt()  # u = inverse_root z ~ N(0, F⁻¹)
        self.F = self.root @ self.root.mT
        self.F_gamma = self.F + gamma * torch.eye(n, dtype=DTYPE)
        self.inverse = (self.basis / (values + gamma)) @ self.basis.mT
        self.optimum = -0.5 * float((1 / (values + gamma)).sum())  # of the auxiliary loss, for isotropic u

    def distance(self, Q: Tensor) -> float:
        """Affine-invariant Riemannian distance between Q and F_γ⁻¹."""
        return riemannian(Q, self.F_gamma)

    def action_error(self, Q: Tensor, *, aimed: bool = True) -> float:
        """E‖(Q − F_γ⁻¹)u‖² / E‖F_γ⁻¹u‖² for u ~ N(0, F⁻¹), or isotropic u."""
        error, scale = Q - self.inverse, self.inverse
        if aimed:
            error, scale = error @ self.inverse_root, scale @ self.inverse_root
        return float(error.square().sum() / scale.square().sum())

    def loss(self, Q: Tensor) -> float:
        """The auxiliary loss ½Tr(QF_γQ) − Tr(Q), without noise."""
        return float(0.5 * (Q * (self.F_gamma @ Q)).sum() - Q.trace())

    def gap(self, Q: Tensor, *, aimed: bool = False) -> float:
        """How far the auxiliary loss is above its minimum, relative to that minimum.

        `aimed`: the loss for u ~ N(0, F⁻¹), ½Tr(QF_γQΣ) − Tr(QΣ) with Σ = F⁻¹, minimal at the same F_γ⁻¹.
        """
        if not aimed:
            return 1 - self.loss(Q) / self.optimum
        QR = Q @ self.inverse_root
        loss = 0.5 * (QR * (self.F_gamma @ QR)).sum() - (QR * self.inverse_root).sum()
        return 1 + float(loss / (0.5 / (self.values * (self.values + self.gamma))).sum())

    def mse(self, w: Tensor) -> float:
        """Test error of the weights w where the truth is `self.w`: E(x·(w − w*))², over all inputs."""
        delta = w.flatten() - self.w
        return float(delta @ self.F @ delta)


def riemannian(Q: Tensor, precision: Tensor) -> float:
    """Affine-invariant Riemannian distance between Q and the inverse of `precision`."""
    C = torch.linalg.cholesky(precision)
    values = torch.linalg.eigvalsh(C.mT @ Q @ C)
    return float(values.log().square().sum().sqrt())


class Ensemble:
    """Independent problems as the layers of one model, learned side by side by the library.

    Each output depends on one layer alone, so that the Fisher matrix of the model is block-diagonal and the
    layers do not disturb each other: seeds cost little more than one.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        seed: int,
        *,
        shape: tuple[int, int] | None = None,
        batch: int = 100,
    ) -> None:
        self.problems, self.size = list(problems), batch
        self.shape = shape or (1, problems[0].n)
        self.model = SideBySide(len(problems), self.shape)
        self.names = [f"layers.{i}" for i in range(len(problems))]
        self.roots = torch.stack([problem.root for problem in problems])
        self.generator = torch.Generator().manual_seed(seed)
        self.gamma = problems[0].gamma

    def batch(self, size: int | None = None) -> Tensor:
        """Inputs of all problems, [size, count, n]."""
        count, n, _ = self.roots.shape
        z = torch.randn(count, size or self.size, n, generator=self.generator, dtype=DTYPE)
        return (z @ self.roots.mT).transpose(0, 1)

    def gradients(self, x: Tensor, groups: int | None = None) -> list[Tensor]:
        """By problem: vectors h [groups, n] with E[hhᵀ] = F, one per example unless `groups` is given."""
        h = sample_h(
            self.model, x, Gaussian(), groups=groups or len(x), generator=self.generator, vectorize=True
        )
        return [h[f"{name}.weight"].flatten(1) for name in self.names]

    def inverse(self, structure: str, scale: float, *, block_size: int = 20) -> InverseFisher:
        """Q = scale · I for every problem."""
        return InverseFisher.from_model(self.model, structure, scale=scale, block_size=block_size)

    def auxiliary(self, inverse: InverseFisher, options: AuxiliaryOptions) -> Auxiliary:
        """The object that learns Q, with the generator of this ensemble."""
        return Auxiliary(
            self.model, inverse, Gaussian(), gamma=self.gamma, options=options, generator=self.generator
        )

    def dense(self, inverse: InverseFisher) -> list[Tensor]:
        """Q of each problem as a matrix."""
        return [inverse.operator(name).dense().detach() for name in self.names]

    def aimed(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Probes u ~ N(0, F⁻¹) for `AuxiliaryOptions.probe`."""
        draws = {}
        for name, problem in zip(self.names, self.problems, strict=True):
            z = torch.randn(problem.n, generator=generator, dtype=DTYPE)
            draws[f"{name}.weight"] = (problem.inverse_root @ z).view(self.shape)
        return draws

    def learn(
        self,
        inverse: InverseFisher,
        options: AuxiliaryOptions,
        steps: int,
        *,
        decay: bool = True,
        watch: Callable[[int], None] | None = None,
        at: Sequence[int] = (),
    ) -> Auxiliary:
        """`steps` auxiliary steps, its rate falling to zero if `decay`; `watch(t)` after each t in `at`."""
        auxiliary = self.auxiliary(inverse, options)
        wanted = set(at)
        for t in range(1, steps + 1):
            auxiliary.step(self.batch(), lr_factor=1 - (t - 1) / steps if decay else 1.0)
            if watch is not None and t in wanted:
                watch(t)
        return auxiliary


def paper_options(lr: float, **changes: object) -> AuxiliaryOptions:
    """The paper's estimator: probes, exact Fisher-vector products, Adam with its usual constants."""
    return AuxiliaryOptions(estimator="probe", lr=lr, betas=(0.9, 0.999), **changes)  # type: ignore[arg-type]


def our_options(batch: int, **changes: object) -> AuxiliaryOptions:
    """The library's default, with every example of a batch as a sample of its own."""
    return AuxiliaryOptions(groups=batch, vectorize=True, **changes)  # type: ignore[arg-type]


def exponential(n: int, length: float) -> Tensor:
    """Eigenvalues e^{−i/length}, i = 0 … n−1."""
    return torch.exp(-torch.arange(n, dtype=DTYPE) / length)


def nearest_kronecker(F: Tensor, left: int, right: int) -> tuple[Tensor, Tensor]:
    """A [..., left, left] and B [..., right, right], positive, with A⊗B nearest to F [..., n, n].

    The leading singular pair of the permuted matrix (Van Loan and Pitsianis), from its small Gram matrix.
    """
    batch = F.shape[:-2]
    folded = F.reshape(*batch, left, right, left, right).transpose(-3, -2)
    permuted = folded.reshape(*batch, left * left, right * right)
    a: Tensor = torch.linalg.eigh(permuted @ permuted.mT)[1][..., -1:]
    b = permuted.mT @ a
    A, B = a.reshape(*batch, left, left), b.reshape(*batch, right, right)
    trace = A.diagonal(dim1=-2, dim2=-1).sum(
        -1
    )  # sign and scale are arbitrary; they are fixed so that A and B can be averaged
    scale = (left / trace)[..., None, None]
    return A * scale, B / scale


def blocks_only(F: Tensor, size: int) -> Tensor:
    """F with everything outside its diagonal blocks set to zero."""
    index = torch.arange(len(F)) // size
    return F * (index[:, None] == index[None, :])


def approximate_then_invert(
    F: Tensor, structure: str, *, block_size: int = 20, shape: tuple[int, int] = (5, 20)
) -> Tensor:
    """F in the structure (nearest Kronecker product by permuted SVD), then inverted."""
    if structure == "diagonal":
        F = torch.diag(F.diagonal())
    elif structure == "block":
        F = blocks_only(F, block_size)
    elif structure == "kronecker":
        F = torch.kron(*nearest_kronecker(F, *shape))
    inverse: Tensor = torch.linalg.inv(F)
    return inverse


def problem_of(settings: dict[str, Any], seed: int, n: int | None = None) -> Problem:
    """The problem of one seed."""
    return Problem(exponential(n or settings["n"], settings["decay length"]), settings["gamma"], seed)


def problems_of(settings: dict[str, Any]) -> list[Problem]:
    """The problems of all seeds."""
    return [problem_of(settings, seed) for seed in range(settings["seeds"])]


def tried_rates(rates: Sequence[float], final: Callable[[float], float]) -> dict[float, float]:
    """The value of `final` for each rate; infinite if the run diverged."""
    found = {}
    for rate in rates:
        try:
            found[rate] = final(rate)
        except ValueError:  # raised by the library for gradients that are not finite
            found[rate] = math.inf
    return found


def best_rate(gaps: Mapping[str, float | None]) -> float:
    """The learning rate whose run ended best; diverged runs count as infinitely bad."""
    return float(min(gaps, key=lambda rate: _or_infinite(gaps[rate])))


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None or not math.isfinite(value) else value
