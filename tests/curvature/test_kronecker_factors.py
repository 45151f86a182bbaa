"""KFAC's factors against a computation position by position, and against F where KFAC is exact."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import EXAMPLES_8, net_8_16_4
from oracles import dense_fisher, gaussian_fisher, packed_fisher
from torch import Tensor, nn
from torch.nn import functional

from fishleg import Categorical, Gaussian, PruningOptions
from fishleg.curvature.kronecker_factors import kronecker_factors
from fishleg.curvature.layers import find_layers
from fishleg.inverse import estimate_inverse, make_problem


def packed(model: nn.Module, F: Tensor) -> Tensor:
    """F of a model of one layer, in packed order."""
    (layer,) = find_layers(model)
    return packed_fisher(model, F, layer.names)


def factors_of(model: nn.Module, batches: list[Any], likelihood: Any, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return kronecker_factors(model, find_layers(model), batches, likelihood, generator=generator)


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


def test_an_activation_in_place_changes_nothing() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 6)
    found = []
    for inplace in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace), nn.Linear(8, 3))
        found.append(factors_of(model, [x], Categorical()))
    for a, b in zip(*(list(factors.values()) for factors in found), strict=True):
        for side, other in zip(a, b, strict=True):
            torch.testing.assert_close(side, other)


def test_the_calls_of_a_module_are_as_many_positions() -> None:
    """A linear layer called twice, on two halves, has the factors of one call on both."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.shared(x[:, :4]), self.shared(x[:, 4:])], -1)

    torch.manual_seed(0)
    twice, x = Twice(), torch.randn(10, 8)
    once = nn.Sequential(nn.Unflatten(1, (2, 4)), twice.shared, nn.Flatten())
    (a,), (b,) = (factors_of(m, [x] * 50, Gaussian(1.0)).values() for m in (twice, once))
    for side, other in zip(a, b, strict=True):
        torch.testing.assert_close(side, other)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("kernel", [3, 2, (2, 3)])
def test_same_padding_is_that_of_the_convolution(kernel: Any) -> None:
    model = nn.Sequential(nn.Conv2d(2, 1, kernel, padding="same"), nn.Flatten(), nn.Linear(20, 1, bias=False))
    model[2].requires_grad_(False)
    nn.init.ones_(model[2].weight)
    x = torch.randn(6, 2, 4, 5)
    ((_, A),) = factors_of(model, [x], Gaussian(1.0)).values()
    layer = find_layers(model)[0]
    rows = []  # of inputs, position by position: what the output there changes by with each weight
    for i in range(20):

        def at(w: Tensor, i: int = i) -> Tensor:
            parts = {name.removeprefix("0."): v for name, v in layer.unpack(w.view(layer.shape)).items()}
            return torch.func.functional_call(model[0], parts, (x,)).flatten(1)[:, i]

        rows.append(torch.func.jacrev(at)(torch.zeros(torch.Size(layer.shape).numel())))
    a = torch.stack(rows).flatten(0, 1)
    torch.testing.assert_close(A, a.mT @ a / len(x))


def test_a_bare_linear_layer_is_a_model_too() -> None:
    model, x = nn.Linear(4, 1), torch.randn(10, 4)
    ((G, A),) = factors_of(model, [x], Gaussian(1.0)).values()
    F = dense_fisher(model, x, partial(gaussian_fisher, sigma=1.0))
    torch.testing.assert_close(torch.kron(G, A), packed(model, F))


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_layers_without_factors_are_named(method: str, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(9, 2))
    estimate_inverse(
        make_problem(
            model, [torch.randn(4, 2, 4)], options=PruningOptions(method=method, samples=4, sub_batch=2)
        )
    )
    assert f"{method} has no factors for 0: Q is diagonal there" in caplog.text
    caplog.clear()
    estimate_inverse(
        make_problem(
            nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten()),
            [torch.randn(4, 2, 4)],
            options=PruningOptions(method=method, samples=4),
        )
    )
    assert "has no factors for 0" in caplog.text


def test_kfac_leaves_ignored_batches_out() -> None:
    model, ignored = net_8_16_4(), (EXAMPLES_8, torch.full((16,), -100))
    alone, among = (
        kronecker_factors(model, find_layers(model), batches, Categorical(), generator=torch.Generator())
        for batches in ([EXAMPLES_8], [ignored, EXAMPLES_8])
    )
    torch.testing.assert_close(alone, among)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(2, 3, 3, padding=1),
        nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding="valid", bias=False),
        nn.Conv2d(2, 3, 3, padding="same", dilation=2),
    ],
    ids=["padded", "strided", "same-dilated"],
)
def test_the_mean_over_all_grids_is_the_sum_over_all_positions(conv: nn.Conv2d) -> None:
    model = nn.Sequential(conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    x = torch.randn(3, 2, 11, 9, dtype=torch.float64)

    def sides(seed: int, most: int | None) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        options: dict[str, Any] = {"generator": generator, "max_positions": most}
        ((found),) = kronecker_factors(model, find_layers(model), [x], Categorical(), **options).values()
        return found

    G, A = sides(0, None)
    sampled = [sides(seed, 2) for seed in range(60)]
    distinct = list({tuple(a.flatten().tolist()): a for _, a in sampled}.values())
    assert len(distinct) == 16  # a step of 4 in both directions
    torch.testing.assert_close(torch.stack(distinct).mean(0), A)
    assert any(torch.equal(g, G) for g, _ in sampled[:1])  # gradients are summed over all positions
    assert torch.equal(sides(0, 200)[1], A)
