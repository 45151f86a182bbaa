"""Wanda and SparseGPT: Q against the dense inverse, and pruning against least squares on the outputs."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fishleg import PruningOptions, Surgeon
from fishleg.curvature.kronecker_factors import input_factors, kronecker_factors
from fishleg.curvature.layers import find_layers
from fishleg.curvature.likelihoods import Categorical
from fishleg.inverse import estimate_inverse, make_problem

DAMPING = 0.03


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 5, bias=False)
    )


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(20, 2, 4, 4, generator=generator) for _ in range(2)]


def inputs_by_hand(model: nn.Sequential) -> dict[str, Tensor]:
    """E[aaᵀ] of both layers from every window and every example, one at a time."""
    conv, linear = torch.zeros(19, 19), torch.zeros(12, 12)
    for x in batches():
        hidden = model[:3](x).detach()
        for n in range(len(x)):
            linear += torch.outer(hidden[n], hidden[n]) / 40
            padded = functional.pad(x[n], (1, 1, 1, 1))
            for i, j in [(0, 0), (0, 1), (1, 0), (1, 1)]:
                window = padded[:, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].flatten()
                patch = torch.cat([window, torch.ones(1)])
                conv += torch.outer(patch, patch) / 40
    return {"0": conv, "3": linear}


def test_the_input_side_is_that_of_every_position() -> None:
    model = network()
    layers = find_layers(model)
    found = input_factors(model, layers, batches())
    expected = inputs_by_hand(model)
    with_gradients = kronecker_factors(model, layers, batches(), Categorical())
    assert found.keys() == expected.keys()
    for name, side in found.items():
        torch.testing.assert_close(side, expected[name])
        torch.testing.assert_close(side, with_gradients[name][1])
        assert not side.requires_grad


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_q_is_the_dense_inverse(method: str) -> None:
    model = network()
    options = PruningOptions(method=method, samples=2, sub_batch=20, relative_damping=DAMPING)
    q, _ = estimate_inverse(make_problem(model, batches(), options=options))
    for name, rows in (("0", 3), ("3", 5)):
        A = inputs_by_hand(model)[name]
        if method == "wanda":
            expected = torch.diag(1 / A.diagonal())
        else:
            expected = torch.linalg.inv(A + DAMPING * A.diagonal().mean() * torch.eye(len(A)))
        found = q.operator(name).dense()
        torch.testing.assert_close(
            found, torch.kron(torch.eye(rows), expected.contiguous()), rtol=1e-6, atol=1e-9
        )


def test_wanda_scores_by_weight_times_norm_of_the_input() -> None:
    model = network()
    norms = {name: side.diagonal().sqrt() for name, side in inputs_by_hand(model).items()}
    scores = {
        "0.weight": (model[0].weight.detach().flatten(1).abs() * norms["0"][:-1]).view_as(model[0].weight),
        "3.weight": model[3].weight.detach().abs() * norms["3"],
    }
    options = PruningOptions(
        method="wanda", pattern="layer", compensation="none", samples=2, sub_batch=20, floor=0,
        batchnorm_batches=0, measure_batches=0,
    )  # fmt: skip
    surgeon = Surgeon(model, batches(), options=options)
    surgeon.prune(0.5)
    for name, score in scores.items():
        expected = score > score.flatten().sort().values[score.numel() // 2 - 1]
        assert torch.equal(surgeon.masks[name], expected)


def test_sparsegpt_compensates_by_least_squares_on_the_outputs_of_the_layer() -> None:
    model = network()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    options = PruningOptions(
        method="sparsegpt", pattern="layer", samples=2, sub_batch=20, relative_damping=1e-9,
        batchnorm_batches=0, measure_batches=0, include=["^3"],
    )  # fmt: skip
    surgeon = Surgeon(model, batches(), options=options)
    surgeon.prune(0.5)
    A = inputs_by_hand(model)["3"]
    for row, mask in enumerate(surgeon.masks["3.weight"]):
        kept = mask.nonzero().squeeze(1)
        # min over the kept weights v of (v − w)ᵀ A (v − w)
        best = torch.linalg.solve(A[kept][:, kept], A[kept] @ before["3.weight"][row])
        torch.testing.assert_close(model[3].weight.detach()[row, kept], best, rtol=1e-4, atol=1e-6)


def test_layers_without_known_inputs_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 3))
    options = PruningOptions(method="sparsegpt", samples=2, sub_batch=4)
    q, _ = estimate_inverse(make_problem(model, [torch.randn(8, 4, 4, 4)], options=options))
    assert "sparsegpt knows no inputs of 0: magnitudes are used there" in caplog.text
    assert torch.equal(q.operator("0").dense(), torch.eye(q.operator("0").n))
