"""Which outputs of a batch count for F: labels that do not fit, ignored labels, infinite logits."""

import logging
import re
from typing import Any

import pytest
import torch
from helpers import EXAMPLES_8, QUICK, net_8_16_4, quick_prune
from torch import Tensor, nn

from fishleg import Bernoulli, Categorical, Gaussian, Likelihood, PruningOptions
from fishleg.curvature.kronecker_factors import kronecker_factors
from fishleg.curvature.layers import find_layers
from fishleg.curvature.products import fisher_product
from fishleg.curvature.samples import sample_h
from fishleg.inverse import estimate_inverse, make_problem


@pytest.mark.parametrize("method", ["fishleg", "kfac"])
@pytest.mark.parametrize(
    ("second", "options"),
    [
        (torch.randn(16), {"likelihood": "gaussian", "forward": lambda m, b: m(b[0])[:, :1]}),
        (torch.randn(16), {"likelihood": "gaussian", "forward": lambda m, b: m(b[0])[:, 0]}),
        (torch.rand(16, 4), {}),
        (torch.rand(16, 8), {"forward": lambda m, b: m(b[0] + b[1])}),
        (torch.arange(78, 94), {"forward": lambda m, b: m(b[0] + b[1].unsqueeze(1) / 94)}),
        (torch.full((16, 8), -100), {"forward": lambda m, b: m(b[0] + b[1])}),
    ],
)
def test_the_true_fisher_needs_no_labels(
    method: str, second: Tensor, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    second = second.double() if second.is_floating_point() else second
    with caplog.at_level(logging.WARNING):
        quick_prune(net_8_16_4(), [(EXAMPLES_8, second)], method=method, **options)
    assert not caplog.text


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.full((16,), 93), "label 93 is out of range"),
        (torch.zeros(16), r"integer labels of shape \(16,\) .*soft labels have the shape of the logits"),
        (torch.full((16, 4), 2.0), r"soft labels must lie in \[0, 1\], got 2\.0"),
    ],
)
def test_labels_that_do_not_fit_give_one_warning(
    targets: Tensor, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        quick_prune(net_8_16_4(), [(EXAMPLES_8, targets)], sparsity=[0.3, 0.5])
    told = [r.getMessage() for r in caplog.records if "do not fit the outputs" in r.getMessage()]
    assert len(told) == 1
    assert re.search(message, told[0])
    for options in ({"mode": "gradual"}, {"method": "diagonal", "empirical": True, "sub_batch": 16}):
        with pytest.raises(ValueError, match=message):
            quick_prune(net_8_16_4(), [(EXAMPLES_8, targets)], **options)


def test_labels_that_do_not_fit_do_not_change_f() -> None:
    model, forward = net_8_16_4(), lambda m, b: m(b[0])
    draws = [
        sample_h(
            model, (EXAMPLES_8, y), Categorical(), generator=torch.Generator().manual_seed(0), forward=forward
        )
        for y in (torch.zeros(16, dtype=torch.long), torch.full((16,), 93), EXAMPLES_8)
    ]
    torch.testing.assert_close(draws[0], draws[1])
    torch.testing.assert_close(draws[0], draws[2])
    first = kronecker_factors(
        model, find_layers(model), [EXAMPLES_8], Categorical(), generator=torch.Generator()
    )
    second = kronecker_factors(
        model, find_layers(model), [(EXAMPLES_8, EXAMPLES_8)], Categorical(), generator=torch.Generator()
    )
    torch.testing.assert_close(first, second)


def without_class(m: nn.Module, batch: Tensor) -> Tensor:
    outputs: Tensor = m(batch)
    return outputs.masked_fill(torch.tensor([False, False, False, True]), -torch.inf)


def test_a_logit_of_minus_infinity_removes_the_class() -> None:
    model, generators = net_8_16_4(), [torch.Generator().manual_seed(0) for _ in range(2)]
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    product = fisher_product(model, EXAMPLES_8, Categorical(), v, forward=without_class)
    three = fisher_product(model, EXAMPLES_8, Categorical(), v, forward=lambda m, b: m(b)[:, :3])
    torch.testing.assert_close(product, three)
    for vectorize in (False, True):
        h = sample_h(
            model, EXAMPLES_8, Categorical(), groups=2, forward=without_class, vectorize=vectorize,
            generator=generators[vectorize],
        )  # fmt: skip
        assert not bool(h["2.bias"][:, 3].any())
        assert bool(h["2.bias"][:, :3].any())
    kronecker_factors(model, find_layers(model), [EXAMPLES_8], Categorical(), forward=without_class)
    assert int(Categorical().sample(without_class(model, EXAMPLES_8)).max()) < 3
    q, _ = estimate_inverse(
        make_problem(
            model, [EXAMPLES_8], options=PruningOptions(**QUICK, method="fishleg"), forward=without_class
        )
    )
    assert all(bool(value.isfinite().all()) for value in q.diag().values())


@pytest.mark.parametrize(
    ("likelihood", "row"),
    [
        (Categorical(), [0.0, torch.nan, 0.0, 0.0]),
        (Categorical(), [0.0, torch.inf, 0.0, 0.0]),
        (Categorical(), [-torch.inf] * 4),
        (Bernoulli(), [0.0, -torch.inf, 0.0, 0.0]),
        (Gaussian(), [0.0, -torch.inf, 0.0, 0.0]),
    ],
)
def test_outputs_without_a_distribution_are_refused(likelihood: Likelihood, row: list[float]) -> None:
    with pytest.raises(ValueError, match="outputs are not finite"):
        sample_h(net_8_16_4(), EXAMPLES_8, likelihood, forward=lambda m, b: m(b) + torch.tensor(row))
