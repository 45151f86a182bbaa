"""The warm start of a learned Q."""

from __future__ import annotations

import pytest
from helpers import inputs_8, net_8_16_4

from fishleg import Auxiliary, AuxiliaryOptions, InverseFisher, PruningOptions, Surgeon


@pytest.mark.parametrize("options", [AuxiliaryOptions(groups=8), AuxiliaryOptions()])
def test_few_samples_also_complete_the_warm_start(options: AuxiliaryOptions) -> None:
    surgeon = Surgeon(net_8_16_4(), inputs_8(size=64), options=PruningOptions(auxiliary=options, samples=48))
    diagonal = surgeon.curvature.estimate(surgeon.masks).diag()["0.weight"].detach()
    assert float(diagonal.max() / diagonal.min()) > 1.5
    assert surgeon.curvature.learning is not None
    assert surgeon.curvature.learning.warm


def test_an_unfinished_warm_start_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = net_8_16_4()
    auxiliary = Auxiliary(model, InverseFisher.from_model(model), "categorical")
    auxiliary.learn(inputs_8(), steps=50)
    assert "has not finished its warm start (50 of 60 steps)" in caplog.text
    caplog.clear()
    auxiliary.learn(inputs_8(), steps=20)
    assert not caplog.text
