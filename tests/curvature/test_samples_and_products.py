"""Calls of sample_h, fisher_product and sampled_product: parts of models, forms of batches, errors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from oracles import random_like_parameters
from torch import Tensor, nn

from fishleg import Categorical, Gaussian, Likelihood
from fishleg.curvature.products import fisher_product, sampled_product
from fishleg.curvature.samples import sample_h

X = torch.ones(4, 2, dtype=torch.float64)


NAN = torch.full((4, 2), torch.nan, dtype=torch.float64)


LABELS = torch.tensor([0, 1, 2, 0])


CALLS: dict[str, Callable[[nn.Module, Any, Likelihood], dict[str, Tensor]]] = {
    "sample_h": sample_h,
    "vectorized": partial(sample_h, groups=2, vectorize=True),
    "fisher_product": lambda model, *args: fisher_product(model, *args, random_like_parameters(model)),
}


def two_layers(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs))


def test_frozen_unused_and_chosen_parameters() -> None:
    model = two_layers(2)
    model.unused = nn.Linear(2, 2)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    model[0].weight.requires_grad_(False)
    x, names = torch.randn(4, 2), ["0.bias", "2.weight", "2.bias", "unused.weight", "unused.bias"]
    for vectorize in (False, True):
        h = sample_h(model, x, Categorical(), vectorize=vectorize, groups=2)
        assert list(h) == names
        assert not h["unused.weight"].any()
        assert bool(h["2.weight"].any())
        assert list(sample_h(model, x, Categorical(), names=names[1:3], vectorize=vectorize)) == names[1:3]
    product = fisher_product(model, x, Categorical(), random_like_parameters(model))
    assert list(product) == names
    assert not product["unused.bias"].any()


def test_own_forward_and_mappings() -> None:
    model, x = two_layers(2), torch.randn(4, 2)
    batch, v = {"pixels": x, "labels": torch.tensor([0, 1, 1, 0])}, random_like_parameters(model)
    options = {"forward": lambda model, batch: model(batch["pixels"])}
    for vectorize in (False, True):
        draws = []
        for b, o in ((x, {}), (batch, options)):
            generator = torch.Generator().manual_seed(1)
            draws.append(sample_h(model, b, Categorical(), generator=generator, vectorize=vectorize, **o))
        torch.testing.assert_close(draws[0], draws[1])
    products = [fisher_product(model, b, Categorical(), v, **o) for b, o in ((x, {}), (batch, options))]
    torch.testing.assert_close(products[0], products[1])


def test_float64_model_under_a_float32_default() -> None:
    torch.set_default_dtype(torch.float32)
    model, x = two_layers(1).double(), torch.randn(4, 2, dtype=torch.float64)
    samples = sample_h(model, x, Gaussian(0.5), groups=4)
    v = random_like_parameters(model)
    exact = fisher_product(model, x, Gaussian(0.5), v)
    torch.testing.assert_close(sampled_product(samples, v), exact)
    assert {value.dtype for value in (*samples.values(), *exact.values())} == {torch.float64}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("batch", "likelihood", "message"),
    [
        (NAN, Categorical(), "the model's outputs are not finite"),
        (X[:0], Categorical(), "empty"),
        ((X, torch.full((4,), -100)), Categorical(), "every position of the batch is ignored"),
        (X, Gaussian(learned_sigma=True), "even number of outputs"),
        ((X, X, X), Categorical(), "a batch of 3 parts is ambiguous"),
    ],
)
def test_bad_batches(call: str, batch: Any, likelihood: Likelihood, message: str) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout())
    with pytest.raises(ValueError, match=message):
        CALLS[call](model, batch, likelihood)
    assert all(module.training for module in model.modules())
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("targets", "likelihood"),
    [(LABELS + 1, Categorical()), (LABELS[:3], Categorical()), (X[:, 0], Categorical()), (X, Gaussian())],
)
def test_targets_that_do_not_fit_are_ignored(call: str, targets: Tensor, likelihood: Likelihood) -> None:
    model, draws = nn.Linear(2, 3), []
    for batch in (X, (X, targets)):
        torch.manual_seed(1)
        draws.append(CALLS[call](model, batch, likelihood))
    torch.testing.assert_close(draws[0], draws[1])


@pytest.mark.parametrize("call", CALLS)
def test_models_without_trainable_parameters(call: str) -> None:
    with pytest.raises(ValueError, match="no trainable parameters"):
        CALLS[call](nn.Linear(2, 3).requires_grad_(False), X, Categorical())


@pytest.mark.parametrize("call", CALLS)
def test_non_finite_curvature(call: str) -> None:
    """A finite output with an infinite slope: √0."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            return (self.w * x).sqrt()

    with pytest.raises(ValueError, match="non-finite curvature for parameter 'w'"):
        CALLS[call](Root(), X, Gaussian())


@pytest.mark.parametrize(
    ("options", "batch", "message"),
    [
        ({"groups": 0}, X, "groups must be between 1 and the batch size 4, got 0"),
        ({"groups": 5}, X, "groups must be between 1 and the batch size 4, got 5"),
        ({"groups": 3, "vectorize": True}, X, "divisible by groups, got 4 and 3"),
        ({"vectorize": True}, (X, LABELS.where(LABELS > 0, -100)), "does not support ignored positions"),
    ],
)
def test_bad_options(options: dict[str, Any], batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample_h(nn.Linear(2, 3), batch, Categorical(), **options)
