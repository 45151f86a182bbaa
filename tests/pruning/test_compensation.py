"""Compensation against brute-force solutions of the same constrained problem."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from obs_problems import STRUCTURES, brute_force, problem, small
from operator_makers import Dims, make
from torch import Tensor

from fishleg.inverse.operators import FullFactor, Gram, Kronecker, Operator
from fishleg.pruning.compensation import compensate, solve_removed
from fishleg.pruning.mask_search import swap_curvature, swap_scores
from fishleg.pruning.saliency import saliency

COUPLED = [name for name in STRUCTURES if name not in ("identity", "diagonal")]


PRECISE = {"iterations": 500, "tolerance": 1e-12}


def increase(q: Operator, delta: Tensor) -> float:
    return 0.5 * float(delta.flatten() @ torch.linalg.inv(q.dense()) @ delta.flatten())


@pytest.mark.parametrize("name", STRUCTURES)
@settings(max_examples=8)
@given(small, st.floats(0.2, 0.8))
def test_swap_scores_lie_between_their_bounds(name: str, d: Dims, fraction: float) -> None:
    """And so does the truth: the loss without a kept weight, or with a removed one back, by brute force."""
    w, q, removed = problem(name, d, fraction)
    Q = q.dense()
    result = compensate(w, q, removed, **PRECISE)
    scores = swap_scores(w, swap_curvature(q), removed, result).flatten()
    at_most, at_least = torch.linalg.inv(Q).diagonal(), 1 / Q.diagonal()
    v, x = (w + result.delta).flatten(), result.multipliers.flatten()
    for i in range(q.n):
        other = removed.clone()
        other.view(-1)[i] = ~other.view(-1)[i]
        change = abs(brute_force(w, Q, other)[1] - result.predicted)
        worth = [0.5 * float(v[i] ** 2 * c[i]) for c in (at_least, at_most)]
        if bool(removed.flatten()[i]):
            worth = [0.5 * float(x[i] ** 2 / c[i]) for c in (at_most, at_least)]
        slack = 1e-7 * (worth[1] + result.predicted)
        for value in (change, float(scores[i])):
            assert worth[0] - slack <= value <= worth[1] + slack


def test_swap_scores_need_a_joint_compensation() -> None:
    w, q, removed = problem("gram-full", Dims(2, 2, 1, 2, 0))
    with pytest.raises(ValueError, match="joint"):
        swap_scores(w, swap_curvature(q), removed, compensate(w, q, removed, "none"))


@pytest.mark.parametrize("name", STRUCTURES)
@settings(max_examples=8)
@given(small, st.floats(0.0, 1.0))
def test_joint_is_the_constrained_minimum(name: str, d: Dims, fraction: float) -> None:
    w, q, removed = problem(name, d, fraction)
    result = compensate(w, q, removed, **PRECISE)
    Q, P = q.dense(), removed.flatten()
    formula = -Q[:, P] @ torch.linalg.solve(Q[P][:, P], w.flatten()[P])
    expected, least = brute_force(w, Q, removed)
    torch.testing.assert_close(result.delta.flatten(), formula, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(result.delta, expected, rtol=1e-7, atol=1e-9)
    assert result.predicted == pytest.approx(least, rel=1e-8)
    assert result.predicted == pytest.approx(increase(q, result.delta), rel=1e-8)


@pytest.mark.parametrize("name", STRUCTURES)
@settings(max_examples=8)
@given(small, st.floats(0.0, 1.0))
def test_better_compensation_is_never_worse(name: str, d: Dims, fraction: float) -> None:
    w, q, removed = problem(name, d, fraction)
    results = {
        method: compensate(w, q, removed, method) for method in ("joint", "independent", "none", "sum")
    }
    predicted = {method: result.predicted for method, result in results.items()}
    slack = 1 + 1e-6
    assert predicted["joint"] <= predicted["independent"] * slack
    assert predicted["independent"] <= predicted["none"] * slack
    assert predicted["independent"] <= predicted["sum"] * slack
    for method, result in results.items():
        assert result.predicted == pytest.approx(increase(q, result.delta), rel=1e-6), method


@pytest.mark.parametrize("name", COUPLED)
def test_independent_for_one_weight_is_optimal_brain_surgeon(name: str) -> None:
    w, q, _ = problem(name, Dims(2, 3, 1, 4, 3))
    Q = q.dense()
    for i in range(q.n):
        single = (torch.arange(q.n) == i).view(q.shape)
        expected = (-w.flatten()[i] / Q[i, i] * Q[i]).view(q.shape)
        for method in ("independent", "sum"):
            result = compensate(w, q, single, method)
            torch.testing.assert_close(result.delta, expected)
            assert result.predicted == pytest.approx(float(saliency(w, q).flatten()[i]))


@pytest.mark.parametrize("name", COUPLED)
def test_sum_is_the_published_sum(name: str) -> None:
    w, q, removed = problem(name, Dims(3, 2, 2, 3, 11))
    Q, flat = q.dense(), w.flatten()
    expected = -sum(flat[i] / Q[i, i] * Q[i] for i in removed.flatten().nonzero().flatten())
    expected = torch.where(removed, -w, expected.view(w.shape))
    torch.testing.assert_close(compensate(w, q, removed, "sum").delta, expected)


def test_independent_is_the_best_length_of_the_sum() -> None:
    """Strongly coupled weights: the published sum overshoots, and its best length is in between."""
    factor = FullFactor(6)
    with torch.no_grad():
        factor.matrix.copy_(torch.linalg.cholesky(torch.full((6, 6), 0.9) + 0.1 * torch.eye(6)))
    q = Gram((2, 3), factor).requires_grad_(False)
    w, removed = torch.ones(2, 3), torch.tensor([[True, True, True], [True, False, False]])
    none, whole = (compensate(w, q, removed, method).delta for method in ("none", "sum"))
    lengths = torch.linspace(0, 1, 2001)
    losses = [increase(q, none + s * (whole - none)) for s in lengths]
    best = float(lengths[min(range(len(losses)), key=losses.__getitem__)])
    assert 0.1 < best < 0.9
    found = compensate(w, q, removed, "independent")
    torch.testing.assert_close(found.delta, none + best * (whole - none), atol=1e-3, rtol=0.0)
    assert found.predicted <= min(losses) * (1 + 1e-9)


@pytest.mark.parametrize("method", ["joint", "independent", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_removed_weights_are_exactly_zero(method: str, dtype: torch.dtype) -> None:
    q = make("kronecker-D(full*full)E", Dims(6, 7, 1, 2, 1)).to(dtype).requires_grad_(False)
    w, removed = torch.randn(6, 7, dtype=dtype), torch.rand(6, 7) < 0.6
    after = w + compensate(w, q, removed, method).delta
    assert after.dtype == dtype
    assert torch.equal(after[removed], torch.zeros(int(removed.sum()), dtype=dtype))
    moved = not torch.equal(after[~removed], w[~removed])
    assert moved is (method != "none")


@pytest.mark.parametrize("method", ["joint", "independent", "sum", "none"])
def test_nothing_removed_and_everything_removed(method: str) -> None:
    w, q, _ = problem("kronecker-D(full*full)E", Dims(3, 2, 2, 3, 2))
    nothing = compensate(w, q, torch.zeros_like(w, dtype=torch.bool), method)
    assert not nothing.delta.any()
    assert nothing.predicted == 0
    everything = compensate(w, q, torch.ones_like(w, dtype=torch.bool), method, **PRECISE)
    assert torch.equal(everything.delta, -w)
    assert everything.predicted == pytest.approx(increase(q, w), rel=1e-8)


def test_solve_removed_stops_at_its_tolerance() -> None:
    w, q, removed = problem("gram-full", Dims(3, 3, 3, 3, 4))
    Q, P = q.dense(), removed.flatten()
    target = torch.where(removed, w, torch.zeros_like(w))
    exact = torch.linalg.solve(Q[P][:, P], w.flatten()[P])
    errors = []
    for tolerance in (1e-1, 1e-4, 1e-10):
        x, converged = solve_removed(q, removed, target, tolerance=tolerance)
        assert converged
        assert not x[~removed].any()
        errors.append(float((x[removed] - exact).norm() / exact.norm()))
    assert errors[0] > errors[1] > errors[2]
    assert errors[1] < 1e-3
    assert errors[2] < 1e-8
    jacobi, converged = solve_removed(q, removed, target, iterations=0)
    assert not converged
    torch.testing.assert_close(jacobi, target / q.diag())


def test_an_unconverged_compensation_predicts_its_own_loss() -> None:
    """After too few iterations the dual value is far below the update's own; independent may be better."""
    w, q, removed = problem("gram-full", Dims(3, 3, 3, 3, 4))
    rough = compensate(w, q, removed, "independent")
    for iterations in range(4):
        result = compensate(w, q, removed, iterations=iterations, tolerance=1e-12)
        assert result.predicted == pytest.approx(increase(q, result.delta), rel=1e-8)
        assert result.predicted <= rough.predicted * (1 + 1e-12)
        bound = compensate(w, q, removed, iterations=iterations, tolerance=1e-12, settle=False).predicted
        assert bound <= result.predicted * (1 + 1e-9)


def test_solve_inverts_the_product() -> None:
    """What predictions rest on: Q⁻¹(Qv) = v, also for a Kronecker Q with ragged blocks and all diagonals."""
    for name in ("kronecker-D(block*split+bias)E", "gram-block", "low-rank", "identity"):
        q = make(name, Dims(3, 2, 3, 4, 8)).requires_grad_(False)
        v = torch.randn(2, *q.shape)
        torch.testing.assert_close(q.solve(q.matvec(v)), v)
        torch.testing.assert_close(q.solve(v).flatten(1), v.flatten(1) @ torch.linalg.inv(q.dense()))


IDENTITY = Kronecker(FullFactor(2), FullFactor(2)).requires_grad_(False)


ALL = torch.ones(2, 2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: compensate(torch.ones(2, 2), IDENTITY, ALL, "both"),
            "one of joint, independent, sum, none, got 'both'",
        ),
    ],
)
def test_errors(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
