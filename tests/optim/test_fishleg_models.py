"""FishLeg with frozen, shared, compiled, autocast and Hugging Face models, and its state."""

import copy
import gc
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import X20, Y20, labelled_6, net_4_6_3, net_6_10_4, train_20
from oracles import identical
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.optim.lr_scheduler import StepLR

from fishleg import AuxiliaryOptions, Bernoulli, FishLeg, InverseFisher
from fishleg.workloads.digits import split_digits
from reproduction.workloads.networks import autoencoder


class Partly(nn.Module):
    """Shared, frozen and unused parameters, a bias without gradient, and a scale that no layer models."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.again(self.first(x).tanh()))
        return nn.functional.linear(self.scale * x, self.last.weight, self.last.bias.detach())


def test_frozen_unused_and_shared_parameters() -> None:
    model = Partly()
    optimizer = FishLeg(model, lr=0.1, weight_decay=0.1, update_every=1, warmup=4)
    covered = [name for layer in optimizer.inverse.layers.values() for name in layer.names]
    assert len(covered) == len(set(covered)) == 8, "a shared parameter is counted once, a frozen one never"
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 8
    before = copy.deepcopy(model.state_dict())
    train_20(model, optimizer, 5)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"first.weight", "again.weight", "first.bias", "again.bias", "last.weight", "scale"}
    assert model.again.weight is model.first.weight
    assert {id(p) for p in optimizer.state if optimizer.state[p]} == {
        id(model.get_parameter(name)) for name in changed
    }


def test_some_parameters_only() -> None:
    model = net_4_6_3()
    before = copy.deepcopy(model[0].state_dict())
    train_20(model, FishLeg(model, params=model[2].parameters()), 3)
    assert identical(model[0].state_dict(), before)


def test_freezing_during_training() -> None:
    model = net_4_6_3()
    optimizer = FishLeg(model, update_every=1)
    train_20(model, optimizer, 2)
    model[0].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    train_20(model, optimizer, 2)
    model[0].weight.grad = torch.ones_like(model[0].weight)  # left over
    cross_entropy(model(X20), Y20).backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[2].weight, before["2.weight"])


def test_a_parameter_that_q_does_not_cover() -> None:
    model = net_4_6_3()
    model[0].weight.requires_grad_(False)
    optimizer = FishLeg(model, params=model.parameters())
    train_20(model, optimizer)
    model[0].weight.requires_grad_(True)
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    with pytest.raises(ValueError, match=r"Q does not cover parameter '0\.weight': it was frozen when"):
        train_20(model, optimizer)
    assert identical([model.state_dict(), optimizer.state_dict()], before)


def test_copies_of_the_model_are_independent() -> None:
    model = net_4_6_3()
    optimizer = FishLeg(model, update_every=1)
    train_20(model, optimizer)
    teacher = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (teacher, torch.load(file, weights_only=False)):
        assert torch.equal(other(X20), model(X20))
        other(torch.full_like(X20, torch.nan))  # in training mode: not to be remembered by our optimizer
    reference = net_4_6_3()
    twin = FishLeg(reference, update_every=1)
    train_20(reference, twin, 2)
    train_20(model, optimizer)
    assert identical(model.state_dict(), reference.state_dict())


def test_bf16_autocast() -> None:
    torch.set_default_dtype(torch.float32)
    model, x, seen = net_4_6_3(), X20.float(), []
    model[0].register_forward_hook(lambda module, args, output: seen.append((module.training, output.dtype)))
    optimizer = FishLeg(model, update_every=1, warmup=5)

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    losses = train_20(cast, optimizer, 30, x)
    assert losses[-1] < losses[0] - 0.1
    assert {dtype for _, dtype in seen} == {torch.bfloat16}, "the replayed call is autocast as well"
    assert {training for training, _ in seen} == {True, False}
    assert {p.dtype for p in [*model.parameters(), *optimizer.inverse.parameters()]} == {torch.float32}


def test_bf16_parameters() -> None:
    torch.set_default_dtype(torch.float32)
    model = net_4_6_3().bfloat16()
    losses = train_20(model, FishLeg(model, update_every=1, warmup=5), 30, X20.bfloat16())
    assert losses[-1] < losses[0] - 0.1
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("which", ["wrapper", "inner", "in place"])
def test_compiled_model(which: str, backend: str) -> None:
    """The optimizer may get the compiled wrapper, or the module inside it; both train like the plain one."""
    torch._dynamo.reset()
    model, plain = net_4_6_3(), net_4_6_3()
    called: Any = model
    if which == "in place":
        model.compile(backend=backend)
    else:
        called = torch.compile(model, backend=backend)
    losses = train_20(called, FishLeg(called if which == "wrapper" else model, update_every=2), 4)
    assert losses == pytest.approx(train_20(plain, FishLeg(plain, update_every=2), 4))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class Classifier(nn.Module):
    """Speaks Hugging Face: keyword arguments in, an object or a dict with `logits` out, a loss if asked."""

    def __init__(self, as_dict: bool) -> None:
        super().__init__()
        self.net, self.as_dict = net_4_6_3(), as_dict

    def forward(
        self, input_values: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Any:
        logits = self.net(input_values if attention_mask is None else input_values * attention_mask)
        loss = None if labels is None else cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits} if self.as_dict else Output(loss, logits)


@pytest.mark.parametrize("as_dict", [False, True])
def test_keyword_calls_and_outputs_with_logits(as_dict: bool) -> None:
    model, plain = Classifier(as_dict), net_4_6_3()
    optimizer, twin = FishLeg(model, update_every=1), FishLeg(plain, update_every=1)
    batch = {"input_values": X20, "attention_mask": torch.ones(20, 1), "labels": Y20}
    for _ in range(3):
        optimizer.zero_grad()
        outputs = model(**batch)
        (outputs["loss"] if as_dict else outputs.loss).backward()
        optimizer.step()
    train_20(plain, twin, 3)
    assert identical(model.net.state_dict(), plain.state_dict())


def test_batch_given_to_step_and_own_forward() -> None:
    """Three ways to say the same inputs."""
    models = [net_4_6_3() for _ in range(3)]
    recorded = FishLeg(models[0], update_every=1)
    given = FishLeg(models[1], update_every=1)
    own = FishLeg(models[2], update_every=1, forward=lambda model, batch: model(batch["x"]))
    for _ in range(3):
        for model, optimizer, batch in zip(
            models, (recorded, given, own), (None, (X20, Y20), {"x": X20}), strict=True
        ):
            optimizer.zero_grad()
            cross_entropy(model(X20), Y20).backward()
            optimizer.step(batch=batch)
    assert identical(models[1].state_dict(), models[0].state_dict())
    assert identical(models[2].state_dict(), models[0].state_dict())


@pytest.mark.parametrize("structure", ["eigen-kronecker", "block"])
@pytest.mark.parametrize("n", [3, 25])
def test_resume_from_a_file_is_bit_exact(n: int, structure: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, FishLeg, StepLR]:
        model = net_4_6_3(norm=True)
        groups = [{"params": model[0].parameters(), "lr": 0.05}, {"params": [*model[1:].parameters()]}]
        inverse = InverseFisher.from_model(model, structure)
        optimizer = FishLeg(
            model, params=groups, inverse=inverse, weight_decay=0.01, update_every=2, warmup=4
        )
        return model, optimizer, StepLR(optimizer, 5, gamma=0.7)

    def run(model: nn.Module, optimizer: FishLeg, schedule: StepLR, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            losses += train_20(model, optimizer)
            schedule.step()
        return losses

    masks = {"0.weight": X20[:6] > -0.5}
    whole, first = build(), build()
    whole[1].set_masks(masks)
    first[1].set_masks(masks)
    losses = run(*whole, 2 * n)
    run(*first, n)
    torch.save([part.state_dict() for part in first], tmp_path / "state.pt")
    second = build()
    for part, state in zip(second, torch.load(tmp_path / "state.pt", weights_only=True), strict=True):
        part.load_state_dict(state)
    assert run(*second, n) == losses[n:]
    for ours, theirs in zip(second, whole, strict=True):
        assert identical(ours.state_dict(), theirs.state_dict())
    assert identical(second[1].masks, masks)


def test_state_of_another_optimizer() -> None:
    model = net_4_6_3()
    with pytest.raises(ValueError, match="this is not a FishLeg state: it has no 'fishleg' entry"):
        FishLeg(model).load_state_dict(torch.optim.SGD(model.parameters()).state_dict())


def trained_loss(make: Callable[[nn.Module], torch.optim.Optimizer], steps: int = 60) -> float:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    model, images = autoencoder(), split_digits()[0].flatten(1)
    optimizer, generator = make(model), torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = images[torch.randint(len(images), (100,), generator=generator)]
        optimizer.zero_grad()
        Bernoulli().nll(model(x), x).backward()
        optimizer.step()
    with torch.no_grad():
        return float(binary_cross_entropy_with_logits(model(images), images, reduction="sum")) / len(images)


@pytest.mark.slow
def test_trains_an_autoencoder_faster_than_sgd() -> None:
    """Digits, 60 steps, against SGD with momentum at the best of three learning rates."""
    sgd = [
        trained_loss(lambda model, lr=lr: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))
        for lr in (0.01, 0.03, 0.1)
    ]
    fishleg = trained_loss(lambda model: FishLeg(model, "bernoulli", lr=0.1, update_every=1))
    assert fishleg < min(sgd)


def test_a_model_forgets_its_former_optimizers() -> None:
    model = nn.Linear(4, 3)
    for _ in range(3):
        optimizer = FishLeg(model)
    gc.collect()
    assert list(model._forward_pre_hooks.values()) == [optimizer._recorder]


def elsewhere(value: Any) -> Any:
    """Every tensor of a state on another device than the model's."""
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, Mapping):
        return {key: elsewhere(item) for key, item in value.items()}
    return [elsewhere(item) for item in value] if isinstance(value, list) else value


def test_loaded_states_move_to_the_model() -> None:
    model = net_6_10_4()
    optimizer = FishLeg(model, auxiliary=AuxiliaryOptions(warm_start=6))
    x, y = labelled_6()[0]
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.set_masks({"0.weight": torch.rand(10, 6) > 0.5})
    learning = optimizer.auxiliary
    state = learning.state_dict()
    parts = {"terms": elsewhere(state["terms"]), "warm": elsewhere(state["warm"])}
    # values on the device "meta" cannot come back; that they are asked to is what is seen here
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        learning.load_state_dict({**state, "terms": parts["terms"]})
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        learning.load_state_dict({**state, "warm": parts["warm"]})
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        optimizer.inverse.set_extra_state(elsewhere(optimizer.inverse.get_extra_state()))
