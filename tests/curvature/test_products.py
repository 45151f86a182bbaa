"""Products F·v against the dense Fisher matrix and against curvlinops."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from curvature_cases import cases, make_case
from curvlinops import GGNLinearOperator
from oracles import dense_ggn_product, random_like_parameters
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fishleg.curvature.products import fisher_product


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
    case = make_case(name)
    case.model.train(training)
    v = random_like_parameters(case.model)
    product = fisher_product(case.model, (case.x, case.y), case.likelihood, v)
    torch.testing.assert_close(product, dense_ggn_product(case.dense(), v))
    assert torch.backends.mha.get_fastpath_enabled()


@cases
def test_fisher_product_equals_curvlinops(name: str) -> None:
    case = make_case(name)
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
    case = make_case("mlp")
    v = random_like_parameters(case.model)
    padded = {name: value if name in names else torch.zeros_like(value) for name, value in v.items()}
    expected = dense_ggn_product(case.dense(), padded)
    product = fisher_product(case.model, (case.x, case.y), case.likelihood, {k: v[k] for k in names})
    assert set(product) == set(names)
    torch.testing.assert_close(product, {k: expected[k] for k in product})
