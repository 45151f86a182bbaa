"""What the surgeon refuses, with reasons."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import QUICK, inputs_6, net_6_10_4, net_6_12_8, random_images
from oracles import identical
from torch import nn
from torch.utils.data import TensorDataset

from fishleg import FineTuningOptions, PruningOptions, PruningSession, Surgeon
from fishleg.pruning import FineTuner
from fishleg.workloads.digits_net import DigitsNet


def test_sparsity_must_rise() -> None:
    surgeon = Surgeon(DigitsNet(8), random_images(), options=PruningOptions(method="magnitude"))
    surgeon.prune(0.5)
    for sparsity in (0.5, 0.3):
        with pytest.raises(ValueError, match=f"sparsity {sparsity} is not above the present 0.5000"):
            surgeon.prune(sparsity)
    with pytest.raises(ValueError, match=r"sparsity must be in \(0, 1\), got 1.0"):
        surgeon.prune(1.0)
    assert len(surgeon.history) == 1


def test_impossible_sparsity_leaves_the_model_alone() -> None:
    model = DigitsNet(8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"the pattern allows a sparsity of 0.5 at most, got 0.7"):
        Surgeon(model, random_images(), options=PruningOptions(method="magnitude", pattern="2:4")).prune(0.7)
    assert identical(dict(model.state_dict()), before)


def with_nan() -> nn.Sequential:
    model = net_6_12_8(3)
    nn.init.constant_(model[2].weight, math.nan)
    return model


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Surgeon(net_6_12_8(3), [], options=PruningOptions(include=["conv"])),
            "'conv' matches no parameter; the model has 0.weight, ",
        ),
        (
            lambda: Surgeon(net_6_12_8(3), [], options=PruningOptions(exclude=["wieght"])),
            "'wieght' matches no parameter",
        ),
        (
            lambda: Surgeon(net_6_12_8(3), [], options=PruningOptions(include=["bias"])),
            "nothing to prune:\n(.|\n)*not a matrix",
        ),
        (
            lambda: Surgeon(net_6_12_8(3), [], options=PruningOptions(pattern="5:7")),
            "nothing to prune:\n(.|\n)*6 inputs are not a multiple",
        ),
        (lambda: Surgeon(net_6_12_8(3), []).prune(0.5), "loader is empty"),
        (lambda: Surgeon(net_6_12_8(3), []).prune(0.99), "cannot remove .* sparsity of at most 0.9844"),
        (
            lambda: Surgeon(net_6_12_8(3), [], options=PruningOptions(pattern="rows")).prune(0.95),
            "cannot remove .* sparsity of at most",
        ),
        (
            lambda: Surgeon(net_6_12_8(3), [], options=PruningOptions(pattern="block:2")).check_targets(
                [0.5, 0.99]
            ),
            "cannot remove .*",
        ),
        (
            lambda: Surgeon(
                with_nan(), [torch.rand(4, 6)], options=PruningOptions(method="magnitude", measure_batches=0)
            ).prune(0.5),
            "saliency in '2.weight'",
        ),
        (
            lambda: Surgeon(net_6_12_8(3), [torch.rand(4, 6)]).prune(0.5, cuts=0),
            "cuts must be >= 1, got 0",
        ),
        (lambda: PruningOptions(method="hessian"), "method must be one of .*, got 'hessian'"),
        (lambda: PruningOptions(compensation="both"), "compensation must be one of .*, got 'both'"),
        (lambda: PruningOptions(floor=1.0), r"floor must be in \[0, 1\), got 1.0"),
        (lambda: PruningOptions(gamma=0.0), "gamma must be a number > 0, got 0.0"),
        (
            lambda: PruningOptions(mask_search_rounds=2.5),
            "mask_search_rounds must be a whole number >= 0, got 2.5",
        ),
        (
            lambda: PruningOptions(mask_search_rounds=float("nan")),
            "mask_search_rounds must be a whole number >= 0, got nan",
        ),
        (
            lambda: PruningOptions(relative_damping=-1.0),
            "relative_damping must be a number > 0, got -1.0",
        ),
        (
            lambda: PruningOptions(batchnorm_batches=-1),
            "batchnorm_batches must be a whole number >= 0, got -1",
        ),
        (
            lambda: Surgeon(net_6_12_8(3), [], options=PruningOptions(pattern="diagonal")),
            "pattern must be .*, got 'diagonal'",
        ),
    ],
)
def test_errors(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_loaders_that_cannot_work_are_refused_before_anything_changes():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="loader is an iterator, which can be read once only"):
        Surgeon(model, iter([torch.randn(4, 4)]))
    with pytest.raises(ValueError, match="loader must yield batches, got int"):
        Surgeon(model, 3)
    with pytest.raises(ValueError, match="the training loader is an iterator"):
        FineTuner(Surgeon(model, [torch.randn(4, 4)]), iter([torch.randn(4, 4)]))
    with pytest.raises(ValueError, match="train_loader is an iterator"):
        PruningSession(
            model,
            [torch.randn(4, 4)],
            fine_tuning=FineTuningOptions(),
            train_loader=iter([torch.randn(4, 4)]),
        )
    with pytest.raises(ValueError, match="train_loader needs fine_tuning"):
        PruningSession(model, [torch.randn(4, 4)], train_loader=[torch.randn(4, 4)])
    surgeon = Surgeon(
        model, [], options=PruningOptions(method="magnitude", compensation="none", measure_batches=0)
    )
    with pytest.raises(ValueError, match="loader is empty"):
        surgeon.prune(0.5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        (TensorDataset(torch.randn(8, 6)), {}, "TensorDataset, which yields single examples"),
        (torch.randn(8, 6), {}, "Tensor, which yields single examples"),
        ([torch.randn(8, 6)], {"exclude": ["["]}, "exclude: '[' is no regular expression"),
    ],
)
def test_wrong_arguments(loader: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Surgeon(net_6_10_4(), loader, options=PruningOptions(**options))


def test_a_state_dict_instead_of_a_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got OrderedDict"):
        Surgeon(net_6_10_4().state_dict(), inputs_6())  # type: ignore[arg-type]


def test_inference_mode_is_refused_before_anything_is_done() -> None:
    model = net_6_10_4(nn.Tanh)
    before = [p.clone() for p in model.parameters()]
    with torch.inference_mode(), pytest.raises(ValueError, match=r"torch\.inference_mode\(\) disables"):
        Surgeon(model, inputs_6(), options=PruningOptions(**QUICK)).prune(0.5)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
