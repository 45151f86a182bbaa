"""A batch that fails late is named wherever it is read: its loader, its number and the training step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import net_8_16_4
from torch import Tensor, nn

from fishleg import FineTuningOptions, PruningOptions, PruningSession, Surgeon

BAD = 7  # the number of the batch that is wrong

METHODS = ["fishleg", "diagonal", "kfac", "ekfac", "obert", "mfac"]


def batches(bad: str, count: int = 10) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 8, 8, generator=generator, dtype=torch.get_default_dtype())
    y = torch.randint(4, (count, 8), generator=generator)
    data = [(x[i], y[i]) for i in range(count)]
    if bad == "nan":
        data[BAD - 1][0][3, 2] = torch.nan
    elif bad == "shape":
        data[BAD - 1] = (x[0][:, :5], y[0])
    elif bad == "label":
        data[BAD - 1][1][0] = 4
    return data


TOLD = {
    "nan": r"at batch 7 of pass 1 of the calibration loader: .*not finite",
    "shape": r"at batch 7 of pass 1 of the calibration loader: .*8x5|at batch 7 .* calibration loader: .*2x5",
}


def options(method: str, **others: Any) -> PruningOptions:
    return PruningOptions(method=method, samples=60, sub_batch=2, measure_batches=1, **others)


@pytest.mark.parametrize("bad", TOLD)
@pytest.mark.parametrize("method", METHODS)
def test_a_late_calibration_batch_is_named(method: str, bad: str) -> None:
    model = net_8_16_4()
    with pytest.raises((ValueError, RuntimeError), match=TOLD[bad]):
        Surgeon(model, batches(bad), options=options(method)).prune(0.5)


@pytest.mark.parametrize("method", ["diagonal", "obert"])
def test_a_late_batch_of_the_empirical_fisher_is_named(method: str) -> None:
    surgeon = Surgeon(net_8_16_4(), batches("nan"), options=options(method, empirical=True))
    with pytest.raises(ValueError, match=TOLD["nan"]):
        surgeon.prune(0.5)


def test_a_late_batch_of_the_exact_fisher_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"at part 2[5-8], .* one pass over the calibration loader: .*finite"
    ):
        Surgeon(net_8_16_4(), batches("nan"), options=options("exact", gamma=0.1)).prune(0.5)


def test_a_late_batch_of_a_refinement_is_named() -> None:
    surgeon = Surgeon(net_8_16_4(), batches(""), options=options("fishleg", refine_steps=40))
    surgeon.prune(0.3)
    surgeon.loader[BAD - 1][0][0, 0] = torch.inf  # type: ignore[index]
    with pytest.raises(ValueError, match=TOLD["nan"]):
        surgeon.prune(0.5)


def test_a_late_batch_that_is_measured_is_named() -> None:
    measured = PruningOptions(method="magnitude", measure_batches=9)
    with pytest.raises(ValueError, match=r"at batch 7 of those .* the calibration loader: .*not finite"):
        Surgeon(net_8_16_4(), batches("nan"), options=measured).prune(0.5)


def test_a_late_batch_of_the_batchnorm_refresh_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    refreshed = PruningOptions(method="magnitude", measure_batches=1, batchnorm_batches=9)
    with pytest.raises(ValueError, match=r"at batch 7 of pass 1 of the calibration loader: the statistics"):
        Surgeon(model, batches("nan"), options=refreshed).prune(0.5)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ("nan", "the training loss is not finite"),
        ("shape", r"mat1 and mat2 shapes"),
        ("label", "label 4 is out of range"),
    ],
)
def test_a_late_training_batch_is_named_with_its_step(bad: str, told: str) -> None:
    session = PruningSession(
        net_8_16_4(), batches(""), options=options("magnitude"), train_loader=batches(bad),
        fine_tuning=FineTuningOptions(optimizer="sgd", steps=12),
    )  # fmt: skip
    where = rf"at batch 7 of pass 1 of the training loader, step 7 of 12: .*{told}"
    with pytest.raises((ValueError, RuntimeError), match=where):
        list(session.run([0.5]))


def test_a_late_batch_among_those_that_are_looked_at_first_is_named() -> None:
    session = PruningSession(
        net_8_16_4(), batches(""), options=options("fishleg"), train_loader=batches("shape"),
        fine_tuning=FineTuningOptions(steps=12),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=r"at batch 7 of pass 1 of the training loader: mat1 and mat2"):
        session.prepare()
