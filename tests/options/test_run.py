"""Options of a run on disk: model, data, schedule, directory."""

from typing import Any

import pytest

from fishleg.options import DataOptions, ModelOptions, RunOptions, ScheduleOptions
from fishleg.options.run import BUDGETS, amount

VALUES = {"sparsity": 0.5, "sparsities": [0.5], "max_drop": "1%", "max_params": 9, "max_flops": "40%"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 1}, r"sparsity must be in \(0, 1\), got 1"),
        ({"sparsity": 90}, r"sparsity must be in \(0, 1\), got 90; for 90 % write 0.9"),
        ({"sparsities": [0.5, True]}, "sparsities must be a list of numbers, got"),
        ({"max_drop": "one"}, "max_drop must be a number or a percentage such as 1%, got 'one'"),
        ({"max_drop": 5}, r"max_drop must be in \(0 %, 100 %\), got 5"),
        ({"max_flops": "-3"}, "max_flops must be > 0, got '-3'"),
        ({"max_params": 0}, "max_params must be a whole number >= 1, got 0"),
        ({"mode": "gradul"}, "mode must be one of staged, one-shot, gradual, got 'gradul'; did you mean"),
        ({"sparsities": [0.5], "stages": 2}, "sparsities is the schedule itself: leave out stages"),
        ({"sparsities": [0.5], "mode": "one-shot"}, "leave out mode = 'one-shot'"),
        ({"mode": "one-shot", "stages": 2}, "mode 'one-shot' is a single stage, got stages = 2"),
        ({"mode": "one-shot", "schedule": "cubic"}, "is a single stage, got schedule = 'cubic'"),
    ],
)
def test_wrong_schedules(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleOptions(**options)


@pytest.mark.parametrize("first", BUDGETS)
@pytest.mark.parametrize("second", BUDGETS)
def test_there_is_one_budget(first: str, second: str) -> None:
    given = {name: VALUES[name] for name in (first, second)}
    if first == second:
        ScheduleOptions(**given)
        return
    with pytest.raises(ValueError, match=r"give one of sparsity, sparsities, .*, got .* and"):
        ScheduleOptions(**given)


def test_amounts() -> None:
    assert amount("max_drop", "1%") == (0.01, True)
    assert amount("max_drop", 0.02) == (0.02, True)
    assert amount("max_flops", "40%") == (0.4, True)
    assert amount("max_flops", 1e6) == (1e6, False)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (ModelOptions, {"model": None}, "model must be a text, got None"),
        (ModelOptions, {"likelihood": "gauss"}, "likelihood must be one of categorical, gaussian, bernoulli"),
        (DataOptions, {"data": 3}, "data must be a text, got 3"),
        (RunOptions, {"seed": -1}, r"seed must be in \[0, 4294967296\), got -1"),
        (RunOptions, {"threads": 0}, r"threads must be in \[1, 1024\], got 0"),
        (RunOptions, {"keep": 0}, "keep must be a whole number >= 1, got 0"),
        (RunOptions, {"checkpoint_minutes": 0}, "checkpoint_minutes must be a number > 0, got 0"),
    ],
)
def test_wrong_values(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)
