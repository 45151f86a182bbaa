"""Likelihoods against torch.distributions, enumerated expectations and autograd."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from helpers import EXAMPLES_8, net_8_16_4, quick_prune
from oracles import bernoulli_fisher, categorical_fisher, gaussian_fisher, learned_sigma_fisher
from torch import Tensor, distributions, nn

from fishleg import Bernoulli, Categorical, Gaussian, Likelihood
from fishleg.curvature import likelihoods
from fishleg.curvature.likelihoods import as_likelihood
from fishleg.curvature.products import fisher_product
from fishleg.curvature.samples import sample_h

SIGMA = torch.tensor([0.5, 2.0, 1.5], dtype=torch.float64)


LEARNED = Gaussian(learned_sigma=True)


class Poisson(Likelihood):
    """A likelihood of one's own: counts with log rates f; only what must be given."""

    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        return -distributions.Poisson(f.exp()).log_prob(y).sum(-1).mean()

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(f.exp(), generator=generator)


def normal_of(f: Tensor) -> distributions.Distribution:
    return distributions.Independent(distributions.Normal(f[..., :2], f[..., 2:].exp()), 1)


# likelihood, its distribution over units, its output Fisher for one unit, and its number of outputs
Case = tuple[Likelihood, Callable[[Tensor], distributions.Distribution], Callable[[Tensor], Tensor], int]


CASES: dict[str, Case] = {
    "categorical": (Categorical(), lambda f: distributions.Categorical(logits=f), categorical_fisher, 3),
    "bernoulli": (
        Bernoulli(),
        lambda f: distributions.Independent(distributions.Bernoulli(logits=f), 1),
        bernoulli_fisher,
        3,
    ),
    "gaussian": (
        Gaussian(0.7),
        lambda f: distributions.Independent(distributions.Normal(f, 0.7), 1),
        lambda f: gaussian_fisher(f, 0.7),
        3,
    ),
    "gaussian-sigma-vector": (
        Gaussian(SIGMA),
        lambda f: distributions.Independent(distributions.Normal(f, SIGMA), 1),
        lambda f: gaussian_fisher(f, SIGMA),
        3,
    ),
    "gaussian-learned-sigma": (LEARNED, normal_of, learned_sigma_fisher, 4),
}


cases = pytest.mark.parametrize("name", CASES)


def outputs(name: str, *units: int) -> Tensor:
    return torch.randn(*units, CASES[name][3], generator=torch.Generator().manual_seed(1))


def sign_patterns(*shape: int) -> Iterator[Tensor]:
    for signs in product((-1.0, 1.0), repeat=torch.Size(shape).numel()):
        yield torch.tensor(signs).reshape(shape)


@cases
@pytest.mark.parametrize("units", [(5,), (2, 3)])
def test_nll_is_the_mean_over_units(name: str, units: tuple[int, ...]) -> None:
    likelihood, distribution, _, _ = CASES[name]
    f = outputs(name, *units)
    y = distribution(f).sample()
    torch.testing.assert_close(likelihood.nll(f, y), -distribution(f).log_prob(y).mean())
    likelihood.check(f, y)
    assert likelihood.units(f) == torch.Size(units).numel()


@cases
def test_samples_follow_the_distribution(name: str) -> None:
    """Means within 5 standard errors, for each outcome (categorical) or output and its square."""
    likelihood, distribution, _, _ = CASES[name]
    f, n = outputs(name), 20_000
    draws = likelihood.sample(f.expand(n, -1), torch.Generator().manual_seed(0))
    if name == "categorical":
        draws, mean = nn.functional.one_hot(draws, 3).double(), f.softmax(-1)
        variance = mean * (1 - mean)
    else:
        mean, variance = distribution(f).mean, distribution(f).variance
    error = (draws.mean(0) - mean).abs()
    assert bool((error <= 5 * (variance / n).sqrt()).all())
    spread = (draws - mean).square()
    assert bool(((spread.mean(0) - variance).abs() <= 5 * spread.std(0) / n**0.5).all())


@cases
def test_samples_are_reproducible_and_keep_the_shape_of_targets(name: str) -> None:
    likelihood = CASES[name][0]
    f = outputs(name, 2, 50)
    first, again, other = (likelihood.sample(f, torch.Generator().manual_seed(s)) for s in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    likelihood.check(f, first)


@cases
def test_cotangent_covariance_is_the_output_fisher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, by running through all signs of two units; units are independent of each other."""
    likelihood, _, fisher, _ = CASES[name]
    f = outputs(name, 2)
    moment, count = 0.0, 0
    for signs in sign_patterns(*f.shape):
        monkeypatch.setattr(likelihoods.base, "random_signs", lambda like, generator, signs=signs: signs)
        c = likelihood.cotangent(f).flatten()
        moment, count = moment + torch.outer(c, c), count + 1
    torch.testing.assert_close(moment / count, torch.block_diag(fisher(f[0]), fisher(f[1])))


def test_signs_are_fair_and_reproducible() -> None:
    like = torch.zeros(100_000, dtype=torch.float32)
    signs = likelihoods.base.random_signs(like, torch.Generator().manual_seed(0))
    assert signs.dtype == like.dtype
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert abs(float(signs.mean())) < 5 / 100_000**0.5
    assert torch.equal(signs, likelihoods.base.random_signs(like, torch.Generator().manual_seed(0)))


def test_default_cotangent_is_the_score_of_a_sampled_label(monkeypatch: pytest.MonkeyPatch) -> None:
    likelihood, f = Categorical(), outputs("categorical", 1)
    moment = 0.0
    for y, p in enumerate(f[0].softmax(-1)):
        monkeypatch.setattr(likelihood, "sample", lambda f, generator, y=y: torch.tensor([y]))
        c = Likelihood.cotangent(likelihood, f)[0]
        moment = moment + p * torch.outer(c, c)
    torch.testing.assert_close(moment, categorical_fisher(f[0]))


@cases
def test_output_fisher_product(name: str) -> None:
    likelihood, _, fisher, _ = CASES[name]
    f, t = outputs(name, 2, 3), torch.randn(2, 3, CASES[name][3])
    expected = torch.stack([fisher(a) @ b for a, b in zip(f.flatten(0, 1), t.flatten(0, 1), strict=True)])
    torch.testing.assert_close(likelihood.output_fisher(f, t), expected.reshape(t.shape))


@cases
def test_output_fisher_is_the_hessian_of_the_expected_nll(name: str) -> None:
    """E over y by enumeration; for a Gaussian y = μ ± σ has the right first two moments, all that matters."""
    likelihood, _, _, k = CASES[name]
    f = outputs(name)
    if name == "categorical":
        weighted = [(p, torch.tensor(y)) for y, p in enumerate(f.softmax(-1))]
    elif name == "bernoulli":
        bits = [(signs + 1) / 2 for signs in sign_patterns(k)]
        weighted = [(distributions.Bernoulli(logits=f).log_prob(y).sum().exp(), y) for y in bits]
    else:
        mean, sigma = (f[:2], f[2:].exp()) if likelihood is LEARNED else (f, likelihood.sigma)
        weighted = [(0.5 ** len(mean), mean + sigma * signs) for signs in sign_patterns(len(mean))]

    def expected_nll(g: Tensor) -> Tensor:
        return sum(w * likelihood.nll(g.unsqueeze(0), y.unsqueeze(0)) for w, y in weighted)

    hessian = torch.autograd.functional.hessian(expected_nll, f)
    torch.testing.assert_close(torch.stack([likelihood.output_fisher(f, e) for e in torch.eye(k)]), hessian)


@cases
@pytest.mark.parametrize("units", [(5,), (2, 3)])
def test_divergence_is_the_mean_kl(name: str, units: tuple[int, ...]) -> None:
    """KL(reference ‖ f), in this order."""
    likelihood, distribution, _, k = CASES[name]
    reference, f = outputs(name, *units), torch.randn(*units, k)
    kl = distributions.kl_divergence(distribution(reference), distribution(f))
    assert kl.shape == units
    torch.testing.assert_close(likelihood.divergence(f, reference), kl.mean())
    valid = torch.rand(units) < 0.5
    assert 0 < int(valid.sum()) < valid.numel()
    torch.testing.assert_close(likelihood.divergence(f, reference, valid), kl[valid].mean())
    assert float(likelihood.divergence(f, reference, torch.zeros(units, dtype=torch.bool))) == 0


@cases
def test_divergence_is_least_at_the_reference(name: str) -> None:
    likelihood, _, _, k = CASES[name]
    reference = outputs(name, 4)
    f = reference.clone().requires_grad_()
    loss = likelihood.divergence(f, reference)
    (gradient,) = torch.autograd.grad(loss, f)
    assert float(loss.detach()) == pytest.approx(0, abs=1e-14)
    torch.testing.assert_close(gradient, torch.zeros_like(f), rtol=0, atol=1e-14)
    for _ in range(5):
        assert float(likelihood.divergence(reference + 0.1 * torch.randn(4, k), reference)) > 1e-6


@cases
def test_hessian_of_the_divergence_is_the_output_fisher(name: str) -> None:
    """Of two units: each its own Fisher, over the number of units, and nothing between them."""
    likelihood, _, _, k = CASES[name]
    reference = outputs(name, 2)
    hessian = torch.autograd.functional.hessian(lambda f: likelihood.divergence(f, reference), reference)
    columns = [likelihood.output_fisher(reference, e.view(2, k)).flatten() for e in torch.eye(2 * k)]
    torch.testing.assert_close(2 * hessian.reshape(2 * k, 2 * k), torch.stack(columns))


def test_divergence_in_the_tails() -> None:
    """Sure predictions: log-probabilities, never the logarithm of a probability that is 0."""
    sure, unsure = torch.tensor([[1000.0, 0.0, -1000.0]]), torch.tensor([[-1000.0, 0.0, 1000.0]])
    for likelihood, expected in ((Categorical(), 2000.0), (Bernoulli(), 2000.0)):
        assert float(likelihood.divergence(sure, sure)) == 0
        assert float(likelihood.divergence(unsure, sure)) == pytest.approx(expected)


def test_divergence_with_classes_in_front() -> None:
    f, reference, valid = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5), torch.rand(2, 4, 5) < 0.5
    moved = f.movedim(1, -1), reference.movedim(1, -1)
    for counts in (None, valid):
        expected = Categorical().divergence(*moved, counts)
        torch.testing.assert_close(Categorical(class_dim=1).divergence(f, reference, counts), expected)


def test_likelihood_without_a_divergence_says_what_to_define() -> None:
    with pytest.raises(NotImplementedError, match=r"Poisson has no divergence; define divergence\(f, "):
        Poisson().divergence(torch.zeros(2, 1), torch.zeros(2, 1))


def test_class_dim_moves_the_classes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segmentation outputs [batch, classes, height, width] equal the same numbers with classes last."""
    first, last = Categorical(class_dim=1), Categorical()
    f = torch.randn(2, 3, 4, 5)
    g, t = f.movedim(1, -1), torch.randn(2, 3, 4, 5)
    y = first.sample(f, torch.Generator().manual_seed(0))
    assert y.shape == (2, 4, 5)
    assert torch.equal(y, last.sample(g, torch.Generator().manual_seed(0)))
    assert first.units(f) == last.units(g) == 40
    first.check(f, y)
    torch.testing.assert_close(first.nll(f, y), nn.functional.cross_entropy(f, y))
    moved = first.output_fisher(f, t).movedim(1, -1)
    torch.testing.assert_close(moved, last.output_fisher(g, t.movedim(1, -1)))
    signs = torch.sign(torch.randn(2, 4, 5, 3))
    monkeypatch.setattr(likelihoods.base, "random_signs", lambda like, generator: signs)
    torch.testing.assert_close(first.cotangent(f).movedim(1, -1), last.cotangent(g))


def test_ignored_positions_do_not_count() -> None:
    likelihood, f = Categorical(ignore_index=-1), torch.randn(2, 3, 4)
    y = torch.tensor([[0, -1, 3], [-1, -1, 2]])
    likelihood.check(f, y)
    kept = y != -1
    torch.testing.assert_close(likelihood.nll(f, y), nn.functional.cross_entropy(f[kept], y[kept]))
    assert torch.equal(likelihood.valid(f, y), kept)
    assert likelihood.valid(f, y.clamp(min=0)) is None
    assert likelihood.valid(f, None) is None


@pytest.mark.slow
def test_own_likelihood_needs_only_nll_and_sample() -> None:
    """Poisson regression: F = mean of λ x xᵀ, within 5 standard errors of the average of hhᵀ."""
    model, x, n = nn.Linear(2, 1, bias=False), torch.randn(3, 2), 3000
    likelihood, generator = Poisson(), torch.Generator().manual_seed(0)
    h = torch.cat(
        [sample_h(model, x, likelihood, generator=generator)["weight"].flatten(1) for _ in range(n)]
    )
    rates = model(x).detach().exp().flatten()
    outer = h[:, :, None] * h[:, None, :]
    error = (outer.mean(0) - torch.einsum("b,bi,bj->ij", rates, x, x) / 3).abs()
    assert bool((error <= 5 * outer.std(0) / n**0.5).all())
    with pytest.raises(NotImplementedError, match="Poisson has no closed-form output Fisher"):
        likelihood.output_fisher(model(x), model(x))


def test_as_likelihood() -> None:
    assert isinstance(as_likelihood("bernoulli"), Bernoulli)
    assert as_likelihood(LEARNED) is LEARNED
    with pytest.raises(ValueError, match=r"one of categorical, .* got 'poisson'"):
        as_likelihood("poisson")


@pytest.mark.parametrize("sigma", [0.0, -1.0, torch.tensor([1.0, -2.0])])
def test_sigma_must_be_positive(sigma: float | Tensor) -> None:
    with pytest.raises(ValueError, match="sigma must be > 0, got"):
        Gaussian(sigma)


F23 = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("likelihood", "f", "y", "message"),
    [
        (Categorical(), [1.0], None, "Categorical needs a floating-point output tensor, got list"),
        (Gaussian(), F23.long(), None, "floating-point output tensor, got int64 tensor of shape \\(2, 3\\)"),
        (Bernoulli(), torch.zeros(0, 3), None, r"non-empty output .* shape \(0, 3\)"),
        (Gaussian(), torch.tensor(1.0), None, r"non-empty output .* shape \(\)"),
        (Bernoulli(), torch.zeros(4), None, r"at least 2 dimensions, got .* shape \(4,\)"),
        (Categorical(), torch.zeros(3), None, r"at least 2 dimensions, got .* shape \(3,\)"),
        (Categorical(), F23, torch.tensor([0.0, 1.0]), r"integer labels of shape \(2,\) .* got float"),
        (Categorical(), F23, torch.tensor([0, 1, 2]), r"integer labels of shape \(2,\) .* shape \(3,\)"),
        (Categorical(class_dim=1), torch.zeros(2, 3, 4), torch.zeros(2, 3).long(), r"of shape \(2, 4\)"),
        (Categorical(), F23, torch.tensor([0, 3]), r"label 3 is out of range: labels must be in 0\.\.2"),
        (Categorical(), F23, torch.tensor([-1, 0]), "label -1 is out of range"),
        (LEARNED, F23, None, "even number of outputs .* got 3"),
        (LEARNED, torch.zeros(2, 4), torch.zeros(2, 4), r"Gaussian needs targets of shape \(2, 2\)"),
        (Gaussian(), F23, torch.zeros(2), r"targets of shape \(2, 3\), got .* shape \(2,\)"),
        (Bernoulli(), F23, torch.zeros(2, 2), r"targets of shape \(2, 3\), got .* shape \(2, 2\)"),
        (Bernoulli(), F23, torch.full((2, 3), 1.5), r"must lie in \[0, 1\], got 1.5"),
        (Bernoulli(), F23, torch.full((2, 3), -0.5), r"must lie in \[0, 1\], got -0.5"),
        (Bernoulli(), F23, torch.full((2, 3), torch.nan), r"must lie in \[0, 1\], got nan"),
    ],
)
def test_check_names_the_value_and_the_rule(
    likelihood: Likelihood, f: Tensor, y: Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        likelihood.check(f, y)


def test_gaussian_nll_does_not_broadcast() -> None:
    with pytest.raises(ValueError, match=r"targets of shape \(5, 5\), got float.* tensor of shape \(5,\)"):
        Gaussian().nll(torch.zeros(5, 5), torch.zeros(5))
    f, y = torch.randn(5, 1), torch.randn(5)
    assert Gaussian().nll(f, y) == Gaussian().nll(f, y.unsqueeze(1))


def test_no_loss_is_below_the_floor():
    f = torch.randn(6, 3)
    assert Categorical().nll_floor(f) == Bernoulli().nll_floor(f) == 0.0
    gaussian = Gaussian(torch.tensor([0.5, 1.0, 2.0]))
    assert gaussian.nll_floor(f) == pytest.approx(float(gaussian.nll(f, f)))
    assert Gaussian(learned_sigma=True).nll_floor(torch.randn(6, 4)) is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.bool])
def test_integers_of_any_size_are_labels(dtype: torch.dtype) -> None:
    f, y = torch.randn(16, 4), (torch.arange(16) % 2).to(dtype)
    categorical = Categorical()
    categorical.check(f, y)
    assert categorical.valid(f, y) is None
    torch.testing.assert_close(categorical.nll(f, y), categorical.nll(f, y.long()))
    quick_prune(net_8_16_4(), [(EXAMPLES_8, y)], mode="gradual", stages=1)


def test_soft_labels() -> None:
    f = torch.randn(6, 3, 5)
    for class_dim in (1, 2):
        categorical = Categorical(class_dim=class_dim)
        hard = torch.randint(0, f.shape[class_dim], (6, 15 // f.shape[class_dim]))
        soft = nn.functional.one_hot(hard, f.shape[class_dim]).movedim(-1, class_dim).double()
        categorical.check(f, soft)
        assert categorical.valid(f, soft) is None
        torch.testing.assert_close(categorical.nll(f, soft), categorical.nll(f, hard))
    with pytest.raises(ValueError, match=r"integer labels of shape \(4,\)"):
        Categorical().nll(torch.randn(4, 4), torch.zeros(4))


@pytest.mark.parametrize("sigma", [1.0, torch.tensor(0.5)])
def test_one_number_per_example(sigma: Any) -> None:
    gaussian, f, y = Gaussian(sigma), torch.randn(6), torch.randn(6)
    column = f.unsqueeze(1)
    gaussian.check(f, y)
    assert gaussian.units(f) == gaussian.units(column) == 6
    assert (
        gaussian.sample(f).shape == gaussian.cotangent(f).shape == gaussian.output_fisher(f, y).shape == (6,)
    )
    for outputs in (f, column):
        for targets in (y, y.unsqueeze(1)):
            gaussian.check(outputs, targets)
            torch.testing.assert_close(gaussian.nll(outputs, targets), gaussian.nll(column, y.unsqueeze(1)))
    torch.testing.assert_close(gaussian.divergence(f, y), gaussian.divergence(column, y.unsqueeze(1)))
    model, line = nn.Linear(8, 1), nn.Sequential(nn.Linear(8, 1), nn.Flatten(0))
    line.load_state_dict({f"0.{name}": value for name, value in model.state_dict().items()})
    v = {"weight": torch.randn(1, 8), "bias": torch.randn(1)}
    product = fisher_product(line, EXAMPLES_8, gaussian, {f"0.{name}": value for name, value in v.items()})
    expected = fisher_product(model, EXAMPLES_8, gaussian, v)
    torch.testing.assert_close(product, {f"0.{name}": value for name, value in expected.items()})
    with pytest.raises(ValueError, match=r"even number of outputs .* got 1"):
        Gaussian(learned_sigma=True).check(f, None)
