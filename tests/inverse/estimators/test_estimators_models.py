"""Rivals' Q of unusual models and batches: low precision, removed rows, ignored labels."""

from __future__ import annotations

import pytest
import torch
from helpers import QUICK, inputs_6, inputs_8, labelled_6, net_6_10_4, net_with_two_norms
from torch import Tensor, nn

from fishleg import AuxiliaryOptions, PruningOptions, Surgeon
from fishleg.inverse import estimate_inverse, make_problem


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fishleg", "diagonal", "obert", "mfac", "kfac", "ekfac", "exact"])
def test_a_removed_row_behind_batchnorm_has_no_curvature(method: str) -> None:
    """Of a channel that is always zero BatchNorm makes 1/√ε, some 300, times its gradient."""
    surgeon = Surgeon(
        net_with_two_norms(),
        inputs_6(),
        options=PruningOptions(**QUICK, pattern="rows", method=method, gamma=1e-3),
    )
    surgeon.prune(0.25)
    gone = ~surgeon.masks["3.weight"].any(1)
    assert gone.any()
    q = surgeon.curvature.estimate(surgeon.masks)
    largest = 1 / 1e-3
    removed = q.diag()["3.weight"].detach()[gone]
    assert float(removed.min()) > 0.05 * largest
    assert surgeon.prune(0.5).predicted < 10  # thousands, with that curvature


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["diagonal", "obert", "mfac", "kfac", "ekfac"])
def test_rivals_compute_half_precision_models_in_float32(method: str, dtype: torch.dtype) -> None:
    model = net_6_10_4().to(dtype)
    data = [x.to(dtype) for x in inputs_6()]
    for pattern in ("global", "rows"):
        surgeon = Surgeon(model, data, options=PruningOptions(**QUICK, method=method, pattern=pattern))
        q = surgeon.curvature.estimate(surgeon.masks)
        assert all(value.dtype == torch.float32 for value in q.diag().values())
        surgeon.prune(0.9 if pattern == "rows" else 0.5, inverse=q)
        assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("method", ["diagonal", "kfac", "ekfac", "obert"])
def test_batches_of_ignored_labels_are_left_out(method: str) -> None:
    data = labelled_6()
    ignored = [(x, torch.full_like(y, -100)) for x, y in data]
    q, gamma = estimate_inverse(
        make_problem(
            net_6_10_4(),
            [data[0], ignored[0], data[1]],
            options=PruningOptions(method=method, samples=9, sub_batch=8),
        )
    )
    plain, _ = estimate_inverse(
        make_problem(
            net_6_10_4(), data[:2], options=PruningOptions(method=method, samples=6, sub_batch=8, gamma=gamma)
        )
    )
    assert q.diag().keys() == plain.diag().keys()
    with pytest.raises(ValueError, match="has a label that counts"):
        estimate_inverse(
            make_problem(net_6_10_4(), ignored, options=PruningOptions(method=method, samples=4, sub_batch=8))
        )


class CalledInParts(nn.Module):
    """Two layers that may be called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.g(self.f(x).relu())
        return y


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"method": "exact"}, {"auxiliary": AuxiliaryOptions(estimator="probe")}])
def test_a_forward_that_calls_parts_of_the_model_has_the_same_curvature(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    model, found = CalledInParts(), []
    for forward in (lambda m, x: m(x), lambda m, x: m.g(m.f(x).relu())):
        surgeon = Surgeon(model, inputs_8(), options=PruningOptions(**options, samples=16), forward=forward)
        found.append(surgeon.curvature.estimate(surgeon.masks).diag()["f.weight"].detach())
    torch.testing.assert_close(found[0], found[1])
    assert float(found[0].max() / found[0].min()) > 1.0001
