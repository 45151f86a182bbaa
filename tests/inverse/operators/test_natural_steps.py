"""Natural steps of learned operators: their limits, their fixed points, positive definiteness."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_makers import LEFT, MAKERS, RIGHT, Dims, definition, dims, make
from oracles import damped_inverse, dense_auxiliary_loss, exact_samples, random_fisher, randomise_
from torch import Tensor

from fishleg.inverse.operators import (
    BlockFactor,
    Diagonal,
    DiagonalFactor,
    FullFactor,
    Gram,
    Kronecker,
    Masked,
    Operator,
    SplitFactor,
)

N, GAMMA = 7, 0.03


seeds = st.integers(0, 2**31)


# operator on [N] and the pattern of matrices that it can represent
PATTERNS: dict[str, tuple[Callable[[], Operator], Tensor]] = {
    "full": (lambda: Gram((N,), FullFactor(N)), torch.ones(N, N)),
    "triangular": (lambda: Gram((N,), FullFactor(N, triangular=True)), torch.ones(N, N)),
    "block": (
        lambda: Gram((N,), BlockFactor(N, 3)),
        torch.block_diag(torch.ones(3, 3), torch.ones(3, 3), torch.ones(1, 1)),
    ),
    "diagonal-factor": (lambda: Gram((N,), DiagonalFactor(N)), torch.eye(N)),
    "diagonal": (lambda: Diagonal((N,)), torch.eye(N)),
}


patterns = pytest.mark.parametrize("name", PATTERNS)


def fisher(seed: int, n: int = N) -> Tensor:
    return random_fisher(n, torch.Generator().manual_seed(seed))


def iterate(
    q: Operator, H: Tensor, gamma: float, eta: float, steps: int, mask: Tensor | None = None
) -> Tensor:
    for _ in range(steps):
        q.natural_step_(H, gamma, eta, mask)
    return definition(q).detach()


@pytest.mark.parametrize("name", RIGHT)
@given(dims)
@settings(max_examples=6)
def test_the_moment_of_noise_is_that_of_its_square_root(name: str, d: Dims) -> None:
    factor = randomise_(RIGHT[name](d), d.generator())
    variances = torch.rand(factor.dim, generator=d.generator())
    rows = factor.apply_transpose(torch.diag(variances.sqrt()))
    torch.testing.assert_close(factor.noise_moment(variances), factor.moment(rows))


def test_a_step_of_small_blocks_needs_little_memory() -> None:
    q = Gram((300_000,), BlockFactor(300_000, 2))  # a dense matrix of this size would take 720 GB
    q.natural_step_(torch.ones(1, 300_000), 1.0, 1.0)
    assert bool(q.diag().isfinite().all())


@patterns
@given(seeds)
@settings(max_examples=8)
def test_converges_to_the_damped_inverse(name: str, seed: int) -> None:
    q, pattern = PATTERNS[name][0](), PATTERNS[name][1].double()
    F = fisher(seed) * pattern
    torch.testing.assert_close(iterate(q, exact_samples(F), GAMMA, 1.0, 60), damped_inverse(F, GAMMA))


@patterns
@given(seeds)
@settings(max_examples=8)
def test_limit_minimises_the_auxiliary_loss(name: str, seed: int) -> None:
    """For an F outside the structure: approximate-then-invert, which is the optimum of the isotropic loss."""
    q, pattern = PATTERNS[name][0](), PATTERNS[name][1].double()
    F = fisher(seed)
    limit = iterate(q, exact_samples(F), GAMMA, 1.0, 60)
    torch.testing.assert_close(limit, damped_inverse(F * pattern, GAMMA))
    gradient = torch.autograd.grad(dense_auxiliary_loss(q.dense(), F, GAMMA), list(q.parameters()))
    torch.testing.assert_close(list(gradient), [torch.zeros_like(g) for g in gradient])


@patterns
@given(seeds, st.floats(0.01, 1.0))
def test_exact_inverse_is_a_fixed_point(name: str, seed: int, eta: float) -> None:
    q, pattern = PATTERNS[name][0](), PATTERNS[name][1].double()
    F = fisher(seed) * pattern
    Q = damped_inverse(F, GAMMA)
    with torch.no_grad():
        if isinstance(q, Diagonal):
            q.log_q.copy_(Q.diagonal().log())
        elif isinstance(q.factor, DiagonalFactor):
            q.factor.log_s.copy_(Q.diagonal().log() / 2)
        elif isinstance(q.factor, BlockFactor):
            padded = torch.block_diag(torch.linalg.cholesky(Q), torch.eye(2))
            q.factor.matrix.copy_(torch.stack([padded[i : i + 3, i : i + 3] for i in (0, 3, 6)]))
        else:
            q.factor.matrix.copy_(torch.linalg.cholesky(Q))
    torch.testing.assert_close(definition(q), Q)
    torch.testing.assert_close(iterate(q, exact_samples(F), GAMMA, eta, 3), Q)


@pytest.mark.slow
@patterns
@pytest.mark.parametrize("through_masked", [False, True])
@given(seeds)
@settings(max_examples=8)
def test_masked_converges_on_the_kept_parameters(name: str, through_masked: bool, seed: int) -> None:
    q, pattern = PATTERNS[name][0](), PATTERNS[name][1].double()
    keep = torch.rand(N, generator=torch.Generator().manual_seed(seed)) < 0.6
    F = fisher(seed) * pattern
    stepped = Masked(q, keep) if through_masked else q
    iterate(stepped, exact_samples(F), GAMMA, 0.5, 150, None if through_masked else keep)
    Q = definition(q)
    torch.testing.assert_close(Q[keep][:, keep], damped_inverse(F[keep][:, keep], GAMMA))
    torch.testing.assert_close(Q[~keep], torch.eye(N)[~keep])  # neither pulled nor pushed from Q = I


@given(seeds)
def test_triangular_and_full_factors_take_the_same_step_to_first_order(seed: int) -> None:
    F, eta, moves = fisher(seed), 1e-7, []
    for name in ("full", "triangular"):
        q = PATTERNS[name][0]()
        with torch.no_grad():
            q.factor.matrix.copy_(torch.linalg.cholesky(fisher(seed + 1)))
        before = definition(q).detach()
        moves.append((iterate(q, exact_samples(F), GAMMA, eta, 1) - before) / eta)
    torch.testing.assert_close(moves[0], moves[1], rtol=1e-5, atol=1e-6)


def test_the_padding_of_a_ragged_block_stays_as_it_is() -> None:
    q = Gram((4,), BlockFactor(4, 3))
    iterate(q, torch.randn(5, 4), GAMMA, 0.5, 50)
    assert torch.equal(q.factor.matrix[-1, 1:], torch.eye(3)[1:])


@pytest.mark.slow
@given(seeds, st.sampled_from([1e-3, 1.0, 1e3]))
@settings(max_examples=8)
def test_split_factor_converges_to_its_own_form(seed: int, scale: float) -> None:
    C, K = fisher(seed, 3), fisher(seed + 1, 2)
    F = torch.block_diag(torch.kron(C, K), torch.tensor([[0.7]]))
    q = Gram((7,), SplitFactor(3, 2, bias=True))
    q.set_scale_(scale)
    torch.testing.assert_close(iterate(q, exact_samples(F), 0.0, 0.4, 150), torch.linalg.inv(F))


KRONECKER = [(left, right) for left in ("full", "triangular") for right in ("full", "triangular", "split")]


def kronecker_case(left: str, right: str, seed: int, **kind: bool) -> tuple[Kronecker, Tensor, Tensor]:
    d = Dims(3, 2, 2, 2, seed)
    A = fisher(seed, 3)
    B = torch.kron(fisher(seed + 1, 2), fisher(seed + 2, 2))
    return Kronecker(LEFT[left](d), RIGHT[right](d), **kind), A, B


@pytest.mark.slow
@pytest.mark.parametrize(("left", "right"), KRONECKER)
@pytest.mark.parametrize("outer", [False, True])
@given(seed=seeds)
@settings(max_examples=3)
def test_kronecker_converges_when_the_fisher_is_one(left: str, right: str, outer: bool, seed: int) -> None:
    q, A, B = kronecker_case(left, right, seed, outer=outer)
    F = torch.kron(A, B)
    limit = iterate(q, exact_samples(F).reshape(-1, 3, 4), 1e-12, 0.2, 200)
    torch.testing.assert_close(limit, damped_inverse(F, 1e-12))


@pytest.mark.parametrize(("left", "sizes"), [("full", [3]), ("block", [2, 1]), ("diagonal", [1, 1, 1])])
@pytest.mark.parametrize("right", ["full", "split"])
@pytest.mark.parametrize("outer", [False, True])
@given(seed=seeds)
@settings(max_examples=5)
def test_inner_diagonal_in_the_eigenbasis_is_exact(
    left: str, sizes: list[int], right: str, outer: bool, seed: int
) -> None:
    """EKFAC's form gives (A⊗B+γI)⁻¹ for any γ: at once in the eigenbasis, and again by one full step."""
    q, A, B = kronecker_case(left, right, seed, outer=outer, inner=True)
    A = A * torch.block_diag(*[torch.ones(k, k) for k in sizes])
    F = torch.kron(A, B)
    H = exact_samples(F).reshape(-1, 3, 4) / 12**0.5
    q.eigenbasis_(q.L.moment(H.mT.reshape(-1, 3)), q.R.moment(H.reshape(-1, 4)), GAMMA)
    torch.testing.assert_close(definition(q), damped_inverse(F, GAMMA))
    torch.nn.init.normal_(q.log_e)
    torch.testing.assert_close(iterate(q, 12**0.5 * H, GAMMA, 1.0, 1), damped_inverse(F, GAMMA))


DIAGONALS = ["diagonal", "gram-diagonal", "masked-diagonal"]


DIAGONALS += ["kronecker-D(diagonal*diagonal)", "kronecker-(diagonal*diagonal)E"]


@pytest.mark.parametrize("name", DIAGONALS)
def test_diagonal_forms_converge_on_the_kept_parameters(name: str) -> None:
    q = make(name, Dims(2, 3, 1, 2, 0))
    some = torch.arange(q.n).reshape(q.shape) % 3 > 0
    inner, keep = (q.inner, q.mask) if isinstance(q, Masked) else (q, some)
    H = torch.randn(4, *q.shape)
    iterate(inner, H, GAMMA, 0.5, 200, keep)
    torch.testing.assert_close(inner.diag()[keep], 1 / (H.square().mean(0) + GAMMA)[keep])


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("name", ["diagonal", "gram-diagonal", "kronecker-(full*full)E"])
def test_a_full_step_of_a_diagonal_is_exact_at_any_scale(name: str, scale: float) -> None:
    """In float32 too, where 1 + (ratio − 1) would lose every digit of a small ratio."""
    q = MAKERS[name](Dims(2, 3, 1, 2, 0)).float()
    H = (scale**0.5 * torch.ones(1, *q.shape)).float()
    q.natural_step_(H, 0.5 * scale, 1.0)
    torch.testing.assert_close(q.diag(), torch.full(q.shape, 1 / (1.5 * scale), dtype=torch.float32))


@pytest.mark.parametrize("inner", [False, True])
@given(seed=seeds)
def test_kronecker_fixed_point(inner: bool, seed: int) -> None:
    q, A, B = kronecker_case("full", "full", seed, outer=True, inner=inner)
    F = torch.kron(A, B)
    d = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).exp()
    with torch.no_grad():
        q.L.matrix.copy_(torch.linalg.cholesky(torch.linalg.inv(A)))
        q.R.matrix.copy_(torch.linalg.cholesky(torch.linalg.inv(B)))
        q.log_d.copy_(-d.log())
    F = d.flatten()[:, None] * F * d.flatten()
    torch.testing.assert_close(definition(q), torch.linalg.inv(F))
    torch.testing.assert_close(
        iterate(q, exact_samples(F).reshape(-1, 3, 4), 0.0, 0.7, 3), torch.linalg.inv(F)
    )


LEARNED = [
    name for name in MAKERS if "identity" not in name and name != "dense-only" and "low-rank" not in name
]


@pytest.mark.parametrize("name", LEARNED)
def test_stays_positive_definite_on_adversarial_data(name: str) -> None:
    q = make(name, Dims(2, 2, 2, 3, 0))
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, *q.shape, generator=generator)
    spike = torch.zeros(1, *q.shape)
    spike.view(-1)[0] = 1e7
    for H in (1e8 * noise, torch.zeros_like(noise), spike, 1e-8 * noise, 1e30 * noise):
        for _ in range(2):
            q.natural_step_(H, 1e-3, 1.0, torch.rand(q.shape, generator=generator) < 0.7)
            q.natural_step_(H, 1e-3, 1.0)
    inner = q.inner if isinstance(q, Masked) else q
    assert all(bool(torch.isfinite(p).all()) for p in q.parameters())
    scale = inner.diag().detach().flatten().rsqrt()
    correlation = scale[:, None] * inner.dense().detach() * scale
    assert bool((torch.linalg.eigvalsh(correlation) > 0).all())
