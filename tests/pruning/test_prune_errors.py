"""Calls of prune() that are refused, and leave the model as it was."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import QUICK, inputs_8, labelled_8, net_8_16_4, prune_with, quiet, state_copy
from oracles import identical
from torch import Tensor, nn

import fishleg
from fishleg import FineTuningOptions, PruningOptions
from fishleg.options import OptionError

SHORT = FineTuningOptions(steps=3, update_every=2)


def run(model: nn.Module, loader: Any, sparsity: Any = None, **given: Any) -> Any:
    return prune_with(model, loader, sparsity, **{**QUICK, **given})


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


def broken() -> list[Tensor]:
    return [torch.full((32, 8), math.nan)]


Call = Callable[[nn.Module], object]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: run(m, labelled_8(), 0, inplace=True), r"sparsity must be in \(0, 1\).*, got 0$"),
        (lambda m: run(m, labelled_8(), 1, inplace=True), r"sparsity must be in \(0, 1\).*, got 1$"),
        (lambda m: run(m, labelled_8(), 1.5, inplace=True), r"sparsity must be in \(0, 1\).*, got 1.5"),
        (lambda m: run(m, labelled_8(), math.nan, inplace=True), r"sparsity must be in \(0, 1\).*, got nan"),
        (lambda m: run(m, labelled_8(), "90", inplace=True), r"sparsity must be in \(0, 1\).*, got '90'"),
        (lambda m: run(m, labelled_8(), True, inplace=True), r"sparsity must be in \(0, 1\).*, got True"),
        (lambda m: run(m, labelled_8(), [], inplace=True), "at least one sparsity"),
        (
            lambda m: run(m, labelled_8(), [0.5, 0.5], inplace=True),
            "sparsities must rise, got 0.5 before 0.5",
        ),
        (lambda m: run(m, labelled_8(), [0.2, 0.5], stages=2, inplace=True), "leave out stages"),
        (
            lambda m: run(m, labelled_8(), [0.5], mode="one-shot", inplace=True),
            "leave out stages and one-shot",
        ),
        (lambda m: run(m, labelled_8(), 0.5, stages=1.5, inplace=True), "stages must be a whole number >= 1"),
        (
            lambda m: run(m, labelled_8(), 0.5, seed=-1, inplace=True),
            r"seed must be in \[0, 4294967296\), got -1",
        ),
        (
            lambda m: run(m, labelled_8(), 0.5, stages=0, inplace=True),
            "stages must be a whole number >= 1, got 0",
        ),
        (
            lambda m: run(m, labelled_8(), 0.5, stages=2, mode="one-shot", inplace=True),
            "single stage, got stages = 2",
        ),
        (
            lambda m: run(m, labelled_8(), 0.5, train_loader=labelled_8(), inplace=True),
            "train_loader needs mode=",
        ),
        (lambda m: run(m, labelled_8(), 0.7, pattern="2:4", stages=1, inplace=True), "0.5 at most, got 0.7"),
        (lambda m: run(m, labelled_8(), pattern="best", inplace=True), "pattern must be .*, got 'best'"),
        (
            lambda m: run(m, labelled_8(), 0.5, mode="iterative", inplace=True),
            "mode must be one of staged, one-shot, gradual, got 'iterative'",
        ),
        (
            lambda m: run(m, labelled_8(), 0.5, fine_tuning=SHORT, inplace=True),
            "fine_tuning needs mode='gradual', got mode='staged'",
        ),
        (
            lambda m: run(m, inputs_8(), 0.5, mode="gradual", fine_tuning=SHORT, inplace=True),
            r"needs \(inputs, targets\) from the loader, or distillation",
        ),
        (lambda m: run(m, [], 0.5, inplace=True), "loader is empty"),
        (lambda m: run(m, [], 0.5, mode="gradual", inplace=True), "loader is empty"),
        (lambda m: run(m, broken(), 0.5, inplace=True), "outputs are not finite"),
        (lambda m: run(frozen(m), labelled_8(), 0.5, inplace=True), "nothing to prune:\n(.|\n)*frozen"),
        (lambda m: run(m, labelled_8(), 0.5, method="best", inplace=True), "method must be one of"),
        (lambda m: run(m, labelled_8(), 0.5, likelihood="poisson", inplace=True), "got 'poisson'"),
    ],
)
def test_errors_leave_the_model_as_it_was(call: Call, message: str) -> None:
    model = net_8_16_4()
    before, modes = state_copy(model), [module.training for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        call(model)
    assert identical(dict(model.state_dict()), before)
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("method", ["magnitude", "diagonal"])
def test_inputs_that_are_not_finite_never_reach_the_statistics(method: str) -> None:
    model = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4))
    before = state_copy(model)
    with pytest.raises(ValueError, match="not finite"):
        run(model, broken(), 0.5, method=method, inplace=True)
    assert identical(dict(model.state_dict()), before)


def test_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="sparsityy"):
        fishleg.prune(net_8_16_4(), labelled_8(), sparsityy=0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"pattern": "2:4"}, "pattern"),
        ({"method": "magnitude", "exclude": ["^4"]}, "method, exclude"),
    ],
)
def test_options_and_short_keywords_exclude_each_other(given: dict[str, Any], names: str) -> None:
    with pytest.raises(OptionError, match=f"pass either options or {names}, got both"):
        fishleg.prune(net_8_16_4(), labelled_8(), 0.5, options=PruningOptions(), progress=quiet, **given)
