"""Options of the training after each pruning step."""

import math
from typing import Any

import pytest
from helpers import training_batches

from fishleg import FineTuningOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "lion"}, "optimizer must be one of fishleg, sgd, adam, got 'lion'"),
        ({"epochs": 0.0}, "epochs must be a number > 0, got 0.0"),
        ({"epochs": math.nan}, "epochs must be a number > 0, got nan"),
        ({"epochs": math.inf}, "epochs must be a number > 0, got inf"),
        ({"steps": 0}, "steps must be a whole number >= 1, got 0"),
        ({"steps": 2.0}, "steps must be a whole number >= 1, got 2.0"),
        ({"lr": 0.0}, "lr must be a number > 0, got 0.0"),
        ({"lr": math.inf}, "lr must be a number > 0, got inf"),
        ({"momentum": 1}, r"momentum must be in \[0, 1\), got 1"),
        ({"max_kl": 0}, "max_kl must be a number > 0, got 0"),
        ({"max_kl": math.inf}, "max_kl must be a number > 0, got inf"),
        ({"update_every": 0}, "update_every must be a whole number >= 1, got 0"),
        ({"temperature": 0}, "temperature must be a number > 0, got 0"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FineTuningOptions(**options)


def test_the_number_of_steps() -> None:
    batches = training_batches(4)
    assert FineTuningOptions().steps_for(batches) == 4
    assert FineTuningOptions(epochs=2.5).steps_for(batches) == 10
    assert FineTuningOptions(epochs=0.01).steps_for(batches) == 1
    assert FineTuningOptions(epochs=3, steps=7).steps_for(batches) == 7
    assert FineTuningOptions(steps=7).steps_for(iter(batches)) == 7
    with pytest.raises(ValueError, match="epochs needs a loader that has a length; give steps instead"):
        FineTuningOptions(epochs=2).steps_for(iter(batches))


def test_the_learning_rate_depends_on_the_optimizer() -> None:
    rates = {name: FineTuningOptions(optimizer=name).learning_rate for name in ("fishleg", "sgd", "adam")}
    assert rates == {"fishleg": 0.1, "sgd": 0.02, "adam": 0.001}
    assert FineTuningOptions(optimizer="sgd", lr=0.5).learning_rate == 0.5


def test_steps_follow_the_loss_only_within_a_trust_region() -> None:
    assert FineTuningOptions().paced
    assert not FineTuningOptions(max_kl=None).paced
    assert not FineTuningOptions(optimizer="sgd").paced
