"""KFAC's factors against a computation position by position, and against F where KFAC is exact."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from oracles import dense_fisher, gaussian_fisher, packed_fisher
from torch import Tensor, nn
from torch.nn import functional

from fishleg.kfac import kfac_factors
from fishleg.layers import find_layers
from fishleg.likelihoods import Categorical, Gaussian


def packed(model: nn.Module, F: Tensor) -> Tensor:
    """F of a model of one layer, in packed order."""
    (layer,) = find_layers(model)
    return packed_fisher(model, F, layer.names)


def factors_of(model: nn.Module, batches: list[Any], likelihood: Any, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return kfac_factors(model, find_layers(model), batches, likelihood, generator=generator)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 1)), (10, 4)),
        (lambda: nn.Sequential(nn.Linear(4, 1, bias=False)), (10, 4)),
        (lambda: nn.Sequential(nn.Linear(4, 1)), (5, 3, 4)),  # tokens: units are examples × positions
        (lambda: nn.Sequential(nn.Conv2d(2, 1, 3), nn.Flatten()), (10, 2, 3, 3)),
    ],
    ids=["linear", "no-bias", "tokens", "conv"],
)
def test_kfac_is_exact_for_one_gaussian_output(
    model: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    built, x, sigma = model(), torch.randn(shape), 0.7
    ((G, A),) = factors_of(built, [x], Gaussian(sigma)).values()
    F = dense_fisher(built, x, partial(gaussian_fisher, sigma=sigma))
    torch.testing.assert_close(torch.kron(G, A), packed(built, F))


def test_kfac_is_right_in_expectation_for_several_gaussian_outputs() -> None:
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.randn(64, 3)
    ((G, A),) = factors_of(model, [x] * 300, Gaussian(0.5)).values()
    block = packed(model, dense_fisher(model, x, partial(gaussian_fisher, sigma=0.5)))
    assert float((torch.kron(G, A) - block).norm() / block.norm()) < 0.03


def test_kfac_of_a_network_by_hand() -> None:
    """Both sides of a convolution and of a linear layer, position by position, from the same cotangents."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))
    batches = [torch.randn(5, 2, 4, 4) for _ in range(2)]
    found = factors_of(model, batches, Categorical(), seed=3)
    generator = torch.Generator().manual_seed(3)
    G_conv, A_conv, G_lin, A_lin = (torch.zeros(n, n) for n in (3, 19, 3, 13))
    for x in batches:
        s = model[0](x).detach().requires_grad_()
        a = model[2](model[1](s))
        f = model[3](a)
        c = Categorical().cotangent(f, generator)
        (g,) = torch.autograd.grad(f, s, c)
        for n in range(5):
            extended = torch.cat([a[n].detach(), torch.ones(1)])
            G_lin += torch.outer(c[n], c[n]) / 10
            A_lin += torch.outer(extended, extended) / 10
            padded = functional.pad(x[n], (1, 1, 1, 1))
            for i, j in [(0, 0), (0, 1), (1, 0), (1, 1)]:
                window = padded[:, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].flatten()
                patch = torch.cat([window, torch.ones(1)])
                G_conv += torch.outer(g[n, :, i, j], g[n, :, i, j]) / (10 * 4)
                A_conv += torch.outer(patch, patch) / 10
    torch.testing.assert_close(found["0"], (G_conv, A_conv))
    torch.testing.assert_close(found["3"], (G_lin, A_lin))


def test_ignored_positions_have_no_curvature() -> None:
    """As if the ignored tokens were not there: Σ ccᵀ over the others / (their number × tokens a row)."""
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(5, 2, 4)
    y = torch.randint(3, (5, 2))
    y[1:, 1] = -100
    ((G, A),) = factors_of(model, [(x, y)], Categorical(), seed=1).values()
    c = Categorical().cotangent(model(x), torch.Generator().manual_seed(1)).detach()[y >= 0]
    torch.testing.assert_close(G, c.T @ c / (6 * 2))
    torch.testing.assert_close(A[:4, :4], torch.einsum("nti,ntj->ij", x, x) / 5)
