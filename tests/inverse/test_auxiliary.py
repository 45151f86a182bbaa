"""What auxiliary steps estimate in expectation, and what they converge to."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from oracles import (
    categorical_fisher,
    damped_inverse,
    dense_auxiliary_loss,
    dense_fisher,
    flat_gradient,
    gaussian_fisher,
    packed_fisher,
    randomise_,
    unflatten,
)
from torch import Tensor, nn

from fishleg import Auxiliary, AuxiliaryOptions, InverseFisher

GAMMA = 0.05


def net(outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, outputs))


def inputs(count: int = 16) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(1))


def some_masks(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(p.shape, generator=generator) < 0.7 for name, p in model.named_parameters()}


def learner(
    model: nn.Module, x: Tensor, structure: str, repeats: int = 1, **options: Any
) -> tuple[Auxiliary, list[Tensor], Tensor]:
    """(auxiliary, loader, F): one output and as many h's as examples, so that mean hhᵀ = F exactly.

    Repeating the examples leaves F as it is and averages the noise of the damping term.
    """
    inverse = InverseFisher.from_model(model, structure, block_size=3)
    settings = AuxiliaryOptions(groups=repeats * len(x), vectorize=True, **options)
    auxiliary = Auxiliary(model, inverse, "gaussian", gamma=GAMMA, options=settings)
    return auxiliary, [x.repeat(repeats, 1)], dense_fisher(model, x, gaussian_fisher)


def relative_error(auxiliary: Auxiliary, F: Tensor, pattern: Callable[[int], Tensor] = torch.eye) -> float:
    """‖Q − T‖/‖T‖ (Frobenius, all layers) with T = (F∘pattern+γI)⁻¹ on the kept parameters, else 0."""
    difference = scale = 0.0
    for name, layer in auxiliary.inverse.layers.items():
        F_l = packed_fisher(auxiliary.model, F, layer.names)
        mask = auxiliary.inverse.mask(name)
        keep = torch.arange(len(F_l)) if mask is None else mask.flatten().nonzero()[:, 0]
        T = torch.zeros_like(F_l)
        T[keep[:, None], keep] = damped_inverse((F_l * pattern(len(F_l)))[keep][:, keep], GAMMA)
        difference += float((auxiliary.inverse.operator(name).dense().detach() - T).square().sum())
        scale += float(T.square().sum())
    return (difference / scale) ** 0.5


def everything(n: int) -> Tensor:
    return torch.ones(n, n)


def blocks_of_three(n: int) -> Tensor:
    return torch.block_diag(*[torch.ones(3, 3)] * n)[:n, :n]


def drawn_gradients(auxiliary: Auxiliary, x: Tensor, draws: int) -> Tensor:
    """∇λ of each of many steps at the same λ, [draws, λ]."""
    rows: list[Tensor] = []
    parameters = list(auxiliary.inverse.parameters())
    auxiliary._adam.step = lambda: rows.append(torch.cat([p.grad.flatten() for p in parameters]))
    for _ in range(draws):
        auxiliary.step(x)
    return torch.stack(rows)


ESTIMATES = {
    "trace": AuxiliaryOptions(estimator="trace", groups=8, vectorize=True),
    "trace, one h": AuxiliaryOptions(estimator="trace"),
    "probe, P=I": AuxiliaryOptions(estimator="probe"),
    "probe, P=Q": AuxiliaryOptions(estimator="probe", precondition=True),
    "probe, sampled products": AuxiliaryOptions(
        estimator="probe", exact_products=False, groups=8, vectorize=True
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("structure", "masked"), [("eigen-kronecker", False), ("block", True)])
@pytest.mark.parametrize("name", ESTIMATES)
def test_expected_gradient_is_that_of_the_dense_loss(name: str, structure: str, masked: bool) -> None:
    """E over labels, groups and probes, within 5 standard errors of the mean of the draws."""
    options, model, x, gamma = ESTIMATES[name], net(outputs=3), inputs(8), 2.0
    inverse = randomise_(
        InverseFisher.from_model(model, structure, block_size=3), torch.Generator().manual_seed(2)
    )
    if masked:
        inverse.restrict(some_masks(model))
    F = dense_fisher(model, x, categorical_fisher)
    loss, n = torch.zeros(()), 0
    for layer_name, layer in inverse.layers.items():
        mask = inverse.mask(layer_name)
        keep = torch.ones(layer.shape).bool().flatten() if mask is None else mask.flatten()
        n += int(keep.sum())
        Q = inverse.unmasked(layer_name).dense()[keep][:, keep]
        F_l = packed_fisher(model, F, layer.names)[keep][:, keep]
        if options.precondition:  # ∇ of uᵀQ·P(F_γQu − u), P and the bracket held constant
            residual = F_l @ Q + gamma * Q - torch.eye(len(Q))
            loss = loss + torch.trace(Q @ (Q @ residual).detach())
        else:
            loss = loss + dense_auxiliary_loss(Q, F_l, gamma)
    if options.estimator == "probe":  # E[uuᵀ/‖u‖²] = I/n
        loss = loss / n
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(inverse.parameters()))])
    auxiliary = Auxiliary(model, inverse, "categorical", gamma=gamma, options=options)
    draws = drawn_gradients(auxiliary, x, {"trace": 80, "trace, one h": 320}.get(name, 200))
    error = draws.std(0) / len(draws) ** 0.5
    assert bool(((draws.mean(0) - expected).abs() <= 5 * error + 1e-12).all())
    assert float(error.norm()) < 0.15 * float(expected.norm()), "too few draws for the test to mean anything"


@pytest.mark.slow
@pytest.mark.parametrize(("structure", "pattern"), [("diagonal", torch.eye), ("block", blocks_of_three)])
@pytest.mark.parametrize(("estimator", "repeats"), [("auto", 1), ("natural", 1), ("trace", 32)])
def test_isotropic_optimum_is_approximate_then_invert(
    structure: str, pattern: Callable[[int], Tensor], estimator: str, repeats: int
) -> None:
    auxiliary, loader, F = learner(net(), inputs(), structure, repeats, estimator=estimator, lr=0.06)
    assert relative_error(auxiliary, F, pattern) > 0.9
    auxiliary.learn(loader, 250, tolerance=0.0)
    assert relative_error(auxiliary, F, pattern) < 0.03
    assert relative_error(auxiliary, F, everything) > 0.06, "too easy: the structure holds the whole inverse"


def learned_diagonal(model: nn.Module, x: Tensor, probe: Any, steps: int) -> Tensor:
    inverse = InverseFisher.from_model(model, "diagonal")
    options = AuxiliaryOptions(estimator="probe", lr=0.1, probe=probe)
    Auxiliary(model, inverse, "gaussian", gamma=GAMMA, options=options).learn([x], steps, tolerance=0.0)
    diagonal = inverse.diag()
    return torch.cat([diagonal[name].detach().flatten() for name, _ in model.named_parameters()])


def best_diagonal(F_damped: Tensor, directions: Tensor) -> Tensor:
    """argmin_q E[½ uᵀQF_γQu − uᵀQu] over Q = diag(q), u = directions: (F_γ∘C) q = diag(C)."""
    u = nn.functional.normalize(directions, dim=1)
    C = u.T @ u / len(u)
    return torch.linalg.solve(F_damped * C, C.diagonal())


@pytest.mark.slow
def test_covariance_of_the_probe_given_by_the_user() -> None:
    """u ~ F_γ^(−½): the optimum moves away from the isotropic one, and is reached."""
    model, x = net(), inputs()
    F_damped = dense_fisher(model, x, gaussian_fisher) + GAMMA * torch.eye(11)
    directions = torch.randn(24, 11) @ torch.linalg.inv(torch.linalg.cholesky(F_damped))
    turns = cycle(unflatten(u, dict(model.named_parameters())) for u in directions)
    q = learned_diagonal(model, x, lambda generator: next(turns), 400)
    best, isotropic = best_diagonal(F_damped, directions), 1 / F_damped.diagonal()
    assert float((best - isotropic).norm() / best.norm()) > 0.2
    assert float((q - best).norm() / best.norm()) < 0.03


@pytest.mark.slow
def test_gradient_probes() -> None:
    """u = h, whose distribution over ±1 cotangents is written out here."""
    model, x = net(), inputs(5)
    F_damped = dense_fisher(model, x, gaussian_fisher) + GAMMA * torch.eye(11)
    J = torch.stack([flat_gradient(f, list(model.parameters())) for f in model(x)[:, 0]])
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 5)
    q = learned_diagonal(model, x, "gradient", 400)
    best, isotropic = best_diagonal(F_damped, signs @ J), 1 / F_damped.diagonal()
    assert float((best - isotropic).norm() / best.norm()) > 0.2
    assert float((q - best).norm() / best.norm()) < 0.03


def correlated(count: int = 24) -> Tensor:
    z = torch.randn(count, 6, generator=torch.Generator().manual_seed(0))
    return z[:, :1] + 0.6 * z[:, 1:]


MASK = {"0.weight": torch.tensor([[True, False, True, True, False]])}


@pytest.mark.slow
@pytest.mark.parametrize(("estimator", "repeats"), [("auto", 1), ("trace", 24)])
@pytest.mark.parametrize("structure", ["full", "triangular"])
def test_masked_converges_to_the_inverse_of_the_kept_block(
    structure: str, estimator: str, repeats: int
) -> None:
    """A full factor is downdated at once and stays; masking alone (triangular) is wrong until it learns."""
    model, options = nn.Sequential(nn.Linear(5, 1)), {"estimator": estimator, "lr": 0.06}
    auxiliary, loader, F = learner(model, correlated(), structure, repeats, **options)
    auxiliary.learn(loader, 250, tolerance=0.0)
    assert relative_error(auxiliary, F, everything) < 0.02
    auxiliary.inverse.restrict(MASK)
    if structure == "full":
        assert relative_error(auxiliary, F, everything) < 0.02
    else:
        assert relative_error(auxiliary, F, everything) > 0.15
    for _ in range(2):
        auxiliary.learn(loader, 100, tolerance=0.0)
        if structure == "full":
            assert relative_error(auxiliary, F, everything) < 0.02
    assert relative_error(auxiliary, F, everything) < 0.02
    Q, removed = auxiliary.inverse.operator("0").dense(), ~auxiliary.inverse.mask("0").flatten()
    assert not Q[removed].any()
    assert not Q[:, removed].any()


@pytest.mark.slow
def test_masked_probe_learns_the_kept_block() -> None:
    model = nn.Sequential(nn.Linear(5, 1))
    inverse = InverseFisher.from_model(model, "full")
    inverse.restrict(MASK)
    options = AuxiliaryOptions(estimator="probe", lr=0.05)
    auxiliary = Auxiliary(model, inverse, "gaussian", gamma=GAMMA, options=options)
    F = dense_fisher(model, correlated(), gaussian_fisher)
    auxiliary.learn([correlated()], 500, tolerance=0.0)
    assert relative_error(auxiliary, F, everything) < 0.03
