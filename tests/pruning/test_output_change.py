"""The measured loss of a pruning step."""

from typing import Any

import pytest
import torch
from helpers import QUICK, QUICK_DIGITS, inputs_6
from torch import nn
from torch.nn import functional

from fishleg import Categorical, PruningOptions, Surgeon
from fishleg.workloads.digits_net import DigitsNet


@pytest.mark.slow
def test_measured_loss_is_the_divergence_from_the_model_before(model: DigitsNet, images: Any) -> None:
    with torch.no_grad():
        before = [model(x).log_softmax(1) for x in images[:2]]
    step = Surgeon(model, images, options=PruningOptions(**QUICK_DIGITS)).prune(0.7)
    with torch.no_grad():
        after = [model(x).log_softmax(1) for x in images[:2]]
    pairs = zip(after, before, strict=True)
    kl = sum(functional.kl_div(f, g, log_target=True, reduction="batchmean") for f, g in pairs) / 2
    assert step.measured == pytest.approx(float(kl), rel=1e-4)
    assert (
        Surgeon(model, images, options=PruningOptions(**QUICK_DIGITS, measure_batches=0)).prune(0.8).measured
        is None
    )


def test_a_kl_is_measured_in_single_precision_at_least() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 500)).bfloat16()
    data = [x.bfloat16() for x in inputs_6(2, 64)]
    surgeon = Surgeon(model, data, options=PruningOptions(**QUICK, method="diagonal"))
    with torch.no_grad():
        before = [model(x).float() for x in data]
        step = surgeon.prune(0.1)
        after = [model(x).float() for x in data]
    found = [float(Categorical().divergence(f, g)) for f, g in zip(after, before, strict=True)]
    assert step.measured == pytest.approx(sum(found) / 2, rel=1e-4)
