"""Vectors h and products F·v against the dense Fisher matrix and against curvlinops."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import NamedTuple

import pytest
import torch
from curvlinops import GGNLinearOperator
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
from torch.nn.attention import SDPBackend, sdpa_kernel

from fishleg.curvature import likelihoods
from fishleg.curvature.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from fishleg.curvature.products import fisher_product, sampled_product
from fishleg.curvature.samples import mean_diagonal, sample_h


class Tokens(nn.Module):
    """A small transformer with an output for each token, tied to its embedding: [batch, time, classes]."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, 4)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.3, batch_first=True)
        self.readout = nn.Linear(4, classes, bias=False)
        self.readout.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.readout(self.encoder(self.embed(tokens)))


class Case(NamedTuple):
    model: nn.Module
    x: Tensor
    y: Tensor
    likelihood: Likelihood
    output_fisher: Callable[[Tensor], Tensor]
    loss: nn.Module  # the same likelihood for curvlinops ...
    factor: float  # ... whose mean is over units and outputs, and without 1/2σ²

    @property
    def keep(self) -> Tensor | None:
        return self.y != -100 if isinstance(self.likelihood, Categorical) else None

    def dense(self) -> Tensor:
        return dense_fisher(self.model, self.x, self.output_fisher, self.keep)


def mlp(*sizes: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.Tanh(), nn.Linear(sizes[1], sizes[2]))


def conv_net() -> nn.Sequential:
    norm = nn.BatchNorm2d(3)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    body = nn.Conv2d(2, 3, 2), norm, nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(3, 2, 2)
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(8, 2))


def make(name: str) -> Case:
    torch.manual_seed(3)
    if name == "mlp":
        y = torch.tensor([0, 2, 1, 1])
        return Case(
            mlp(3, 4, 3), torch.randn(4, 3), y, Categorical(), categorical_fisher, nn.CrossEntropyLoss(), 1
        )
    if name == "mlp-gaussian":
        fisher = partial(gaussian_fisher, sigma=0.5)
        y = torch.randn(4, 2)
        return Case(mlp(3, 4, 2), torch.randn(4, 3), y, Gaussian(0.5), fisher, nn.MSELoss(), 2 / 2 / 0.5**2)
    if name == "conv":
        y = torch.randint(2, (3, 2)).double()
        x = torch.randn(3, 2, 4, 4)
        return Case(conv_net(), x, y, Bernoulli(), bernoulli_fisher, nn.BCEWithLogitsLoss(), 2)
    y = torch.tensor([[0, 2, -100, 1], [1, -100, -100, 0]])
    x = torch.tensor([[0, 1, 2, 2], [2, 0, 0, 1]])
    return Case(Tokens(), x, y, Categorical(), categorical_fisher, nn.CrossEntropyLoss(), 1)


CASES = ("mlp", "mlp-gaussian", "conv", "transformer")
cases = pytest.mark.parametrize("name", CASES)


@contextmanager
def plain_attention() -> Iterator[None]:
    """curvlinops differentiates forwards, which torch's fused attention cannot."""
    torch.backends.mha.set_fastpath_enabled(False)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.backends.mha.set_fastpath_enabled(True)


@cases
@pytest.mark.parametrize("training", [True, False])
def test_fisher_product_is_exact(name: str, training: bool) -> None:
    case = make(name)
    case.model.train(training)
    v = random_like_parameters(case.model)
    product = fisher_product(case.model, (case.x, case.y), case.likelihood, v)
    torch.testing.assert_close(product, dense_ggn_product(case.dense(), v))
    assert torch.backends.mha.get_fastpath_enabled()


@cases
def test_fisher_product_equals_curvlinops(name: str) -> None:
    case = make(name)
    v = random_like_parameters(case.model)
    product = fisher_product(case.model, (case.x, case.y), case.likelihood, v)

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = case.model.eval()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).flatten(0, -2)

    y = case.y.flatten() if name == "transformer" else case.y
    parameters = list(case.model.parameters())
    with plain_attention():
        ggn = GGNLinearOperator(Flat(), case.loss, parameters, [(case.x, y)], check_deterministic=False)
        expected = ggn @ [v[name] for name, _ in case.model.named_parameters()]
    torch.testing.assert_close(list(product.values()), [case.factor * e for e in expected])


@pytest.mark.parametrize("names", [["0.weight"], ["2.bias", "0.bias"]])
def test_fisher_product_of_some_parameters_is_a_principal_block(names: list[str]) -> None:
    case = make("mlp")
    v = random_like_parameters(case.model)
    padded = {name: value if name in names else torch.zeros_like(value) for name, value in v.items()}
    expected = dense_ggn_product(case.dense(), padded)
    product = fisher_product(case.model, (case.x, case.y), case.likelihood, {k: v[k] for k in names})
    assert set(product) == set(names)
    torch.testing.assert_close(product, {k: expected[k] for k in product})


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

        patch.setattr(likelihoods, "_signs", take)
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
    case = make(name)
    draws = []
    for vectorize in (False, True):
        options = {"generator": torch.Generator().manual_seed(0), "vectorize": vectorize}
        draws.append(sample_h(case.model, case.x, case.likelihood, **options))
    torch.testing.assert_close(draws[0], draws[1])


@cases
def test_random_second_moment_within_five_standard_errors(name: str) -> None:
    """With real random numbers: hᵀAh for fixed A, whose mean is Tr(AF)."""
    case, count = make(name), 400
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
    case = make(name)
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
