"""Vectors h: their second moment is the Fisher matrix."""

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from curvature_cases import Tokens, cases, make_case, mlp
from helpers import batches_of_5, net_with_batchnorm
from oracles import (
    bernoulli_fisher,
    categorical_fisher,
    dense_fisher,
    dense_ggn_product,
    flatten,
    gaussian_fisher,
    learned_sigma_fisher,
    random_like_parameters,
)
from torch import Tensor, nn

from fishleg import Bernoulli, Categorical, Gaussian
from fishleg.curvature import likelihoods
from fishleg.curvature.products import fisher_product, sampled_product
from fishleg.curvature.samples import mean_diagonal, sample_h

# A few outputs, so that all random signs can be run through: the expectation is then exact.
SMALL = {
    "mlp": lambda: (mlp(2, 2, 2), torch.randn(3, 2), None, Categorical(), categorical_fisher),
    "bernoulli": lambda: (mlp(2, 2, 2), torch.randn(3, 2), None, Bernoulli(), bernoulli_fisher),
    "learned-sigma": lambda: (
        mlp(2, 2, 2),
        torch.randn(3, 2),
        None,
        Gaussian(learned_sigma=True),
        learned_sigma_fisher,
    ),
    "tokens": lambda: (
        Tokens(2),
        torch.randint(2, (2, 2)),
        torch.tensor([[0, -100], [1, 0]]),
        Categorical(),
        categorical_fisher,
    ),
}


def enumerate_second_moment(
    sample: Callable[[], dict[str, Tensor]], size: int, patch: pytest.MonkeyPatch
) -> Tensor:
    """E[hhᵀ], averaged over groups, by replacing the random signs with each of the 2^size patterns."""
    total = 0.0
    for signs in product((-1.0, 1.0), repeat=size):
        rest = torch.tensor(signs)

        def take(like: Tensor, generator: object) -> Tensor:
            nonlocal rest
            head, rest = rest[: like.numel()], rest[like.numel() :]
            return head.reshape(like.shape)

        patch.setattr(likelihoods.base, "random_signs", take)
        h = torch.cat([value.flatten(1) for value in sample().values()], 1)
        total = total + h.T @ h / len(h)
        assert rest.numel() == 0
    return total / 2**size


@pytest.mark.parametrize("name", SMALL)
def test_second_moment_of_h_is_the_fisher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y, likelihood, output_fisher = SMALL[name]()
    keep = None if y is None else y != -100
    F = dense_fisher(model, x, output_fisher, keep)
    size = model.eval()(x).numel()
    batch = x if y is None else (x, y)
    moment = enumerate_second_moment(lambda: sample_h(model, batch, likelihood), size, monkeypatch)
    torch.testing.assert_close(moment, F)


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_groups_average_to_the_fisher(groups: int, vectorize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, _, likelihood, output_fisher = SMALL["mlp"]()
    options = {"groups": groups, "vectorize": vectorize}
    assert sample_h(model, x, likelihood, **options)["0.weight"].shape == (groups, 2, 2)
    moment = enumerate_second_moment(lambda: sample_h(model, x, likelihood, **options), 6, monkeypatch)
    torch.testing.assert_close(moment, dense_fisher(model, x, output_fisher))


@cases
def test_vectorized_equals_looped(name: str) -> None:
    case = make_case(name)
    draws = []
    for vectorize in (False, True):
        options = {"generator": torch.Generator().manual_seed(0), "vectorize": vectorize}
        draws.append(sample_h(case.model, case.x, case.likelihood, **options))
    torch.testing.assert_close(draws[0], draws[1])


@pytest.mark.slow
@cases
def test_random_second_moment_within_five_standard_errors(name: str) -> None:
    """With real random numbers: hᵀAh for fixed A, whose mean is Tr(AF)."""
    case, count = make_case(name), 400
    v, u = flatten(random_like_parameters(case.model, 1)), flatten(random_like_parameters(case.model, 2))
    generator = torch.Generator().manual_seed(0)
    draws = []
    for _ in range(count):
        h = flatten(sample_h(case.model, (case.x, case.y), case.likelihood, generator=generator))
        draws.append((h @ v) * (h @ u))
    values = torch.stack(draws)
    assert abs(values.mean() - v @ case.dense() @ u) <= 5 * values.std() / count**0.5


@pytest.mark.parametrize("vectorize", [False, True])
def test_one_gaussian_output_and_one_group_each_is_exact(vectorize: bool) -> None:
    """hhᵀ does not depend on the sign then: the mean over groups is the Fisher of the batch."""
    model, x, likelihood = mlp(3, 2, 1), torch.randn(6, 3), Gaussian(0.5)
    samples = sample_h(model, x, likelihood, groups=6, vectorize=vectorize)
    h = torch.cat([value.flatten(1) for value in samples.values()], 1)
    F = dense_fisher(model, x, partial(gaussian_fisher, sigma=0.5))
    torch.testing.assert_close(h.T @ h / 6, F)
    v = random_like_parameters(model)
    torch.testing.assert_close(sampled_product(samples, v), dense_ggn_product(F, v))
    assert mean_diagonal(samples) == pytest.approx(float(F.diagonal().mean()), rel=1e-12)


def test_ragged_groups_are_those_of_the_parts() -> None:
    model, x, likelihood = mlp(3, 2, 1), torch.randn(5, 3), Gaussian()
    h = sample_h(model, x, likelihood, groups=2, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    parts = [sample_h(model, part, likelihood, generator=generator) for part in (x[:2], x[2:])]
    assert all(torch.equal(h[name], torch.cat([part[name] for part in parts])) for name in h)


@cases
def test_nothing_but_the_mask_comes_from_labels_and_the_model_stays_as_it_was(name: str) -> None:
    case = make_case(name)
    case.model.train()
    next(case.model.children()).eval()
    modes = [module.training for module in case.model.modules()]
    state = {key: value.clone() for key, value in case.model.state_dict().items()}
    v = random_like_parameters(case.model)
    other = case.y.roll(1, 0) if case.keep is None else torch.where(case.keep, (case.y + 1) % 3, case.y)
    assert not torch.equal(other, case.y)
    results = []
    for y in (case.y, other):
        generator = torch.Generator().manual_seed(5)
        h = sample_h(case.model, (case.x, y), case.likelihood, generator=generator)
        results.append((h, fisher_product(case.model, (case.x, y), case.likelihood, v)))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert [module.training for module in case.model.modules()] == modes
    torch.testing.assert_close(dict(case.model.state_dict()), state, rtol=0, atol=0)
    assert all(p.grad is None for p in case.model.parameters())


def along_filters(h: Tensor, model: nn.Sequential) -> float:
    """How much of the vectors h [groups, 4, 5] lies along the filters themselves."""
    w = model[0].weight.detach()
    return float((h * w).sum(-1).abs().max() / h.norm(dim=-1).max() / w.norm(dim=-1).min())


@pytest.mark.slow
def test_vectors_by_the_batch_have_the_covariance_of_the_coupled_outputs() -> None:
    model, x = net_with_batchnorm(), batches_of_5(6)[0]
    model[1].train()
    statistics = {name: value.clone() for name, value in model[1].named_buffers()}
    generator, name = torch.Generator().manual_seed(0), "0.weight"
    draws = [
        sample_h(
            model, x, Categorical(), names=[name], generator=generator, batch_statistics=True
        )[name][0].flatten()
        for _ in range(3000)
    ]  # fmt: skip
    assert all(torch.equal(value, statistics[key]) for key, value in model[1].named_buffers())
    covariance = torch.stack(draws).mT @ torch.stack(draws) / len(draws)

    def outputs(w: Tensor) -> Tensor:
        y = x @ w.mT
        y = (y - y.mean(0)) / (y.var(0, unbiased=False) + 1e-9).sqrt()
        return torch.tanh(y * model[1].weight + model[1].bias) @ model[3].weight.mT + model[3].bias

    w = model[0].weight.detach()
    J = torch.func.jacrev(outputs)(w).flatten(2)  # [6, 3, 20]: every example moves every output
    F = sum(
        j.detach().mT @ categorical_fisher(f) @ j.detach()
        for j, f in zip(J, outputs(w).detach(), strict=True)
    ) / len(x)
    assert float((covariance - F).norm() / F.norm()) < 0.1
    assert along_filters(torch.stack(draws).view(-1, 4, 5), model) < 1e-6


def test_sparse_gradients_of_embeddings() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(9, 6, sparse=True), nn.Linear(6, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = self.head(self.embedding(tokens).mean(1))
            return logits

    h = sample_h(Bag(), torch.randint(0, 9, (4, 5)), Categorical())
    assert not h["embedding.weight"].is_sparse
    assert bool(h["embedding.weight"].any())
