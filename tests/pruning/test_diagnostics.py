"""Warnings before and after a pruning step, and batches that cannot be split."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    EXAMPLES_8,
    QUICK,
    QUICK_DIGITS,
    TwoHeads,
    inputs_6,
    inputs_8,
    net_6_10_4,
    net_6_12_8,
    net_8_16_4,
    prune_with,
    quick_prune,
    trained_net_with_batchnorm,
)
from torch import Tensor, nn

from fishleg import AuxiliaryOptions, Categorical, PruningOptions, Surgeon
from fishleg.curvature.samples import sample_h
from fishleg.pruning import diagnostics


@pytest.mark.parametrize("method", ["fishleg", "magnitude"])
def test_a_loader_that_is_ordered_by_class_gives_a_warning(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, x, _ = trained_net_with_batchnorm()
    mixed = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    options = {"mode": "one-shot", "method": method, "samples": 32}
    prune_with(model, mixed.split(32), 0.3, **options)
    assert "BatchNorm" not in caplog.text
    prune_with(model, x.split(20), 0.3, **options)
    assert "shuffle a loader that is ordered by class" in caplog.text
    assert "the quadratic model does not hold" not in caplog.text


def test_a_head_that_does_not_count_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    prune_with(TwoHeads(joined=False), inputs_8(), 0.5, samples=16, mode="one-shot")
    assert "b.weight has no part in the model's output on the first batches" in caplog.text
    caplog.clear()
    for options in ({"joined": True}, {"joined": False}):
        forward = (lambda m, x: m(x)) if options["joined"] else (lambda m, x: torch.cat(m(x), 1))
        prune_with(
            TwoHeads(**options), inputs_8(), 0.5, samples=16, mode="one-shot", likelihood="bernoulli",
            forward=forward,
        )  # fmt: skip
    assert "no part" not in caplog.text


def test_experts_that_are_used_later_are_not_called_unused(caplog: pytest.LogCaptureFixture) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            chosen = (x[:, 0] > 0).long() + (x[:, 0] > 1).long()
            parts = [(chosen == i).nonzero()[:, 0] for i in range(3)]
            y = torch.zeros(len(x), 4)
            for expert, rows in zip(self.experts, parts, strict=True):
                y = y.index_add(0, rows, expert(x[rows])) if len(rows) else y
            return y

    x = torch.cat(inputs_8(2, 64))
    x = x[x[:, 0].argsort()]  # the first examples go to the first expert
    Surgeon(Experts(), [x], options=PruningOptions(samples=8)).prune(0.5)
    assert "no part" not in caplog.text
    Surgeon(Experts(), [x[x[:, 0] < 1]], options=PruningOptions(samples=8)).prune(0.5)
    assert "experts.2.weight has no part" in caplog.text


def test_a_likelihood_that_cannot_be_meant_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"needs at least two classes, .* \(32, 1\) have one"):
        Surgeon(nn.Linear(8, 1), inputs_8(), options=PruningOptions(samples=4)).prune(0.5)
    sigmoid = nn.Sequential(nn.Linear(8, 4), nn.Sigmoid())
    Surgeon(sigmoid, inputs_8(), likelihood="bernoulli", options=PruningOptions(samples=8)).prune(0.5)
    assert "leave out the final sigmoid" in caplog.text
    caplog.clear()
    positive = nn.Linear(8, 1)
    nn.init.zeros_(positive.weight[:, 1:])
    Surgeon(
        positive,
        [x[x[:, 0] > 0][:4] for x in inputs_8()],
        likelihood="bernoulli",
        options=PruningOptions(samples=4),
    ).prune(0.5)
    assert "sigmoid" not in caplog.text  # too few to tell
    maps = nn.Conv2d(3, 4, 3)
    images = [torch.randn(8, 3, 6, 6) for _ in range(2)]
    Surgeon(
        copy.deepcopy(maps), images, likelihood=Categorical(class_dim=1), options=PruningOptions(samples=8)
    ).prune(0.5)
    assert "class_dim" not in caplog.text
    Surgeon(maps, images, options=PruningOptions(samples=8)).prune(0.5)
    assert "pass likelihood=Categorical(class_dim=1)" in caplog.text
    with pytest.raises(
        ValueError, match=r"Categorical\(class_dim=1\) for outputs \[batch, classes, \.\.\.\]"
    ):
        Categorical().check(torch.randn(2, 4, 3, 3), torch.zeros(2, 3, 3, dtype=torch.long))


def test_probabilities_instead_of_logits_give_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fishleg"):
        Surgeon(
            nn.Sequential(net_6_10_4(), nn.Softmax(-1)), inputs_6(), options=PruningOptions(**QUICK)
        ).prune(0.3)
        assert "look like probabilities" in caplog.text
        caplog.clear()
        Surgeon(net_6_10_4(), inputs_6(), options=PruningOptions(**QUICK)).prune(0.3)
        assert "look like probabilities" not in caplog.text


CUT: dict[str, tuple[Any, Callable[[nn.Module, Any], Tensor]]] = {
    "a list of examples": (list(torch.randn(6, 20, 8)), lambda m, b: m(torch.stack(b).mean(1))),
    "time first": (torch.randn(20, 6, 8), lambda m, b: m(b.mean(0))),
}


@pytest.mark.parametrize("name", CUT)
def test_batches_that_cannot_be_split_are_refused(name: str) -> None:
    batch, forward = CUT[name]
    batch = [x.double() for x in batch] if isinstance(batch, list) else batch.double()
    model, told = (
        net_8_16_4(),
        r"taken for 20 examples and split into 2 parts, but .* \(6, 4\), \(6, 4\), .* whole batch, \(6, 4\)",
    )
    with pytest.raises(ValueError, match=told):
        quick_prune(model, [batch], forward=forward)
    whole = AuxiliaryOptions(groups=1, warm_start=4)  # nothing is cut, and there is nothing to refuse
    quick_prune(model, [batch], forward=forward, auxiliary=whole, sub_batch=20)
    quick_prune(model, [batch], forward=forward, method="diagonal", sub_batch=20)
    if isinstance(batch, list):
        with pytest.raises(ValueError, match=r"tensors \(20, 8\) was taken for 20 examples and split into 4"):
            sample_h(model, batch, Categorical(), groups=4, forward=forward)


def test_a_model_that_fails_on_parts_is_refused() -> None:
    batch = {"x": EXAMPLES_8, "edges": torch.tensor([[0, 15], [3, 4]])}
    with pytest.raises(ValueError, match=r"cannot be called on examples 0 to 7 .* batch of 16: .*IndexError"):
        quick_prune(net_8_16_4(), [batch], forward=lambda m, b: m(b["x"] + b["x"][b["edges"]].sum()))


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, b: m(b[0] + b[1] - b[2]),
        lambda m, b: m(torch.stack(b)),  # time first in the outputs, as in speech
        lambda m, b: m(torch.stack(b, 1)).flatten(0, 1),  # tokens in a row
        lambda m, b: m(b[0])[b[0][:, 0] > 0],  # some of the examples
    ],
)
def test_three_inputs_are_split_together(forward: Callable[[nn.Module, Any], Tensor]) -> None:
    sizes: list[list[int]] = []

    def recorded(model: nn.Module, batch: Any) -> Tensor:
        sizes.append([len(x) for x in batch])
        return forward(model, batch)

    sparse = quick_prune(net_8_16_4(), [[EXAMPLES_8, EXAMPLES_8, EXAMPLES_8]], forward=recorded)
    assert [size for size in sizes if len(set(size)) > 1] == []
    assert {size[0] for size in sizes} >= {16, 4}  # whole, and in parts of `sub_batch` examples
    assert sum(int((p == 0).sum()) for p in sparse.parameters()) == 96


@pytest.mark.parametrize(
    ("predicted", "measured", "told"),
    [
        ([0.001, 0.004, 0.01], 0.165, True),
        ([0.004, 0.005], 0.051, True),
        ([0.001, 0.001], 0.049, False),  # too little to speak of
        ([0.01, 0.01, 0.02], 0.196, True),  # 4.9 times the prediction
        ([0.01, 0.01], 0.098, False),
        ([0.02, 0.02, 0.04], 0.232, False),  # 2.9 times: a good run to 90 %
        ([0.001], 0.165, True),
        ([0.001, 0.004], None, False),
        ([], 0.165, False),
    ],
)
def test_a_total_loss_far_above_the_prediction_gives_a_warning(
    predicted: list[float], measured: float | None, told: bool
) -> None:
    verdict = diagnostics.judge_total(0.9, predicted, measured)
    assert (verdict is not None) is told
    if verdict is not None:
        assert re.search(r"at sparsity 0\.900 the KL to the outputs before pruning is .* predicted", verdict)
        assert (f"for the {len(predicted)} steps together" in verdict) == (len(predicted) > 1)


@pytest.mark.parametrize(
    ("pattern", "sparsity", "loose"), [("global", 0.7, False), ("global", 0.4, True), ("2:4", 0.5, True)]
)
def test_zeros_that_the_masks_do_not_hold_give_a_warning(
    pattern: str, sparsity: float, loose: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, data = net_6_12_8(3), inputs_6(3, 32)
    Surgeon(model, data, options=PruningOptions(**QUICK_DIGITS)).prune(0.6)
    assert "were zero already" not in caplog.text
    zero = {name: p == 0 for name, p in model.named_parameters() if p.dim() == 2}
    surgeon = Surgeon(model, data, options=PruningOptions(**QUICK_DIGITS, pattern=pattern))
    surgeon.prune(sparsity)
    count = sum(int((zero[name] & surgeon.masks[name]).sum()) for name in surgeon.weights.names)
    assert (count > 0) == loose
    assert (f"{count} weights that were zero already are not among" in caplog.text) == loose


def test_a_bad_prediction_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    diagnostics.warn_about_prediction(0.9, predicted=0.01, measured=1.0)
    assert "the loss increase is 1, but Q predicted 0.01" in caplog.text
    caplog.clear()
    diagnostics.warn_about_prediction(0.9, predicted=1.0, measured=0.01)
    assert "the loss increase is 0.01, but Q predicted 1: less than predicted" in caplog.text
    caplog.clear()
    for predicted, measured in ((0.01, 0.03), (0.001, 0.01), (0.01, None)):
        diagnostics.warn_about_prediction(0.9, predicted, measured)
    assert not caplog.text
