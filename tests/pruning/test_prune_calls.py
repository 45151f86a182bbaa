"""prune() within contexts, on models that are sparse already or cannot be copied, with numbers of numpy."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    QUICK,
    QUICKER,
    inputs_6,
    inputs_8,
    labelled_6,
    net_6_10_4,
    net_8_16_4,
    prune_by_magnitude,
    prune_with,
    quick_prune,
    quiet,
    train_8,
    training_batches,
    zeros_of,
)
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune
from torch.utils.data import DataLoader, TensorDataset

import fishleg
from fishleg import FineTuningOptions, PruningOptions, Surgeon
from fishleg.pruning import Event, Pruned, StageDone

MAGNITUDE = PruningOptions(method="magnitude")

CONTEXTS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("mode", ["staged", "gradual"])
def test_the_callers_context_changes_nothing(context: str, mode: str) -> None:
    options: dict[str, Any] = {"mode": mode, **QUICK}
    if mode == "gradual":
        options |= {"stages": 1, "refine_steps": 1, "fine_tuning": FineTuningOptions(steps=3)}
    plain = prune_with(net_6_10_4(nn.Tanh), labelled_6(), 0.5, **options)
    with CONTEXTS[context]():
        inside = prune_with(net_6_10_4(nn.Tanh), labelled_6(), 0.5, **options)
    for a, b in zip(plain.parameters(), inside.parameters(), strict=True):
        assert torch.equal(a, b)


def test_magnitude_predicts_no_loss() -> None:
    events: list[Event] = []
    quick_prune(net_6_10_4(nn.Tanh), inputs_6(), method="magnitude", mode="one-shot", progress=events.append)
    (line,) = [str(event) for event in events if isinstance(event, Pruned)]
    assert "loss increase measured" in line
    assert "predicted" not in line


def test_a_model_that_cannot_be_copied_says_why() -> None:
    model = net_6_10_4(nn.Tanh)
    torch_prune.random_unstructured(model[0], "weight", 0.5)
    with pytest.raises(ValueError, match=r"cannot be copied .*prune\.remove.*inplace=True"):
        fishleg.prune(model, inputs_6(), 0.5, progress=quiet)


def test_options_that_are_none_are_the_usual_ones() -> None:
    sparse = fishleg.prune(net_6_10_4(nn.Tanh), inputs_6(), 0.5, options=None, progress=quiet)
    assert int(sum((p == 0).sum() for p in sparse.parameters())) == 50


@pytest.mark.parametrize(
    ("sparsity", "pattern", "again", "told"),
    [
        (0.9, "global", 0.5, r"0\.5 \(pattern global\) removes nothing: 0\.9010 of the prunable weights"),
        (0.9, "global", 0.9, r"zero already, as many, to within a rounding; ask for more"),
        (0.9, "global", [0.5, 0.95], r"0\.5 .* removes nothing: 0\.9010"),
        (0.5, "rows", 0.25, r"0\.5000 of the prunable rows"),
        (0.5, "layer", 0.4, r"\(pattern layer\) removes nothing: 0\.5000 of"),
        (None, "2:4", None, r"0\.5 \(pattern 2:4\) removes nothing: 0\.5000 of"),
        (0.5, "block:4", 0.5, r"\(pattern block:4\) removes nothing"),
    ],
)
def test_a_target_that_the_model_is_beyond_is_refused(
    sparsity: float | None, pattern: str, again: float | list[float] | None, told: str
) -> None:
    options: dict[str, Any] = {"method": "magnitude", "pattern": pattern}
    sparse = prune_with(net_8_16_4(), inputs_8(3), sparsity, **options)
    with pytest.raises(ValueError, match=told):
        prune_with(sparse, inputs_8(3), again, **options)


def test_another_pattern_or_a_little_more_is_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    sparse = prune_by_magnitude(net_8_16_4(), 0.5)
    assert int((prune_by_magnitude(sparse, 0.51)[0].weight == 0).sum()) > 0
    strict = prune_by_magnitude(sparse, 0.5, pattern="2:4")  # half are zero, but not two of each four
    assert all(bool((w.view(-1, 4).sum(1) >= 2).all()) for w in zeros_of(strict).values())
    prune_by_magnitude(sparse, 0.5, pattern="rows")
    caplog.clear()
    sparse = prune_by_magnitude(net_8_16_4(), 0.9)
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"0\.5 \(pattern global\) removes nothing"):
        fishleg.attach(sparse, inputs_8(3), optimizer, [0.5, 0.95], every=1, options=MAGNITUDE)
    assert not optimizer._optimizer_step_post_hooks


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    np = pytest.importorskip("numpy")
    for half in (np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5)):
        assert (
            int(sum(zero.sum() for zero in zeros_of(prune_by_magnitude(net_8_16_4(), half)).values())) == 96
        )
        surgeon = Surgeon(net_8_16_4(), inputs_8(3), options=MAGNITUDE)
        assert type(surgeon.prune(half).target) is float
        assert fishleg.schedule("cubic", half, 2)[-1] == 0.5
    several = np.linspace(0.2, 0.5, 3, dtype=np.float32)
    sparse = fishleg.prune(net_8_16_4(), inputs_8(3), several, method="magnitude", progress=quiet)
    assert int(sum(zero.sum() for zero in zeros_of(sparse).values())) == 96
    model = net_8_16_4()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = fishleg.attach(model, inputs_8(3), optimizer, several, every=1, options=MAGNITUDE)
    train_8(model, optimizer)
    assert [step.target for step in attached.session.surgeon.history] == several.tolist()
    with pytest.raises(ValueError, match=r"sparsity must be in \(0, 1\), got '0\.5'"):
        surgeon.prune("0.5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sparsity must be in \(0, 1\), got 90"):
        fishleg.prune(net_8_16_4(), inputs_8(3), np.int64(90))


def test_a_model_that_cannot_be_copied_is_refused_whatever_the_reason() -> None:
    model = net_8_16_4()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"cannot be copied \(TypeError: cannot pickle .*inplace=True"):
        prune_by_magnitude(model, 0.5)
    prune_by_magnitude(model, 0.5, inplace=True)


def test_a_step_is_measured_on_other_batches_than_q_learns_from() -> None:
    x = torch.arange(512.0).unsqueeze(1).expand(-1, 8) / 512
    loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
    drawn: list[Tensor] = []

    def forward(model: nn.Module, batch: list[Tensor]) -> Tensor:
        drawn.append((512 * batch[0][:, 0]).round())
        y: Tensor = model(batch[0])
        return y

    fishleg.prune(
        net_8_16_4(),
        loader,
        0.5,
        options=PruningOptions(samples=8),
        mode="one-shot",
        forward=forward,
        progress=quiet,
    )
    measured, learned = set(torch.cat(drawn[:2]).tolist()), set(torch.cat(drawn[4:12]).tolist())
    assert len(measured) == 16
    assert len(measured & learned) < 12


def test_a_pruned_model_is_pruned_on_from_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    sparse = fishleg.prune(net_8_16_4(), inputs_8(), 0.6, method="magnitude", progress=quiet)
    events: list[Event] = []
    most = fishleg.prune(sparse, inputs_8(), 0.8, method="magnitude", progress=events.append)
    reached = [round(100 * event.step.sparsity, 1) for event in events if isinstance(event, StageDone)]
    assert len(reached) == 3
    assert all(a < b for a, b in itertools.pairwise([60.0, *reached]))
    assert reached[-1] == 80.2  # 154 of 192
    assert not bool(most.get_parameter("0.weight")[sparse.get_parameter("0.weight") == 0].any())
    assert not caplog.text


def test_few_rows_and_many_stages() -> None:
    """Two stages may round to the same number of rows."""
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4))
    data = [x for x, _ in training_batches()]
    sparse = prune_with(model, data, 0.9, pattern="rows", **QUICKER)
    assert int((sparse[0].weight != 0).any(1).sum()) == 1
    surgeon = Surgeon(model, data, options=PruningOptions(**QUICKER))
    surgeon.prune(0.5)
    with pytest.raises(ValueError, match=r"0\.5 is not above the present"):
        surgeon.prune(0.5)
