"""Every operator against its definition, and every fast method against dense(): values and gradients."""

from collections.abc import Callable
from zlib import crc32

import pytest
import torch
from hypothesis import given, seed, settings
from operator_makers import MAKERS, DenseOnly, Dims, definition, dims, make
from torch import Tensor

from fishleg.inverse.operators import (
    BlockFactor,
    Diagonal,
    FullFactor,
    Gram,
    Identity,
    Kronecker,
    LowRank,
    Masked,
    Operator,
)


def groups_of(q: Operator) -> Tensor:
    return torch.randint(q.n, (3, 2), generator=torch.Generator().manual_seed(q.n))


def rows_of(q: Operator) -> Tensor:
    """The first entries, but for one, of every row."""
    last = q.shape[-1]
    return torch.arange(0, q.n, last).unsqueeze(1) + torch.arange(max(last - 1, 1))


def batch_of(q: Operator) -> Tensor:
    return torch.randn(2, 3, *q.shape, generator=torch.Generator().manual_seed(q.n))


METHODS: dict[str, tuple[Callable[[Operator], Tensor], Callable[[Operator, Tensor], Tensor]]] = {
    "dense": (lambda q: q.dense(), lambda q, Q: definition(q)),
    "matvec": (
        lambda q: q.matvec(batch_of(q)),
        lambda q, Q: torch.einsum("ij,...j->...i", Q, batch_of(q).flatten(2)).reshape(2, 3, *q.shape),
    ),
    "matvec-unbatched": (
        lambda q: q.matvec(batch_of(q)[0, 0]),
        lambda q, Q: (Q @ batch_of(q)[0, 0].flatten()).reshape(q.shape),
    ),
    "solve": (
        lambda q: q.solve(batch_of(q)),
        lambda q, Q: torch.einsum("ij,...j->...i", Q.inverse(), batch_of(q).flatten(2)).reshape(
            2, 3, *q.shape
        ),
    ),
    "diag": (lambda q: q.diag(), lambda q, Q: torch.stack([Q[i, i] for i in range(q.n)]).reshape(q.shape)),
    "trace": (lambda q: q.trace(), lambda q, Q: torch.trace(Q)),
    "loss_terms": (
        lambda q: torch.stack(q.loss_terms(batch_of(q))),
        lambda q, Q: torch.stack(
            [(batch_of(q).flatten(2) @ Q @ Q * batch_of(q).flatten(2)).sum(), torch.trace(Q)]
        ),
    ),
    "frobenius_sq": (lambda q: q.frobenius_sq(), lambda q, Q: (Q * Q).sum()),
    "entries": (
        lambda q: q.entries(torch.arange(q.n)[:, None], torch.arange(q.n)[None, :]),
        lambda q, Q: Q,
    ),
    "blocks": (
        lambda q: q.blocks(groups_of(q)),
        lambda q, Q: torch.stack([Q[g][:, g] for g in groups_of(q)]),
    ),
    "blocks-of-rows": (
        lambda q: q.blocks(rows_of(q)),
        lambda q, Q: torch.stack([Q[g][:, g] for g in rows_of(q)]),
    ),
}


def gradients(value: Tensor, q: Operator) -> list[Tensor]:
    """d/dλ of a fixed random combination of the value's entries."""
    weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
    parameters = list(q.parameters())
    found = (
        torch.autograd.grad((weights * value).sum(), parameters, materialize_grads=True) if parameters else ()
    )
    return list(found)


def drawn(name: str, examples: int = 6) -> Callable[[Callable[[Dims], None]], None]:
    """Run a check on drawn sizes; each operator gets draws of its own, the same in every run."""
    return lambda check: seed(crc32(name.encode()))(settings(max_examples=examples)(given(dims)(check)))()


@pytest.mark.parametrize("name", MAKERS)
def test_methods_equal_dense(name: str) -> None:
    @drawn(name)
    def check(d: Dims) -> None:
        q = make(name, d)
        for method, (fast, slow) in METHODS.items():
            if method == "solve" and isinstance(q, Masked):
                continue  # M Q M is singular; see test_masked_solve_is_the_pseudo_inverse
            value, expected = fast(q), slow(q, q.dense())
            for found, wanted in ((value, expected), (gradients(value, q), gradients(expected, q))):
                torch.testing.assert_close(found, wanted, msg=lambda text, method=method: f"{method}: {text}")


@pytest.mark.parametrize("name", MAKERS)
def test_inverse_diag(name: str) -> None:
    @drawn(name)
    def check(d: Dims) -> None:
        q = make(name, d).requires_grad_(False)
        expected = torch.linalg.pinv(q.dense(), hermitian=True).diagonal().view(q.shape)
        torch.testing.assert_close(q.inverse_diag(), expected)


@pytest.mark.parametrize("name", [key for key in MAKERS if key.startswith("masked-")])
def test_masked_solve_is_the_pseudo_inverse(name: str) -> None:
    @drawn(name)
    def check(d: Dims) -> None:
        q = make(name, d)
        V = batch_of(q)
        expected = (V.reshape(-1, q.n) @ torch.linalg.pinv(q.dense())).reshape(V.shape)
        torch.testing.assert_close(q.solve(V), expected)


@pytest.mark.parametrize("name", MAKERS)
def test_symmetric_positive_definite(name: str) -> None:
    @drawn(name)
    def check(d: Dims) -> None:
        q = make(name, d)
        Q = q.dense().detach()
        torch.testing.assert_close(Q, Q.mT)
        if isinstance(q, Masked):
            keep = q.mask.flatten()
            assert not Q[~keep].any()
            Q = Q[keep][:, keep]
        assert bool((torch.linalg.eigvalsh(Q) > 0).all())


@pytest.mark.parametrize("name", MAKERS)
def test_damped_matvec(name: str) -> None:
    """(Q⁻¹ + x I)⁻¹ v for every structure; forms with E² are exact on orthogonal bases without D."""

    @drawn(name, 3)
    def check(d: Dims) -> None:
        q = make(name, d)
        inner = q.inner if isinstance(q, Masked) else q
        if isinstance(inner, Kronecker) and inner.log_e is not None:
            for side in (inner.L, inner.R):
                size = torch.eye(side.dim)
                side.eigenbasis_(side.moment(torch.randn(3 * side.dim, side.dim) @ (size + 0.3)))
            if inner.log_d is not None:
                torch.nn.init.zeros_(inner.log_d)
        v, extra = batch_of(q), 0.7
        with torch.no_grad():
            Q = inner.dense()
            expected = torch.einsum(
                "ij,...j->...i", (Q.inverse() + extra * torch.eye(q.n)).inverse(), _masked(q, v).flatten(2)
            ).reshape(v.shape)
            assert torch.allclose(q.damped_matvec(v, extra), _masked(q, expected), rtol=1e-5, atol=1e-8)


def _masked(q: Operator, v: Tensor) -> Tensor:
    return v * q.mask if isinstance(q, Masked) else v


@pytest.mark.parametrize("name", [key for key in MAKERS if key != "dense-only" and "low-rank" not in key])
def test_set_scale(name: str) -> None:
    @drawn(name)
    def check(d: Dims) -> None:
        q, scale = make(name, d), 10.0 ** (d.seed % 9 - 4)
        q.set_scale_(scale)
        keep = q.mask.flatten().double() if isinstance(q, Masked) else torch.ones(q.n)
        torch.testing.assert_close(q.dense(), scale * torch.diag(keep))


@pytest.mark.parametrize("name", MAKERS)
def test_no_entries(name: str) -> None:
    none = torch.empty(0, dtype=torch.long)
    assert make(name, Dims(2, 2, 1, 2, 0)).entries(none, none).shape == (0,)


def test_chunked_methods_beyond_one_chunk() -> None:
    """n = 289 > 256 columns of frobenius_sq, n² > 4096 entries at a time."""
    q = make("kronecker-D(full*block)E", Dims(17, 17, 1, 5, 0))
    Q = definition(q)
    torch.testing.assert_close(q.frobenius_sq(), Q.square().sum())
    torch.testing.assert_close(q.entries(torch.arange(q.n)[:, None], torch.arange(q.n)), Q)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Gram((2, 3), FullFactor(5)), ValueError, r"factor of size 5 does not fit shape \(2, 3\)"),
        (lambda: BlockFactor(4, 0), ValueError, "block size must be >= 1, got 0"),
        (lambda: LowRank((2,), torch.ones(3, 2), -0.1), ValueError, "gamma must be > 0, got -0.1"),
        (lambda: LowRank((2,), torch.ones(3, 4), 0.1), ValueError, r"ending in shape \(2,\), got \(3, 4\)"),
        (
            lambda: Masked(Diagonal((2,)), torch.ones(2)),
            ValueError,
            "mask must be boolean .* got torch.float64",
        ),
        (lambda: Masked(Diagonal((2,)), torch.ones(3).bool()), ValueError, r"shape \(2,\), got .* \(3,\)"),
        (lambda: Gram((2,), FullFactor(2)).matvec(torch.ones(3)), ValueError, r"\(2,\), got \(3,\)"),
        (lambda: DenseOnly((1, 2)).set_scale_(1.0), NotImplementedError, "DenseOnly has no scaled-identity"),
        (
            lambda: Identity((2,)).natural_step_(torch.ones(1, 2), 0.1, 1.0),
            NotImplementedError,
            "Identity has no",
        ),
        (
            lambda: Gram((2,), FullFactor(2, triangular=True)).remove_(torch.tensor([True, False])),
            NotImplementedError,
            "needs a full square factor",
        ),
    ],
)
def test_errors(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
