"""Options are checked when they are made."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from helpers import batches_of_5, net_with_batchnorm, training_batches

import fishleg
from fishleg import AuxiliaryOptions, FineTuningOptions, PruningOptions
from fishleg.inverse import estimate_inverse, make_problem


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "exact"}, "estimator must be one of auto, natural, trace, probe, got 'exact'"),
        ({"lr": 0.0}, "lr must be > 0, got 0.0"),
        ({"lr": float("nan")}, "lr must be > 0, got nan"),
        ({"groups": 0}, "groups must be >= 1, got 0"),
        ({"groups": 4, "sub_batch": 3}, "sub_batch must be >= groups = 4, got 3"),
        ({"sub_batch": 0}, "sub_batch must be >= groups = 1, got 0"),
        ({"warm_start": 1}, "warm_start must be >= 2, got 1"),
        ({"eta_floor": 1.5}, r"eta_floor must be in \[0, 1\], got 1.5"),
        ({"probe": "uniform"}, "probe must be 'isotropic', 'gradient' or a function, got 'uniform'"),
        ({"smoothing": 1.0}, r"smoothing must be in \[0, 1\), got 1.0"),
    ],
)
def test_auxiliary_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AuxiliaryOptions(**options)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"exclude": "fc"}, "exclude must be a list of regular expressions, got 'fc'"),
        ({"include": "fc"}, "include must be a list of regular expressions, got 'fc'"),
        ({"samples": -5}, "samples must be >= 1 and whole, got -5"),
        ({"sub_batch": 0}, "sub_batch must be >= 1 and whole, got 0"),
        ({"block_size": 0}, "block_size must be >= 1 and whole, got 0"),
        ({"empirical": True}, "empirical=True needs one of diagonal, obert, mfac, got 'fishleg'"),
    ],
)
def test_pruning_options_are_checked(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        PruningOptions(**options)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: fishleg.PruningOptions(exchanges=12.0), "exchanges must be >= 0 and whole, got 12.0"),
        (lambda: fishleg.PruningOptions(samples=64.5), "samples must be >= 1 and whole, got 64.5"),
        (lambda: FineTuningOptions(steps=2.0), "steps must be >= 1 and whole, got 2.0"),
        (lambda: FineTuningOptions(cuts=True), "cuts must be >= 1 and whole, got True"),
        (lambda: fishleg.PruningOptions(method="kfac", empirical=True), "empirical=True needs one of"),
    ],
)
def test_whole_numbers_are_checked(make: Callable[[], object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_steps_for() -> None:
    batches = training_batches(4)
    assert FineTuningOptions().steps_for(batches) == 4
    assert FineTuningOptions(epochs=2.5).steps_for(batches) == 10
    assert FineTuningOptions(epochs=0.01).steps_for(batches) == 1
    assert FineTuningOptions(epochs=3, steps=7).steps_for(batches) == 7
    assert FineTuningOptions(steps=7).steps_for(iter(batches)) == 7
    with pytest.raises(ValueError, match="epochs need a loader with a length; give steps instead"):
        FineTuningOptions(epochs=2).steps_for(iter(batches))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "lion"}, "optimizer must be one of fishleg, sgd, adam, got 'lion'"),
        ({"epochs": 0.0}, "epochs must be > 0 and finite, got 0.0"),
        ({"epochs": math.nan}, "epochs must be > 0 and finite, got nan"),
        ({"epochs": math.inf}, "epochs must be > 0 and finite, got inf"),
        ({"steps": 0}, "steps must be >= 1 and whole, got 0"),
        ({"lr": 0.0}, "lr must be > 0 and finite, got 0.0"),
        ({"lr": math.inf}, "lr must be > 0 and finite, got inf"),
        ({"update_every": 0}, "update_every must be >= 1 and whole, got 0"),
        ({"refine": -1}, "refine must be >= 0 and whole, got -1"),
        ({"cuts": 0}, "cuts must be >= 1 and whole, got 0"),
    ],
)
def test_fine_tuning_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FineTuningOptions(**options)


def test_batch_statistics_options_are_checked() -> None:
    for wrong in ({"batchnorm_batches": 0}, {"method": "exact"}):
        with pytest.raises(ValueError, match=r"batch_statistics=True needs batchnorm_batches >= 1"):
            PruningOptions(batch_statistics=True, **wrong)
    with pytest.raises(ValueError, match=r"exclude each other"):
        PruningOptions(batch_statistics=True, auxiliary=AuxiliaryOptions(vectorize=True))
    with pytest.raises(ValueError, match=r"a method other than exact"):
        estimate_inverse(
            make_problem(
                net_with_batchnorm(),
                batches_of_5(),
                options=PruningOptions(method="exact", batch_statistics=True),
            )
        )
