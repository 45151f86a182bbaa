"""Each rival's Q against the literal form of its published algorithm, on gradients computed directly."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from oracles import (
    categorical_fisher,
    damped_inverse,
    dense_fisher,
    flat_gradient,
    gaussian_fisher,
    packed_fisher,
    trainable_names,
)
from torch import Tensor, nn
from torch.nn import functional

from fishleg import Categorical, Gaussian, InverseFisher, PruningOptions
from fishleg.curvature.kronecker_factors import kronecker_factors
from fishleg.curvature.layers import find_layers
from fishleg.curvature.products import fisher_product
from fishleg.curvature.samples import sample_h
from fishleg.inverse import estimate_inverse, make_problem
from fishleg.inverse.estimators import find_method
from fishleg.options.names import METHODS

GAMMA = 0.05


def estimate(
    method: str, model: nn.Module, loader: list[Any], likelihood: Any = "categorical", **given: Any
) -> tuple[InverseFisher, float]:
    """Q and γ by a method; `only` and `generator` belong to the problem, the rest are options."""
    own = {name: given.pop(name) for name in ("only", "generator") if name in given}
    options = PruningOptions(method=method, **given)
    return estimate_inverse(make_problem(model, loader, likelihood, options=options, **own))


def mlp(outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5, bias=False), nn.Linear(5, outputs))


def labelled(count: int = 3, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(size, 4), torch.randint(3, (size,))) for _ in range(count)]


def blocks_of(model: nn.Module, F: Tensor) -> dict[str, Tensor]:
    """The diagonal blocks of F in the order in which each layer is packed."""
    return {layer.name: packed_fisher(model, F, layer.names) for layer in find_layers(model)}


def packed_gradients(model: nn.Module, gradients: Tensor) -> dict[str, Tensor]:
    """Rows of flat gradients → per layer, in packed order (by reordering indices as `packed_fisher` does)."""
    index = torch.arange(gradients.shape[1], dtype=gradients.dtype)
    order = {name: block.diagonal().long() for name, block in blocks_of(model, torch.diag(index)).items()}
    return {name: gradients[:, columns] for name, columns in order.items()}


def empirical_gradients(model: nn.Module, batches: list[tuple[Tensor, Tensor]], size: int) -> Tensor:
    """√size · ∇ (mean loss at the labels) of each piece of each batch, [pieces, n]."""
    rows = []
    for x, y in batches:
        for start in range(0, len(x), size):
            loss = functional.cross_entropy(model(x[start : start + size]), y[start : start + size])
            rows.append(size**0.5 * flat_gradient(loss, list(model.parameters())))
    return torch.stack(rows)


def empirical(method: str, **options: Any) -> tuple[InverseFisher, dict[str, Tensor]]:
    """Q from labelled data by a method, and per layer the gradients that it must have used."""
    model, batches = mlp(), labelled()
    q, gamma = estimate(
        method, model, batches, gamma=GAMMA, samples=6, sub_batch=4, empirical=True, **options
    )
    assert gamma == GAMMA
    assert sorted(q.diag()) == sorted(trainable_names(model))
    return q, packed_gradients(model, empirical_gradients(model, batches, 4))


def test_diagonal() -> None:
    q, gradients = empirical("diagonal")
    for name, G in gradients.items():
        expected = torch.diag(1 / (G.square().mean(0) + GAMMA))
        torch.testing.assert_close(q.unmasked(name).dense(), expected)


@pytest.mark.parametrize("block", [3, 25, 1000])
def test_obert_is_the_recursion_over_blocks(block: int) -> None:
    """F⁻¹ ← F⁻¹ − F⁻¹g gᵀF⁻¹ / (m + gᵀF⁻¹g) from F⁻¹ = I/γ, in each block of consecutive weights."""
    q, gradients = empirical("obert", block_size=block)
    for name, G in gradients.items():
        parts = []
        for piece in G.split(block, dim=1):
            inverse = torch.eye(piece.shape[1]) / GAMMA
            for g in piece:
                Fg = inverse @ g
                inverse = inverse - torch.outer(Fg, Fg) / (len(G) + g @ Fg)
            parts.append(inverse)
        torch.testing.assert_close(q.unmasked(name).dense(), torch.block_diag(*parts))


def test_mfac_is_the_damped_inverse_of_its_gradients() -> None:
    q, gradients = empirical("mfac")
    for name, G in gradients.items():
        operator = q.unmasked(name)
        expected = damped_inverse(G.T @ G / len(G), GAMMA)
        torch.testing.assert_close(operator.dense(), expected)
        torch.testing.assert_close(operator.matvec(torch.eye(operator.n).view(-1, *operator.shape)),
                                   expected.view(-1, *operator.shape))  # fmt: skip


def test_exact_is_the_damped_inverse_of_the_fisher() -> None:
    model, batches = mlp(), [torch.randn(6, 4) for _ in range(3)]
    q, _ = estimate("exact", model, batches, gamma=GAMMA, samples=3, sub_batch=6)
    F = dense_fisher(model, torch.cat(batches), categorical_fisher)
    for name, block in blocks_of(model, F).items():
        torch.testing.assert_close(q.unmasked(name).dense(), damped_inverse(block, GAMMA))


@pytest.mark.parametrize("method", ["diagonal", "obert", "mfac", "exact"])
def test_true_fisher_where_one_sample_each_is_exact(method: str) -> None:
    """One Gaussian output: h = ±J/σ, so that one h for each example has exactly the Fisher's moment."""
    model, x, sigma = mlp(outputs=1), torch.randn(12, 4), 0.5
    q, _ = estimate(
        method, model, [x[:8], x[8:]], Gaussian(sigma), gamma=GAMMA, samples=12, sub_batch=1, block_size=100
    )
    F = dense_fisher(model, x, partial(gaussian_fisher, sigma=sigma))
    for name, block in blocks_of(model, F).items():
        wanted = torch.diag(block.diagonal()) if method == "diagonal" else block
        torch.testing.assert_close(q.unmasked(name).dense(), damped_inverse(wanted, GAMMA))


def test_empirical_counts_only_labelled_positions() -> None:
    model, x, y = nn.Sequential(nn.Linear(4, 3)), torch.randn(6, 4), torch.tensor([0, 1, 2, -100, -100, -100])
    found, expected = (
        estimate("diagonal", model, [batch], gamma=GAMMA, samples=1, sub_batch=6, empirical=True)[0].diag()
        for batch in ((x, y), (x[:3], y[:3]))
    )
    torch.testing.assert_close(found, expected)


def test_magnitude_is_the_identity() -> None:
    q, gamma = estimate("magnitude", mlp(), labelled())
    assert gamma == 1.0
    assert all(torch.equal(value, torch.ones_like(value)) for value in q.diag().values())


def test_kfac_damps_each_side_by_its_share() -> None:
    model, batches = mlp(), labelled()
    q, _ = estimate("kfac", model, batches, gamma=GAMMA, samples=6, sub_batch=4)
    pieces = [(x[i : i + 4], y[i : i + 4]) for x, y in batches for i in (0, 4)]
    generator = torch.Generator().manual_seed(0)
    factors = kronecker_factors(model, find_layers(model), pieces, Categorical(), generator=generator)
    assert set(factors) == {"0", "3"}
    for name, (G, A) in factors.items():
        pi = float((A.trace() / len(A)) / (G.trace() / len(G))) ** 0.5
        expected = torch.kron(damped_inverse(G, GAMMA**0.5 / pi), damped_inverse(A, GAMMA**0.5 * pi))
        torch.testing.assert_close(q.unmasked(name).dense(), expected)


def test_ekfac_is_kfacs_basis_with_measured_eigenvalues() -> None:
    model, batches = mlp(), labelled()
    q, _ = estimate("ekfac", model, batches, gamma=GAMMA, samples=6, sub_batch=4)
    generator, likelihood = torch.Generator().manual_seed(0), Categorical()
    pieces = [(x[i : i + 4], y[i : i + 4]) for x, y in batches for i in (0, 4)]
    factors = kronecker_factors(model, find_layers(model), pieces, likelihood, generator=generator)
    for piece in pieces:  # the draws for the diagonal of the layers without factors
        sample_h(model, piece, likelihood, generator=generator)
    samples = [sample_h(model, piece, likelihood, generator=generator) for piece in pieces]
    for name, (G, A) in factors.items():
        H = torch.stack(
            [torch.cat([h[f"{name}.weight"][0], h[f"{name}.bias"][0][:, None]], 1) for h in samples]
        )
        basis = torch.kron(torch.linalg.eigh(G).eigenvectors, torch.linalg.eigh(A).eigenvectors)
        moments = (H.flatten(1) @ basis).square().mean(0)
        expected = basis @ torch.diag(1 / (moments + GAMMA)) @ basis.T
        torch.testing.assert_close(q.unmasked(name).dense(), expected)


def test_kfac_leaves_out_what_it_cannot_do() -> None:
    """Grouped and circular convolutions get a diagonal, as norms do, and hooks are gone after."""
    model = nn.Sequential(
        nn.Conv2d(2, 2, 3, padding=1, groups=2),
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(2, 2, 3, padding="same"),
        nn.BatchNorm2d(2),
        nn.Flatten(),
        nn.Linear(32, 3),
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    q, _ = estimate("kfac", model, [torch.randn(8, 2, 4, 4)], samples=2, sub_batch=4)
    kinds = {name: type(q.unmasked(name)).__name__ for name in q.layers}
    assert kinds == {**dict.fromkeys(["0", "1", "vectors:0"], "Diagonal"), "2": "Kronecker", "5": "Kronecker"}
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("method", [method for method in METHODS if find_method(method).needs_gamma])
def test_gamma_is_relative_to_the_mean_diagonal(method: str) -> None:
    model, x = mlp(outputs=1), torch.randn(8, 4)
    _, gamma = estimate(method, model, [x], Gaussian(), samples=8, sub_batch=1, relative_damping=0.3)
    diagonal = dense_fisher(model, x, gaussian_fisher).diagonal()
    used = diagonal if method != "fishleg" else dense_fisher(model, x[:4], gaussian_fisher).diagonal()
    assert gamma == pytest.approx(0.3 * float(used.mean()))


@pytest.mark.parametrize("method", METHODS)
def test_same_generator_same_q(method: str) -> None:
    model, batches = mlp(), [x for x, _ in labelled()]
    first, second, other = (
        estimate(
            method,
            model,
            batches,
            gamma=0.1,
            samples=4,
            sub_batch=4,
            generator=torch.Generator().manual_seed(s),
        )[0]
        for s in (1, 1, 2)
    )
    flat = [torch.cat([v.flatten() for v in q.diag().values()]) for q in (first, second, other)]
    assert torch.equal(flat[0], flat[1])
    assert torch.equal(flat[0], flat[2]) is (method in ("magnitude", "exact", "wanda", "sparsegpt", "alps"))


def unlabelled() -> list[Tensor]:
    return [torch.ones(4, 4)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: estimate("hessian", mlp(), unlabelled()), "one of fishleg, magnitude, .*, got 'hessian'"),
        (
            lambda: estimate("kfac", mlp(), unlabelled(), samples=0),
            "samples must be a whole number >= 1, got 0",
        ),
        (
            lambda: estimate("kfac", mlp(), unlabelled(), sub_batch=0),
            "sub_batch must be a whole number >= 1, got 0",
        ),
        (
            lambda: estimate("diagonal", mlp(), unlabelled(), gamma=-0.1),
            "gamma must be a number > 0, got -0.1",
        ),
        (lambda: estimate("mfac", mlp(), unlabelled(), empirical=True), "empirical Fisher needs labels"),
        (lambda: estimate("kfac", mlp(), unlabelled(), empirical=True), "diagonal, obert, mfac, got 'kfac'"),
        (lambda: estimate("mfac", mlp(), []), "loader is empty"),
        (
            lambda: estimate("mfac", nn.Linear(4, 2, bias=False), [torch.zeros(4, 4)]),
            "the Fisher matrix is zero",
        ),
        (
            lambda: estimate("exact", nn.Linear(64, 64), [torch.ones(2, 64)], gamma=1.0),
            "at most 4096 .* has 4160",
        ),
    ],
)
def test_errors(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_exact_refuses_a_large_layer_before_it_works_on_the_small_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def worked(*_: object, **__: object) -> None:
        raise AssertionError("a product with F was computed")

    monkeypatch.setattr("fishleg.inverse.estimators.exact.fisher_product", worked)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 512))
    with pytest.raises(ValueError, match=r"at most 4096 .* has 4608"):
        estimate("exact", model, [torch.ones(2, 8)], gamma=1.0)


@pytest.mark.parametrize("method", ["diagonal", "obert", "mfac", "kfac", "ekfac", "exact"])
def test_q_of_some_layers_is_that_of_the_whole_model(method: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    batches = [torch.randn(16, 5) for _ in range(2)]
    found = []
    for only in (None, {"2.weight"}):
        generator = torch.Generator().manual_seed(0)
        found.append(estimate(method, model, batches, samples=8, sub_batch=4, only=only, generator=generator))
    (whole, gamma), (part, same_gamma) = found
    assert gamma == same_gamma
    assert list(part.layers) == ["2"]
    torch.testing.assert_close(part.operator("2").dense(), whole.operator("2").dense())


def test_exact_looks_at_every_example_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def product(model: nn.Module, batch: Any, *given: Any, **options: Any) -> dict[str, Tensor]:
        seen.append(batch)
        return fisher_product(model, batch, *given, **options)

    monkeypatch.setattr("fishleg.inverse.estimators.exact.fisher_product", product)
    model = nn.Sequential(nn.Linear(3, 2))
    estimate("exact", model, [torch.randn(8, 3)], samples=16, sub_batch=4)
    assert len(seen) == 2 * 8  # two pieces, for each of eight columns
    with pytest.raises(ValueError, match="loader is empty"):
        estimate("exact", model, [], samples=16, sub_batch=4, gamma=1.0)
