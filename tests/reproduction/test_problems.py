"""Problems with a known Fisher matrix: their scores, and Q learned on them."""

from itertools import product

import pytest
import torch

from reproduction.figures.problems import (
    Ensemble,
    Problem,
    approximate_then_invert,
    exponential,
    nearest_kronecker,
    our_options,
    paper_options,
    riemannian,
)

pytestmark = pytest.mark.slow


def test_an_ensemble_learns_each_problem_as_if_alone() -> None:
    problems = [Problem(exponential(12, 4), 0.05, seed) for seed in range(3)]
    ensemble = Ensemble(problems, 0, batch=50)
    inverse = ensemble.inverse("full", 1.0)
    ensemble.learn(inverse, our_options(50), 400)
    for problem, Q in zip(problems, ensemble.dense(inverse), strict=True):
        assert problem.distance(Q) < 0.15
        assert 0 <= problem.gap(Q) < 1e-2
    h = ensemble.gradients(ensemble.batch(20_000))
    for problem, samples in zip(problems, h, strict=True):
        torch.testing.assert_close(samples.mT @ samples / len(samples), problem.F, atol=0.05, rtol=0)


def test_aimed_probes_serve_their_aim() -> None:
    problem = Problem(exponential(20, 6), 0.01, 0)
    ensemble = Ensemble([problem], 0, batch=50)
    start = 1 / float(problem.F_gamma.diagonal().mean())
    inverse = ensemble.inverse("diagonal", start)
    ensemble.learn(inverse, paper_options(0.05, probe=ensemble.aimed), 600)
    (aimed,) = ensemble.dense(inverse)
    inverted = approximate_then_invert(problem.F_gamma, "diagonal")
    assert problem.action_error(aimed) < 0.8 * problem.action_error(inverted)


def test_problem_and_its_scores() -> None:
    problem = Problem(exponential(6, 2), 0.1, 3)
    torch.testing.assert_close(problem.inverse @ problem.F_gamma, torch.eye(6, dtype=torch.float64))
    assert problem.distance(problem.inverse) < 1e-6
    assert riemannian(problem.inverse * torch.e, problem.F_gamma) == pytest.approx(6**0.5)
    assert problem.gap(problem.inverse) == pytest.approx(0, abs=1e-12)
    assert problem.action_error(2 * problem.inverse) == pytest.approx(1)
    assert problem.mse(problem.w) == 0


def test_nearest_kronecker_is_the_permuted_svd() -> None:
    F = torch.stack([Problem(exponential(12, 5), 0.1, seed).F_gamma for seed in range(2)])
    A, B = nearest_kronecker(F, 3, 4)
    for f, a, b in zip(F, A, B, strict=True):
        permuted = torch.stack([f[4 * i : 4 * i + 4, 4 * j : 4 * j + 4].flatten()
                                for i, j in product(range(3), repeat=2)])  # fmt: skip
        best = torch.linalg.svdvals(permuted)[1:].square().sum()
        torch.testing.assert_close((f - torch.kron(a, b)).square().sum(), best)
        assert torch.linalg.eigvalsh(a).min() > 0
        assert torch.linalg.eigvalsh(b).min() > 0
