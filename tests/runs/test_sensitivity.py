"""The sensitivity of each layer."""

import pytest
import torch
from killing import loader, make_model

from fishleg import PruningOptions, Surgeon
from fishleg.runs.sensitivity import sensitivity


@pytest.mark.slow
def test_sensitivity_is_what_pruning_each_layer_alone_is_predicted_to_cost(tmp_path):
    model = make_model()
    surgeon = Surgeon(model, loader(), options=PruningOptions(samples=16, sub_batch=8))
    found = sensitivity(surgeon, 0.7, (0.5,))
    assert found.grid == (0.5, 0.7)
    for name in surgeon.weights.names:
        alone = Surgeon(make_model(), loader(), options=PruningOptions(include=[f"^{name}$"], samples=16))
        assert surgeon.curvature.inverse is not None
        step = alone.prune(0.7, inverse=surgeon.curvature.inverse)
        assert found.loss_at(name) == pytest.approx(step.predicted, rel=1e-5)
    found.draw(tmp_path / "s.png")
    assert (tmp_path / "s.png").stat().st_size > 1000
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), make_model().parameters(), strict=True))
