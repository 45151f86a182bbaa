"""What the documentation promises of zeros, names, statistics and targets, held where it is easily broken."""

from __future__ import annotations

import copy
import logging
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fishleg
from fishleg import FishLeg, Surgeon
from fishleg.pruning.patterns import as_pattern
from fishleg.runtime.batchnorm import batchnorm_input_moments, refresh_batchnorm

QUICK: dict[str, Any] = {"samples": 16}


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def inputs(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(32, 8, generator=generator) for _ in range(count)]


def quiet(_: str) -> None:
    pass


def magnitude(model: nn.Module, sparsity: float, **options: Any) -> Any:
    given = {"mode": "one-shot", "method": "magnitude", "compensation": "none", **options}
    return fishleg.prune(model, inputs(), sparsity, progress=quiet, **given)


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 3) -> None:
    for x in inputs(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        for optimizer in optimizers:
            optimizer.step()


def zeros(model: nn.Module) -> dict[str, Tensor]:
    return {name: p == 0 for name, p in model.named_parameters() if p.dim() > 1}


def halves(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model[i].parameters(), lr=0.1, momentum=0.9) for i in (0, 2)]


# --- several optimizers -------------------------------------------------------------------------------------


def test_keep_zeros_needs_every_optimizer() -> None:
    model = magnitude(net(), 0.5)
    before, (first, second) = zeros(model), halves(model)
    train(model, first, second)
    model.load_state_dict(magnitude(net(), 0.5).state_dict())
    told = r"the optimizer does not have 2\.weight, whose zeros another one would fill: pass all"
    with pytest.raises(ValueError, match=told):
        fishleg.keep_zeros(first, model)
    assert not first._optimizer_step_post_hooks
    handle = fishleg.keep_zeros([first, second], model)
    train(model, first, second)
    assert all(torch.equal(now, before[name]) for name, now in zeros(model).items())
    held = second.state[model[2].weight]["momentum_buffer"]
    assert not bool(held[before["2.weight"]].any())
    handle.remove()
    train(model, first, second)
    assert not any(bool((zeros(model)[name] & zero).any()) for name, zero in before.items())
    with pytest.raises(ValueError, match="got an empty sequence"):
        fishleg.keep_zeros([], model)


def test_what_is_frozen_needs_no_optimizer() -> None:
    model = magnitude(net(), 0.5)
    model[2].requires_grad_(False)
    before = zeros(model)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    fishleg.keep_zeros(optimizer, model)
    train(model, optimizer)
    assert all(torch.equal(now, before[name]) for name, now in zeros(model).items())


@pytest.mark.parametrize("kind", ["sgd", "fishleg"])
def test_attach_needs_every_optimizer_and_counts_the_steps_of_the_first(kind: str) -> None:
    model = net()
    surgeon = Surgeon(model, inputs(), method="magnitude")
    first, second = halves(model)
    with pytest.raises(ValueError, match=r"does not have 2\.weight"):
        fishleg.attach(surgeon, first, [0.5], every=1)
    assert not surgeon.trains
    if kind == "fishleg":
        second = FishLeg(model, params=list(model[2].parameters()), lr=0.1)
    handle = fishleg.attach(surgeon, [first, second], [0.3, 0.5], every=2)
    train(model, first, second)
    assert [step.target for step in surgeon.history] == [0.3, 0.5]
    train(model, first, second)
    assert all(torch.equal(zero, ~surgeon.masks[name]) for name, zero in zeros(model).items())
    handle.remove()
    assert not first._optimizer_step_post_hooks
    assert not second._optimizer_step_post_hooks


def test_attach_needs_the_optimizer_of_excluded_layers_with_zeros() -> None:
    model = magnitude(net(), 0.5)
    surgeon = Surgeon(model, inputs(), method="magnitude", exclude=["2"])
    first, second = halves(model)
    with pytest.raises(ValueError, match=r"does not have 2\.weight"):
        fishleg.attach(surgeon, first, [0.8], every=1)
    fishleg.attach(surgeon, (first, second), [0.8], every=1)


def test_a_pruning_that_fails_is_due_again_at_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = magnitude(net(), 0.2)
    before = zeros(model)
    surgeon, optimizer = (
        Surgeon(model, inputs(), method="magnitude"),
        torch.optim.SGD(model.parameters(), 0.1),
    )
    fishleg.attach(surgeon, optimizer, [0.3, 0.5], every=4)
    with monkeypatch.context() as broken:
        broken.setattr(surgeon, "refine", lambda _: [].pop())
        with pytest.raises(IndexError):
            train(model, optimizer, steps=1)
    assert all(torch.equal(now, before[name]) for name, now in zeros(model).items())
    reached = []
    for _ in range(5):
        train(model, optimizer, steps=1)
        reached.append(len(surgeon.history))
    assert reached == [1, 1, 1, 2, 2]
    assert [step.target for step in surgeon.history] == [0.3, 0.5]


# --- zeros that were there ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sgd", "fishleg"])
def test_zeros_of_a_pruned_model_last_before_the_first_pruning(kind: str) -> None:
    model = magnitude(net(), 0.5)
    before = zeros(model)
    optimizer = (
        FishLeg(model, lr=0.1)
        if kind == "fishleg"
        else torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    )
    surgeon = Surgeon(model, inputs(), **QUICK)
    fishleg.attach(surgeon, optimizer, [0.8], every=9, start=2)
    train(model, optimizer, steps=2)
    assert all(torch.equal(now, before[name]) for name, now in zeros(model).items())
    train(model, optimizer, steps=1)
    assert surgeon.sparsity == pytest.approx(0.8, abs=0.003)
    assert all(bool(zeros(model)[name][zero].all()) for name, zero in before.items())


def test_a_few_zeros_are_no_mask() -> None:
    model = net()
    with torch.no_grad():
        model[0].weight[0, 0] = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    surgeon = Surgeon(model, inputs(), method="magnitude")
    fishleg.attach(surgeon, optimizer, [0.5], every=9, start=5)
    train(model, optimizer)
    assert not surgeon.found
    assert not bool(zeros(model)["0.weight"].any())


def test_zeros_that_were_made_so_are_free_and_pruned_ones_told(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    nn.init.eye_(model[0].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fishleg.attach(Surgeon(model, inputs(), method="magnitude", exclude=["0"]), optimizer, [0.5], every=1)
    assert not caplog.text
    train(model, optimizer)
    assert float(zeros(model)["0.weight"].double().mean()) < 0.5

    model = magnitude(net(), 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = zeros(model)["0.weight"]
    fishleg.attach(Surgeon(model, inputs(), method="magnitude", exclude=["0"]), optimizer, [0.8], every=1)
    assert "the zeros of 0.weight are taken for pruned and will be kept" in caplog.text
    train(model, optimizer)
    assert torch.equal(zeros(model)["0.weight"], before)


# --- names --------------------------------------------------------------------------------------------------


def test_names_are_names_and_not_regular_expressions() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(13)))
    every, data = [f"{i}.weight" for i in range(13)], [torch.randn(4, 4)]

    def chosen(**options: Any) -> list[str]:
        return Surgeon(model, data, **options).prunable

    assert chosen(exclude=["2.weight"]) == [name for name in every if name != "2.weight"]
    assert chosen(include=["1"]) == ["1.weight"]
    assert chosen(include=["^1"]) == ["1.weight", "10.weight", "11.weight", "12.weight"]
    nested = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    assert Surgeon(nested, data, include=["0"]).prunable == ["0.0.weight"]
    with pytest.raises(ValueError, match=r"'0\.1' matches no parameter; there are 0\.0\.weight"):
        Surgeon(nested, data, include=["0.1"])


def test_tied_weights_go_by_each_of_their_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head, self.subhead = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.head.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.subhead(self.first(x)))
            return y

    for name in ("head", "head.weight", "first"):
        assert Surgeon(Tied(), [torch.randn(4, 4)], exclude=[name]).prunable == ["subhead.weight"]


# --- BatchNorm ----------------------------------------------------------------------------------------------


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(),
        nn.Dropout(0.5), nn.Linear(8, 4),
    )  # fmt: skip
    model(torch.cat(inputs()) + 0.1)
    return model.eval()


def statistics(model: nn.Sequential, *places: int) -> list[Tensor]:
    return [value.clone() for i in places for value in model[i].buffers()]


@pytest.mark.parametrize(("include", "same"), [("7", (1, 4)), ("3", (1,)), ("0", ())])
@pytest.mark.parametrize("method", ["fishleg", "magnitude"])
def test_statistics_are_renewed_only_behind_what_was_pruned(
    include: str, same: tuple[int, ...], method: str
) -> None:
    model = normed()
    surgeon = Surgeon(model, inputs(), include=[include], method=method, **QUICK)
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    kept, state = statistics(model, *same), torch.get_rng_state()
    others = {i: statistics(model, i) for i in {1, 4} - set(same)}
    surgeon.prune(0.5, cuts=2, refine=1)
    assert all(map(torch.equal, statistics(model, *same), kept))
    assert not any(torch.equal(statistics(model, i)[0], old[0]) for i, old in others.items())
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert not any(m.training for m in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_norms_before_the_pruned_layer_normalise_by_what_they_keep() -> None:
    model, data = normed(), inputs()
    Surgeon(model, data, include=["3"], method="magnitude").prune(0.5)
    with torch.no_grad():
        expected = model[:4](torch.cat(data)).mean(0)
    norm = model[4]
    assert isinstance(norm, nn.BatchNorm1d)
    twenty = torch.stack([model[:4](data[i % 3]).mean(0) for i in range(20)]).mean(0).detach()
    assert norm.running_mean is not None
    torch.testing.assert_close(norm.running_mean, twenty)
    torch.testing.assert_close(norm.running_mean, expected, atol=0.05, rtol=0.1)


def test_where_all_have_moved_all_are_renewed_as_they_ever_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def pruned(**options: Any) -> dict[str, Tensor]:
        loader = torch.utils.data.DataLoader(torch.cat(inputs()), batch_size=16, shuffle=True)
        model: nn.Module = fishleg.prune(normed(), loader, 0.6, progress=quiet, **QUICK, **options)
        return model.state_dict()

    found = pruned()
    monkeypatch.setattr("fishleg.pruning.surgeon.batchnorm_input_moments", lambda *_: {})
    assert all(torch.equal(value, found[name]) for name, value in pruned().items())


def test_norms_that_are_not_called_or_by_keyword_or_twice() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.late = nn.BatchNorm1d(8), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(input=x) + self.norm(x + 2 + torch.rand(()))
            return y

    model, x, state = Odd(), inputs()[0], torch.get_rng_state()
    (first, second), late = (
        batchnorm_input_moments(model, x).values(),
        batchnorm_input_moments(model, x)[model.late],
    )
    del second
    assert late == []
    assert len(first) == 2
    torch.testing.assert_close(first[0], torch.stack([x.sum(0), x.square().sum(0)]))
    assert all(map(torch.equal, first, batchnorm_input_moments(model, x)[model.norm]))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert refresh_batchnorm(model, [x], 1, only=[model.norm]) == 1


# --- models that are sparse already -------------------------------------------------------------------------


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
    options: dict[str, Any] = {"method": "magnitude", "pattern": pattern, "progress": quiet}
    sparse = fishleg.prune(net(), inputs(), sparsity, **options)
    with pytest.raises(ValueError, match=told):
        fishleg.prune(sparse, inputs(), again, **options)


def test_another_pattern_or_a_little_more_is_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    sparse = magnitude(net(), 0.5)
    assert int((magnitude(sparse, 0.51)[0].weight == 0).sum()) > 0
    strict = magnitude(sparse, 0.5, pattern="2:4")  # half are zero, but not two of each four
    assert all(bool((w.view(-1, 4).sum(1) >= 2).all()) for w in zeros(strict).values())
    magnitude(sparse, 0.5, pattern="rows")
    caplog.clear()
    surgeon = Surgeon(magnitude(net(), 0.9), inputs(), method="magnitude")
    optimizer = torch.optim.SGD(surgeon.model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"0\.5 \(pattern global\) removes nothing"):
        fishleg.attach(surgeon, optimizer, [0.5, 0.95], every=1)
    assert not optimizer._optimizer_step_post_hooks


# --- arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        (torch.ones(8, dtype=torch.bool), r"mask of '0\.weight' must have its shape \(16, 8\), got \(8,\)"),
        (
            torch.ones(16, 8).double(),
            r"mask of '0\.weight' must be a boolean tensor \(True = kept\), got torch\.float64",
        ),
        ([True], r"must be a boolean tensor \(True = kept\), got list"),
    ],
)
def test_masks_are_checked(mask: Any, told: str) -> None:
    model = net()
    before, optimizer = copy.deepcopy(model.state_dict()), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=told):
        fishleg.keep_zeros(optimizer, model, {"0.weight": mask})
    assert not optimizer._optimizer_step_post_hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_layer_that_cannot_lose_so_much_is_named() -> None:
    scores = {"a": torch.rand(8, 8), "b": torch.rand(2, 2)}
    with pytest.raises(ValueError, match=r"cannot remove 4 of 4 in 'b' \(sparsity 0\.9500\)"):
        as_pattern("layer").select(scores, 0.95)


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    np = pytest.importorskip("numpy")
    for half in (np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5)):
        assert int(sum(zero.sum() for zero in zeros(magnitude(net(), half)).values())) == 96
        surgeon = Surgeon(net(), inputs(), method="magnitude")
        assert type(surgeon.prune(half).target) is float
        assert fishleg.schedule("cubic", half, 2)[-1] == 0.5
    several = np.linspace(0.2, 0.5, 3, dtype=np.float32)
    sparse = fishleg.prune(net(), inputs(), several, method="magnitude", progress=quiet)
    assert int(sum(zero.sum() for zero in zeros(sparse).values())) == 96
    surgeon = Surgeon(net(), inputs(), method="magnitude")
    optimizer = torch.optim.SGD(surgeon.model.parameters(), lr=0.1)
    fishleg.attach(surgeon, optimizer, several, every=1)
    train(surgeon.model, optimizer)
    assert [step.target for step in surgeon.history] == several.tolist()
    with pytest.raises(ValueError, match=r"sparsity must be in \(0, 1\), got '0\.5'"):
        surgeon.prune("0.5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sparsity must be in \(0, 1\), got 90"):
        fishleg.prune(net(), inputs(), np.int64(90))


def test_a_model_that_cannot_be_copied_is_told_whatever_the_reason() -> None:
    model = net()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"cannot be copied \(TypeError: cannot pickle .*inplace=True"):
        magnitude(model, 0.5)
    magnitude(model, 0.5, inplace=True)


def test_a_model_that_is_mostly_frozen_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    model[0].requires_grad_(False)
    with caplog.at_level(logging.WARNING):
        Surgeon(model, inputs())
    assert "only 30.2 % of the model's 212 parameters can be pruned" in caplog.text
    assert "0.weight (frozen)" in caplog.text
