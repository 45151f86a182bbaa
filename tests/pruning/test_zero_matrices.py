"""A matrix that is zero everywhere has not been trained yet: it is not pruned and does not count."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fishleg
from fishleg import FineTuningOptions, PruningOptions, PruningSession, Surgeon, attach

REASON = "zero everywhere from the beginning: not trained yet, or removed before"
WARNING = "not pruned, because zero everywhere from the beginning: up.weight"


class Adapted(nn.Module):
    """A linear layer with an adapter as LoRA has it: B, the second matrix, is zero at the start."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.down, self.up = nn.Linear(8, 8, bias=False), nn.Linear(8, 16, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        f: Tensor = self.head(torch.relu(self.base(x) + self.up(self.down(x))))
        return f


def batches() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(6, 32, 8, generator=torch.Generator().manual_seed(1))
    return [(part, part[:, :4].argmax(1)) for part in x.to(torch.get_default_dtype())]


def options(**others: Any) -> PruningOptions:
    return PruningOptions(samples=16, sub_batch=8, refine_steps=2, **others)


@pytest.mark.parametrize("pattern", ["global", "layer", "rows", "2:4"])
def test_a_zero_matrix_is_left_out_with_a_reason(pattern: str, caplog: pytest.LogCaptureFixture) -> None:
    surgeon = Surgeon(Adapted(), batches(), options=options(pattern=pattern))
    assert surgeon.weights.reasons["up.weight"] == REASON
    (line,) = (line for line in surgeon.table().splitlines() if line.startswith("up.weight"))
    assert line.endswith(REASON)
    assert WARNING in caplog.text
    surgeon.prune(0.5)
    assert "up.weight" not in surgeon.masks


def test_the_sparsity_does_not_count_it_and_training_fills_it() -> None:
    session = PruningSession(
        Adapted(), batches(), options=options(),
        fine_tuning=FineTuningOptions(steps=4, optimizer="sgd", lr=0.1),
    )  # fmt: skip
    list(session.run([0.3, 0.6]))
    model = session.model
    counted = [model.get_parameter(name) for name in ("base.weight", "head.weight", "down.weight")]
    zeros = sum(int((p == 0).sum()) for p in counted)
    assert zeros == round(0.6 * sum(p.numel() for p in counted))
    assert bool(model.get_parameter("up.weight").any())


def test_a_matrix_that_is_frozen_or_excluded_keeps_that_reason() -> None:
    model = Adapted()
    model.up.requires_grad_(False)
    assert Surgeon(model, batches(), options=options()).weights.reasons["up.weight"] == "frozen"
    excluded = Surgeon(Adapted(), batches(), options=options(exclude=["up.weight"]))
    assert excluded.weights.reasons["up.weight"] == "excluded"


def test_only_zero_matrices_are_nothing_to_prune() -> None:
    layer = nn.Linear(8, 4)
    nn.init.zeros_(layer.weight)
    with pytest.raises(ValueError, match=f"nothing to prune:(.|\n)*{REASON}"):
        fishleg.prune(layer, batches(), 0.5)


def test_a_resumed_session_leaves_the_same_matrices_out() -> None:
    def make() -> PruningSession:
        return PruningSession(
            Adapted(), batches(), options=options(), fine_tuning=FineTuningOptions(steps=2, optimizer="sgd")
        )

    whole, first, again = make(), make(), make()
    list(whole.run([0.3, 0.6]))
    first.prepare()
    list(first.stage(0.3, number=1, of=2))
    again.prepare()
    again.model.load_state_dict(first.model.state_dict())
    assert bool(again.model.get_parameter("up.weight").any())  # trained in between
    again.load_state_dict(first.state_dict())
    list(again.run([0.3, 0.6]))
    assert again.surgeon.weights.names == whole.surgeon.weights.names
    assert again.surgeon.sparsity == whole.surgeon.sparsity


@pytest.mark.parametrize("done", [0, 1])
def test_an_attachment_that_is_resumed_from_the_trained_model_leaves_the_same_out(done: int) -> None:
    """The model has its trained weights when `attach` looks at it again."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for x, y in batches()[:steps]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    model = Adapted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = attach(model, batches(), optimizer, [0.3, 0.6], every=2, start=2 - done, options=options())
    train(model, optimizer, 2)
    assert len(attached.session.surgeon.history) == done
    state = copy.deepcopy(attached.state_dict())
    attached.remove()
    again = copy.deepcopy(model)
    other = torch.optim.SGD(again.parameters(), lr=0.1)
    resumed = attach(
        again, batches(), other, [0.3, 0.6], every=2, start=2 - done, options=options(), state=state
    )
    assert resumed.session.surgeon.weights.reasons["up.weight"] == REASON
    train(again, other, 4)
    surgeon = resumed.session.surgeon
    assert "up.weight" not in surgeon.masks
    assert surgeon.sparsity == pytest.approx(0.6, abs=0.01)


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_pruning_never_empties_a_matrix(floor: float) -> None:
    model = Adapted()
    with torch.no_grad():
        model.up.weight.normal_(std=1e-9)
    surgeon = Surgeon(model, batches(), options=options(floor=floor, method="magnitude"))
    for sparsity in (0.5, 0.9, 0.95):
        surgeon.prune(sparsity)
        assert bool(surgeon.masks["up.weight"].any())
        assert bool(model.up.weight.any())


def test_masks_of_a_state_say_that_a_matrix_was_pruned() -> None:
    model = Adapted()
    with torch.no_grad():
        model.up.weight.normal_(std=1e-9)
    surgeon = Surgeon(model, batches(), options=options(floor=0.0, method="magnitude"))
    surgeon.prune(0.5)
    with torch.no_grad():
        model.up.weight.zero_()  # training has brought the last weight to zero
    state = surgeon.state_dict()
    again = Surgeon(copy.deepcopy(model), batches(), options=options(floor=0.0, method="magnitude"))
    assert again.weights.reasons["up.weight"] == REASON  # without the state it cannot be known
    again.load_state_dict(state)
    assert again.weights.names == surgeon.weights.names
    assert again.sparsity == surgeon.sparsity
    assert again.prune(0.7).sparsity == pytest.approx(0.7, abs=0.01)


def test_a_pruned_model_is_pruned_on_as_before() -> None:
    """The floor keeps some of every matrix: a model that was pruned has no zero matrix."""
    model = Adapted()
    with torch.no_grad():
        model.up.weight.normal_(std=1e-9)
    sparse = fishleg.prune(
        model, batches(), 0.5, options=options(method="magnitude"), progress=lambda event: None
    )
    assert bool(sparse.get_parameter("up.weight").any())
    assert "up.weight" in Surgeon(sparse, batches(), options=options()).weights.names
