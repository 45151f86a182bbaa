"""The surgeon on a small trained convolutional network: exact counts and zeros, lasting accuracy."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import QUICK_DIGITS, inputs_6, inputs_8, net_6_12_8, net_8_16_4, state_copy
from oracles import identical
from torch import nn

from fishleg import InverseFisher, PruningOptions, Surgeon
from fishleg.options.names import METHODS
from fishleg.pruning.zero_keeper import ZeroKeeper
from fishleg.workloads.digits import split_digits
from fishleg.workloads.digits_net import DigitsNet

WEIGHTS = {"conv1.weight": 72, "conv2.weight": 1152, "conv3.weight": 4608, "linear.weight": 320}


def accuracy(model: nn.Module) -> float:
    _, _, images, labels = split_digits()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).double().mean())


@pytest.mark.parametrize("method", [method for method in METHODS if method != "exact"])
def test_every_method_removes_exactly_what_was_asked(method: str, model: DigitsNet, images: Any) -> None:
    surgeon = Surgeon(model, images, options=PruningOptions(**QUICK_DIGITS, method=method))
    step = surgeon.prune(0.6)
    total, count = sum(WEIGHTS.values()), round(0.6 * sum(WEIGHTS.values()))
    assert step.removed == sum(int((~mask).sum()) for mask in surgeon.masks.values()) == count
    assert step.sparsity == surgeon.sparsity == count / total
    assert step.target == 0.6
    assert step.predicted > 0
    parameters = dict(model.named_parameters())
    for name, mask in surgeon.masks.items():
        assert torch.equal(parameters[name] == 0, ~mask)
        assert step.per_layer[name] == pytest.approx(1 - float(mask.double().mean()), rel=1e-6)
    assert set(surgeon.masks) == set(WEIGHTS)


@pytest.mark.slow
@pytest.mark.parametrize("compensation", ["joint", "independent", "sum", "none"])
def test_exact_method_and_every_compensation(compensation: str) -> None:
    model = net_6_12_8(3)
    before = state_copy(model)
    surgeon = Surgeon(
        model, inputs_6(3, 32), options=PruningOptions(method="exact", compensation=compensation, samples=2)
    )
    surgeon.prune(0.5)
    zeros = sum(int((p == 0).sum()) for p in model.parameters())
    assert zeros == round(0.5 * (72 + 96 + 24))
    kept = surgeon.masks["2.weight"]
    assert torch.equal(model[2].weight[kept], before["2.weight"][kept]) is (compensation == "none")
    assert torch.equal(model[2].bias, before["2.bias"]) is (compensation == "none")


def test_better_compensation_predicts_less_for_the_same_q(model: DigitsNet, images: Any) -> None:
    q = Surgeon(model, images, options=PruningOptions(**QUICK_DIGITS)).update_inverse()
    predicted = []
    for compensation in ("joint", "independent", "none"):
        surgeon = Surgeon(copy.deepcopy(model), images, options=PruningOptions(compensation=compensation))
        predicted.append(surgeon.prune(0.7, inverse=q).predicted)
    assert predicted[0] < predicted[1] < predicted[2]


def test_the_given_q_decides(model: DigitsNet, images: Any) -> None:
    """With Q = I the surgeon removes the smallest weights and moves nothing else."""
    before = state_copy(model)
    surgeon = Surgeon(model, images, options=PruningOptions(floor=0.0))
    surgeon.prune(0.5, inverse=InverseFisher.from_model(model, "identity"))
    magnitudes = torch.cat([before[name].abs().flatten() for name in WEIGHTS])
    threshold = magnitudes.sort().values[round(0.5 * len(magnitudes)) - 1]
    for name, mask in surgeon.masks.items():
        assert torch.equal(mask, before[name].abs() > threshold)
        assert torch.equal(model.get_parameter(name), before[name] * mask)


def test_zeros_of_a_sparse_model_stay_zero(model: DigitsNet, images: Any) -> None:
    """Whoever made them: the second surgeon has no masks of the first."""
    Surgeon(model, images, options=PruningOptions(**QUICK_DIGITS)).prune(0.85)
    zeros = {name: model.get_parameter(name) == 0 for name in WEIGHTS}
    Surgeon(model, images, options=PruningOptions(**QUICK_DIGITS)).prune(0.95)
    assert all(bool((model.get_parameter(name)[gone] == 0).all()) for name, gone in zeros.items())


@pytest.mark.parametrize(
    ("pattern", "reached"),
    [("global", 3076), ("layer", 3076), ("2:4", 3040), ("block:4", 3040), ("rows", None)],
)
def test_every_pattern_in_stages(pattern: str, reached: int | None, model: DigitsNet, images: Any) -> None:
    surgeon = Surgeon(model, images, options=PruningOptions(**QUICK_DIGITS, pattern=pattern))
    steps, seen = [], []
    for sparsity in (0.2, 0.5):
        steps.append(surgeon.prune(sparsity))
        for name, mask in surgeon.masks.items():
            assert not bool(model.get_parameter(name)[~mask].any())
            assert not seen or not bool((mask & ~seen[-1][name]).any())
        seen.append(surgeon.masks)
    assert steps == surgeon.history
    assert steps[0].gamma == steps[1].gamma > 0
    if pattern == "rows":
        rows = [surgeon.masks[name].flatten(1) for name in surgeon.weights.names]
        assert all(torch.equal(row.any(1), row.all(1)) for row in rows)
        assert sum(int((~row.any(1)).sum()) for row in rows) == round(0.5 * (8 + 16 + 32))
        assert sum(step.removed for step in steps) == sum(int((~row).sum()) for row in rows)
        return
    assert sum(int((~mask).sum()) for mask in surgeon.masks.values()) == reached
    for name, mask in surgeon.masks.items():
        if pattern == "layer":
            assert int(mask.sum()) == mask.numel() // 2
        elif pattern == "2:4":
            assert bool((mask.movedim(1, -1).reshape(-1, 4).sum(1) == 2).all()), name
        elif pattern == "block:4":
            assert set(mask.movedim(1, -1).reshape(-1, 4).sum(1).tolist()) <= {0, 4}


def test_rows_take_their_bias_along() -> None:
    model = net_6_12_8(3)
    surgeon = Surgeon(model, inputs_6(3, 32), options=PruningOptions(pattern="rows", samples=8))
    surgeon.prune(0.5)
    assert "output layer" in str(surgeon.weights.reasons["4.weight"])
    gone = [~surgeon.masks[f"{i}.weight"].any(1) for i in (0, 2)]
    assert int(torch.cat(gone).sum()) == 10
    for i, rows in zip((0, 2), gone, strict=True):
        assert torch.equal(model[i].bias == 0, rows)
        assert torch.equal(surgeon.masks[f"{i}.bias"], ~rows)
    included = Surgeon(
        net_6_12_8(3), inputs_6(3, 32), options=PruningOptions(pattern="rows", include=[r"4\.weight"])
    )
    assert included.weights.names == ["4.weight"]


def test_rows_of_unequal_length_are_counted_as_rows() -> None:
    """Ten long rows go first: most of the weights, but a quarter of the rows, so that there is more to go."""
    model = nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 10), nn.ReLU(), nn.Linear(10, 3))
    nn.init.normal_(model[2].weight, std=1e-3)
    surgeon = Surgeon(model, [torch.randn(8, 4)], options=PruningOptions(method="magnitude", pattern="rows"))
    first, second = (surgeon.prune(sparsity) for sparsity in (0.2, 0.5))
    assert (first.sparsity, second.sparsity) == (0.2, 0.5)
    assert first.removed == 8 * 30
    assert first.removed + second.removed == sum(int((~surgeon.masks[f"{i}.weight"]).sum()) for i in (0, 2))


def test_no_layer_is_emptied(model: DigitsNet, images: Any) -> None:
    """Each weight keeps its share of the mean density, at any sparsity."""
    surgeon = Surgeon(model, images, options=PruningOptions(method="magnitude", floor=0.5))
    for sparsity in (0.94, 0.99):
        surgeon.prune(sparsity)
        for name, mask in surgeon.masks.items():
            assert int(mask.sum()) >= math.ceil(0.5 * (1 - sparsity) * WEIGHTS[name])


def test_revived_weights_are_removed_again(model: DigitsNet, images: Any) -> None:
    surgeon = Surgeon(model, images, options=PruningOptions(**QUICK_DIGITS))
    surgeon.prune(0.4)
    old = surgeon.masks
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    surgeon.prune(0.6)
    assert all(not bool(model.get_parameter(name)[~mask].any()) for name, mask in old.items())


def test_a_learned_q_is_refined_from_stage_to_stage(model: DigitsNet, images: Any) -> None:
    surgeon = Surgeon(model, images, options=PruningOptions(**QUICK_DIGITS))
    seen = []
    for sparsity in (0.2, 0.4, 0.6):
        surgeon.prune(sparsity)
        assert surgeon.curvature.learning is not None
        seen.append((surgeon.curvature.inverse, surgeon.curvature.learning.steps))
    assert seen[0][0] is seen[1][0] is seen[2][0]
    assert [steps for _, steps in seen] == [4, 6, 8]


def test_cuts_are_stages_within_one_step(model: DigitsNet, images: Any) -> None:
    other = copy.deepcopy(model)
    options = PruningOptions(**QUICK_DIGITS, measure_batches=0, refine_steps=2)
    surgeon = Surgeon(model, images, options=replace(options, cuts=3))
    by_hand = Surgeon(other, images, options=options)
    step = surgeon.prune(0.875)
    first = by_hand.prune(0.5)
    rest = [by_hand.prune(sparsity) for sparsity in (0.75, 0.875)]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert (step.target, step.sparsity) == (0.875, rest[-1].sparsity)
    assert step.removed == first.removed + sum(s.removed for s in rest)
    assert step.predicted == pytest.approx(first.predicted + sum(s.predicted for s in rest))
    assert len(surgeon.history) == 1


def test_cuts_of_a_method_that_does_not_learn_estimate_q_between_them(
    model: DigitsNet, images: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = copy.deepcopy(model)
    options = PruningOptions(**QUICK_DIGITS, method="diagonal")
    surgeon, by_hand = (Surgeon(m, images, options=options) for m in (model, other))
    estimated: list[object] = []
    estimate = surgeon.curvature.estimate
    monkeypatch.setattr(
        surgeon.curvature, "estimate", lambda masks: estimated.append(q := estimate(masks)) or q
    )
    surgeon.prune(0.875, cuts=3)
    assert len(estimated) == 3
    for sparsity in (0.5, 0.75, 0.875):
        by_hand.prune(sparsity)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.slow
def test_learned_q_in_stages_beats_magnitude(trained: DigitsNet, images: Any) -> None:
    magnitude, learned = copy.deepcopy(trained), copy.deepcopy(trained)
    Surgeon(magnitude, images, options=PruningOptions(method="magnitude")).prune(0.8)
    surgeon = Surgeon(learned, images, options=PruningOptions(samples=128))
    for sparsity in (0.4, 0.65, 0.8):
        surgeon.prune(sparsity)
    assert accuracy(trained) > 0.95
    assert accuracy(learned) > accuracy(trained) - 0.04
    assert accuracy(learned) > accuracy(magnitude) + 0.05


@pytest.mark.parametrize("training", [True, False])
def test_only_weights_their_biases_and_statistics_change(
    training: bool, model: DigitsNet, images: Any
) -> None:
    model.train(training)
    model.bn1.eval()
    model.conv2.weight.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    before = state_copy(model)
    surgeon = Surgeon(model, images, options=PruningOptions(**QUICK_DIGITS))
    surgeon.prune(0.5)
    assert [module.training for module in model.modules()] == modes
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    norms = ("bn2", "bn3") if training else ("bn1", "bn2", "bn3")
    statistics = {f"{n}.{p}" for n in norms for p in ("running_mean", "running_var", "num_batches_tracked")}
    assert changed == {"conv1.weight", "conv3.weight", "linear.weight", "linear.bias"} | statistics
    assert surgeon.weights.reasons["conv2.weight"] == "frozen"


def test_batchnorm_refresh_can_be_left_out(model: DigitsNet, images: Any) -> None:
    before = model.bn3.running_mean.clone()
    Surgeon(model, images, options=PruningOptions(method="magnitude", batchnorm_batches=0)).prune(0.5)
    assert torch.equal(model.bn3.running_mean, before)


def test_result_loads_into_a_plain_copy(model: DigitsNet, images: Any) -> None:
    Surgeon(model, images, options=PruningOptions(**QUICK_DIGITS)).prune(0.5)
    plain = DigitsNet(8).float().eval()
    plain.load_state_dict(model.state_dict())
    assert type(model) is DigitsNet
    assert torch.equal(plain(images[0]), model(images[0]))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_same_seed_same_result(trained: DigitsNet, images: Any) -> None:
    results = []
    for seed in (1, 1, 2):
        model, generator = copy.deepcopy(trained), torch.Generator().manual_seed(seed)
        surgeon = Surgeon(model, images, options=PruningOptions(**QUICK_DIGITS), generator=generator)
        for sparsity in (0.3, 0.6):
            surgeon.prune(sparsity)
        results.append((state_copy(model), surgeon.masks, [step.predicted for step in surgeon.history]))
    assert identical(results[0], results[1])
    assert not identical(results[0], results[2])


def test_the_bias_of_a_row_without_weights_may_be_compensated() -> None:
    model = net_8_16_4()
    with torch.no_grad():
        model[0].weight[3] = model[0].bias[3] = 0
    surgeon = Surgeon(model, inputs_8(), options=PruningOptions(samples=32))
    keeper = ZeroKeeper(surgeon.weights)
    surgeon.prune(0.5)
    assert surgeon.masks.keys() == {"0.weight", "2.weight"}
    assert not keeper.elsewhere
