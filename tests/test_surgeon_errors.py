"""What the surgeon prunes and what it refuses, with reasons."""

import math
from collections.abc import Callable

import pytest
import torch
from oracles import identical
from torch import Tensor, nn

from fishleg.pruning.gradual import Gradual
from fishleg.pruning.options import PruningOptions
from fishleg.pruning.surgeon import Surgeon
from fishleg.workloads.digits_net import DigitsNet


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))


def images() -> list[Tensor]:
    return [torch.rand(16, 1, 8, 8)]


def test_include_exclude_and_the_table() -> None:
    model = DigitsNet(8)
    surgeon = Surgeon(model, images(), include=["conv"], exclude=["^conv1"], method="magnitude")
    assert surgeon.prunable == ["conv2.weight", "conv3.weight"]
    surgeon.prune(0.5)
    assert set(surgeon.masks) == set(surgeon.prunable)
    lines = {line.split()[0]: line for line in surgeon.table().splitlines()}
    assert lines["parameter"].endswith("pruned?")
    assert lines["conv1.weight"].endswith(" 72     0.0%  excluded")
    assert lines["conv3.weight"].endswith("  yes")
    assert f"{surgeon.history[0].per_layer['conv3.weight']:.1%}" in lines["conv3.weight"]
    assert lines["bn1.weight"].endswith("not a matrix")
    assert lines["linear.weight"].endswith("not included")
    assert "1 inputs are not a multiple of 4" in Surgeon(model, images(), pattern="2:4").table()


def test_sparsity_must_rise() -> None:
    surgeon = Surgeon(DigitsNet(8), images(), method="magnitude")
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
        Surgeon(model, images(), method="magnitude", pattern="2:4").prune(0.7)
    assert identical(dict(model.state_dict()), before)


def with_nan() -> nn.Sequential:
    model = mlp()
    nn.init.constant_(model[2].weight, math.nan)
    return model


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Surgeon(mlp(), [], include=["conv"]), "'conv' matches no parameter; there are 0.weight, "),
        (lambda: Surgeon(mlp(), [], exclude=["wieght"]), "'wieght' matches no parameter"),
        (
            lambda: Surgeon(mlp(), [], include=["bias"]),
            "nothing to prune:\n(.|\n)*not a matrix",
        ),
        (lambda: Surgeon(mlp(), [], pattern="5:7"), "nothing to prune:\n(.|\n)*6 inputs are not a multiple"),
        (lambda: Surgeon(mlp(), [], options=PruningOptions(), floor=0.1), r"got both \(floor\)"),
        (lambda: Surgeon(mlp(), []).prune(0.5), "the loader is empty"),
        (lambda: Surgeon(mlp(), []).prune(0.99), "cannot remove .* so at most 0.9844"),
        (lambda: Surgeon(mlp(), [], pattern="rows").prune(0.95), "cannot remove .* so at most"),
        (lambda: Surgeon(mlp(), [], pattern="block:2").check_targets([0.5, 0.99]), "cannot remove .*"),
        (
            lambda: Surgeon(with_nan(), [torch.rand(4, 6)], method="magnitude", measure_batches=0).prune(0.5),
            "saliency in '2.weight'",
        ),
        (lambda: Surgeon(mlp(), [torch.rand(4, 6)]).prune(0.5, cuts=0), "cuts .* must be >= 1, got 0 and 24"),
        (lambda: PruningOptions(method="hessian"), "method must be one of .*, got 'hessian'"),
        (lambda: PruningOptions(compensation="both"), "compensation must be one of .*, got 'both'"),
        (lambda: PruningOptions(floor=1.0), r"floor must be in \[0, 1\), got 1.0"),
        (lambda: PruningOptions(gamma=0.0), "gamma must be > 0, got 0.0"),
        (lambda: PruningOptions(exchanges=2.5), "exchanges must be >= 0 and whole, got 2.5"),
        (lambda: PruningOptions(exchanges=float("nan")), "exchanges must be >= 0 and whole, got nan"),
        (lambda: PruningOptions(relative_damping=-1.0), "relative_damping must be > 0, got -1.0"),
        (lambda: PruningOptions(batchnorm_batches=-1), "batchnorm_batches must be >= 0 and whole, got -1"),
        (lambda: PruningOptions(pattern="diagonal"), "pattern must be .*, got 'diagonal'"),
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
        Gradual(Surgeon(model, [torch.randn(4, 4)]), iter([torch.randn(4, 4)]))
    surgeon = Surgeon(model, [], method="magnitude", compensation="none", measure_batches=0)
    with pytest.raises(ValueError, match="the loader is empty"):
        surgeon.prune(0.5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
