"""What users overlook, and what goes wrong without a word elsewhere: told, or done right."""

from __future__ import annotations

import copy
import itertools
import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import fishleg
from fishleg import Auxiliary, AuxiliaryOptions, FineTuningOptions, FishLeg, InverseFisher, Surgeon
from fishleg.curvature.likelihoods import Categorical
from fishleg.runtime.batchnorm import refresh_batchnorm
from fishleg.runtime.loaders import cycle
from fishleg.runtime.replay import Replayable


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def inputs(count: int = 4, size: int = 32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, 8, generator=generator) for _ in range(count)]


def pairs() -> list[tuple[Tensor, Tensor]]:
    return [(x, x[:, :4].argmax(1)) for x in inputs()]


def quiet(_: str) -> None:
    pass


# -- loaders


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_persistent_workers_are_not_rewound_by_another_pass() -> None:
    loader = DataLoader(TensorDataset(torch.arange(8.0)), num_workers=1, persistent_workers=True)
    running = iter(loader)  # a training loop in the middle of an epoch
    seen = [int(next(running)[0]) for _ in range(2)]
    ours, replayed = cycle(loader), iter(Replayable(loader))
    mixed = [[int(next(stream)[0]) for stream in (ours, replayed, running)] for _ in range(3)]
    assert seen + [row[2] for row in mixed] == [0, 1, 2, 3, 4]
    assert [row[0] for row in mixed] == [row[1] for row in mixed] == [0, 1, 2]
    assert loader.persistent_workers


def test_attach_goes_on_after_a_restart_with_a_shuffled_loader() -> None:
    """The measuring of a step has random numbers of its own."""
    x = torch.cat(inputs())
    given, schedule = net(), [0.4, 0.6]

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[tuple[Tensor, ...]], Surgeon]:
        model = copy.deepcopy(given)
        loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=32, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return model, optimizer, loader, Surgeon(model, loader, samples=16)

    def run(stop: int | None) -> tuple[Tensor, list[float | None]]:
        model, optimizer, loader, surgeon = begin()
        fishleg.attach(surgeon, optimizer, schedule, every=4)
        torch.manual_seed(5)
        for epoch in range(3):
            if epoch == stop:
                parts = (model, optimizer, surgeon)
                saved, state = copy.deepcopy([p.state_dict() for p in parts]), torch.get_rng_state()
                model, optimizer, loader, surgeon = begin()
                for part, values in zip((model, optimizer, surgeon), saved, strict=True):
                    part.load_state_dict(values)
                fishleg.attach(surgeon, optimizer, schedule, every=4, done=4 * epoch)
                torch.set_rng_state(state)
            for a, b in loader:
                optimizer.zero_grad()
                functional.cross_entropy(model(a), b).backward()
                optimizer.step()
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        return weights, [step.measured for step in surgeon.history]

    (weights, measured), (again, measured_again) = run(None), run(1)
    assert torch.equal(weights, again)
    assert measured == measured_again


def test_what_a_step_is_measured_on_is_not_what_q_learns_from_first() -> None:
    x = torch.arange(512.0).unsqueeze(1).expand(-1, 8) / 512
    loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
    drawn: list[Tensor] = []

    def forward(model: nn.Module, batch: list[Tensor]) -> Tensor:
        drawn.append((512 * batch[0][:, 0]).round())
        y: Tensor = model(batch[0])
        return y

    fishleg.prune(net(), loader, 0.5, mode="one-shot", samples=8, forward=forward, progress=quiet)
    measured, learned = set(torch.cat(drawn[:2]).tolist()), set(torch.cat(drawn[4:12]).tolist())
    assert len(measured) == 16
    assert len(measured & learned) < 12


# -- BatchNorm


def normalised() -> tuple[nn.Sequential, Tensor, Tensor]:
    """A trained classifier with a BatchNorm, and its data, ordered by class."""
    torch.manual_seed(0)
    y = torch.arange(1600) * 4 // 1600
    x = torch.randn(1600, 8) + 3 * torch.eye(8)[y]
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(100):
        i = torch.randint(0, len(x), (64,))
        optimizer.zero_grad()
        functional.cross_entropy(model(x[i]), y[i]).backward()
        optimizer.step()
    return model.eval(), x, y


@pytest.mark.parametrize("method", ["fishleg", "magnitude"])
def test_a_loader_that_is_ordered_by_class_is_told(method: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x, _ = normalised()
    mixed = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    options = {"mode": "one-shot", "method": method, "samples": 32, "progress": quiet}
    fishleg.prune(model, mixed.split(32), 0.3, **options)
    assert "BatchNorm" not in caplog.text
    fishleg.prune(model, x.split(20), 0.3, **options)
    assert "A loader that is ordered by class does not: shuffle it" in caplog.text
    assert "the quadratic model does not hold" not in caplog.text


def test_every_example_counts_the_same_in_renewed_statistics() -> None:
    model, x, _ = normalised()
    x = x[torch.randperm(len(x))][:300]
    sizes = [128, 128, 42, 2]
    refresh_batchnorm(model, x.split(sizes), len(sizes))
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    torch.testing.assert_close(norm.running_mean, model[0](x).mean(0).detach())
    assert norm.momentum == 0.1
    assert not norm._forward_pre_hooks


def test_a_norm_that_is_called_twice_or_late_averages_over_what_it_has_seen() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.late, self.calls = nn.BatchNorm1d(8), nn.BatchNorm1d(8), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y = self.norm(x) + self.norm(x + 2)
            return y + self.late(x) if self.calls > 1 else y

    model, x = Twice().eval(), inputs(3)
    refresh_batchnorm(model, x, 3)
    torch.testing.assert_close(model.norm.running_mean, torch.cat(x).mean(0) + 1)
    torch.testing.assert_close(model.late.running_mean, torch.cat(x[1:]).mean(0))


# -- Q


@pytest.mark.parametrize("options", [AuxiliaryOptions(groups=8), AuxiliaryOptions()])
def test_few_samples_end_the_warm_start_all_the_same(options: AuxiliaryOptions) -> None:
    surgeon = Surgeon(net(), inputs(size=64), auxiliary=options, samples=48)
    diagonal = surgeon.estimate().diag()["0.weight"].detach()
    assert float(diagonal.max() / diagonal.min()) > 1.5
    assert surgeon.learning is not None
    assert surgeon.learning.warm


def test_a_q_that_was_left_in_its_warm_start_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    auxiliary = Auxiliary(model, InverseFisher.from_model(model), "categorical")
    auxiliary.learn(inputs(), steps=50)
    assert "has not come to the end of its warm start (50 of 60 steps)" in caplog.text
    caplog.clear()
    auxiliary.learn(inputs(), steps=20)
    assert not caplog.text


def test_the_surgeon_s_block_size_is_that_of_a_learned_q() -> None:
    surgeon = Surgeon(net(), inputs(), structure="block", block_size=4, samples=16)
    Q = surgeon.estimate().operator("0").dense()
    blocks = torch.block_diag(*torch.ones(len(Q) // 4, 4, 4))
    assert bool(Q[blocks.bool()].all())
    assert not bool(Q[~blocks.bool()].any())


class Parts(nn.Module):
    """Two layers that may be called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.g(self.f(x).relu())
        return y


@pytest.mark.parametrize("options", [{"method": "exact"}, {"auxiliary": AuxiliaryOptions(estimator="probe")}])
def test_a_forward_that_calls_parts_of_the_model_has_the_same_curvature(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    model, found = Parts(), []
    for forward in (lambda m, x: m(x), lambda m, x: m.g(m.f(x).relu())):
        surgeon = Surgeon(model, inputs(), samples=16, forward=forward, **options)
        found.append(surgeon.estimate().diag()["f.weight"].detach())
    torch.testing.assert_close(found[0], found[1])
    assert float(found[0].max() / found[0].min()) > 1.0001


def test_fishleg_s_trust_region_holds_when_the_rate_jumps_up() -> None:
    x = torch.cat(inputs(8))
    y = x[:, :4].argmax(1)
    for low in (0.0, 1e-5):
        model = net()
        optimizer = FishLeg(model, "categorical", lr=0.1, max_kl=0.01)
        for t in range(32):
            for group in optimizer.param_groups:
                group["lr"] = low if t < 25 else 0.1
            before = model(x).detach()
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                moved = Categorical().divergence(model(x), before)
            assert float(moved) < 0.02, (low, t)


# -- outputs


class Heads(nn.Module):
    """Two output layers, as a pair or side by side."""

    def __init__(self, *, joined: bool) -> None:
        super().__init__()
        self.f, self.a, self.b, self.joined = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4), joined

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = self.f(x).relu()
        return torch.cat([self.a(h), self.b(h)], 1) if self.joined else (self.a(h), self.b(h))


def test_a_head_that_does_not_count_is_told(caplog: pytest.LogCaptureFixture) -> None:
    fishleg.prune(Heads(joined=False), inputs(), 0.5, mode="one-shot", samples=16, progress=quiet)
    assert "b.weight has no part in the model's output on the first batches" in caplog.text
    caplog.clear()
    for options in ({"joined": True}, {"joined": False}):
        forward = (lambda m, x: m(x)) if options["joined"] else (lambda m, x: torch.cat(m(x), 1))
        fishleg.prune(
            Heads(**options), inputs(), 0.5, mode="one-shot", likelihood="bernoulli", forward=forward,
            samples=16, progress=quiet,
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

    x = torch.cat(inputs(2, 64))
    x = x[x[:, 0].argsort()]  # the first examples go to the first expert
    Surgeon(Experts(), [x], samples=8).prune(0.5)
    assert "no part" not in caplog.text
    Surgeon(Experts(), [x[x[:, 0] < 1]], samples=8).prune(0.5)
    assert "experts.2.weight has no part" in caplog.text


@pytest.mark.parametrize("deep", [False, True])
def test_rows_of_every_output_layer_stay_in_graphs_of_any_depth(deep: bool) -> None:
    class Unrolled(Heads):
        def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            y = super().forward(x)
            assert isinstance(y, Tensor)
            for _ in range(1200 if deep else 1):
                y = y * 0.999
            return y

    reasons = Surgeon(Unrolled(joined=True), inputs(), "bernoulli", pattern="rows").reasons
    assert [name for name, why in reasons.items() if why and "output layer" in why] == [
        "a.weight",
        "b.weight",
    ]


def test_rows_with_an_attention_whose_projection_is_parametrized() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 4)
            nn.utils.parametrizations.weight_norm(self.attention.out_proj)

        def forward(self, x: Tensor) -> Tensor:
            h = x.unsqueeze(1)
            y: Tensor = self.head(self.attention(h, h, h, need_weights=False)[0].squeeze(1))
            return y

    reasons = Surgeon(Attends(), inputs(), pattern="rows").reasons
    assert "an output layer" in str(reasons["head.weight"])


def test_rows_of_every_output_layer_stay() -> None:
    reasons = Surgeon(Heads(joined=True), inputs(), "bernoulli", pattern="rows").reasons
    assert reasons["f.weight"] is None
    assert all("an output layer" in str(reasons[name]) for name in ("a.weight", "b.weight"))


def test_rows_of_an_attention_that_is_the_output_stay() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            h = self.f(x).unsqueeze(1)
            y: Tensor = self.attention(h, h, h, need_weights=False)[0].squeeze(1)
            return y

    reasons = Surgeon(Attends(), inputs(), pattern="rows").reasons
    assert "an output layer" in str(reasons["attention.out_proj.weight"])
    assert reasons["f.weight"] is None


def test_a_likelihood_that_cannot_be_meant_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"needs two classes at least, .* \(32, 1\) have one"):
        Surgeon(nn.Linear(8, 1), inputs(), samples=4).prune(0.5)
    sigmoid = nn.Sequential(nn.Linear(8, 4), nn.Sigmoid())
    Surgeon(sigmoid, inputs(), "bernoulli", samples=8).prune(0.5)
    assert "leave out its last sigmoid" in caplog.text
    caplog.clear()
    positive = nn.Linear(8, 1)
    nn.init.zeros_(positive.weight[:, 1:])
    Surgeon(positive, [x[x[:, 0] > 0][:4] for x in inputs()], "bernoulli", samples=4).prune(0.5)
    assert "sigmoid" not in caplog.text  # too few to tell
    maps = nn.Conv2d(3, 4, 3)
    images = [torch.randn(8, 3, 6, 6) for _ in range(2)]
    Surgeon(copy.deepcopy(maps), images, Categorical(class_dim=1), samples=8).prune(0.5)
    assert "class_dim" not in caplog.text
    Surgeon(maps, images, samples=8).prune(0.5)
    assert "pass likelihood=Categorical(class_dim=1)" in caplog.text
    with pytest.raises(
        ValueError, match=r"Categorical\(class_dim=1\) for outputs \[batch, classes, \.\.\.\]"
    ):
        Categorical().check(torch.randn(2, 4, 3, 3), torch.zeros(2, 3, 3, dtype=torch.long))


# -- models that are sparse already


def test_zeros_of_excluded_layers_last_too() -> None:
    sparse = fishleg.prune(net(), pairs(), 0.6, mode="one-shot", method="magnitude", progress=quiet)
    zero = sparse.get_parameter("2.weight") == 0
    assert bool(zero.any())
    for optimizer in ("sgd", "fishleg"):
        again = fishleg.prune(
            sparse, pairs(), 0.8, mode="gradual", stages=1, exclude=["^2"], samples=16, progress=quiet,
            tuning=FineTuningOptions(optimizer=optimizer, steps=2),
        )  # fmt: skip
        now = again.get_parameter("2.weight")
        assert torch.equal(now == 0, zero)
        assert not torch.equal(now, sparse.get_parameter("2.weight"))  # it was trained


@pytest.mark.parametrize("kind", ["sgd", "fishleg"])
def test_zeros_of_excluded_layers_last_under_attach(kind: str) -> None:
    model = fishleg.prune(net(), pairs(), 0.6, mode="one-shot", method="magnitude", progress=quiet)
    zero = model.get_parameter("2.weight") == 0
    surgeon = Surgeon(model, pairs(), exclude=["^2"], samples=16)
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.1)
        if kind == "sgd"
        else FishLeg(model, "categorical", lr=0.1)
    )
    fishleg.attach(surgeon, optimizer, [0.7, 0.8], every=3, start=2)
    for x, y in pairs() * 2:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert torch.equal(model.get_parameter("2.weight") == 0, zero)
    assert surgeon.masks.keys() == {"0.weight"}


def test_the_bias_of_a_row_without_weights_may_be_compensated() -> None:
    model = net()
    with torch.no_grad():
        model[0].weight[3] = model[0].bias[3] = 0
    surgeon = Surgeon(model, inputs(), samples=32)
    surgeon.note_zeros()
    surgeon.prune(0.5)
    assert surgeon.masks.keys() == {"0.weight", "2.weight"}
    assert not surgeon.elsewhere


def test_a_pruned_model_is_pruned_on_from_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    sparse = fishleg.prune(net(), inputs(), 0.6, method="magnitude", progress=quiet)
    lines: list[str] = []
    most = fishleg.prune(sparse, inputs(), 0.8, method="magnitude", progress=lines.append)
    reached = [float(line.split("sparsity ")[1].split("%")[0]) for line in lines[:-1]]
    assert len(reached) == 3
    assert all(a < b for a, b in itertools.pairwise([60.0, *reached]))
    assert reached[-1] == 80.2  # 154 of 192
    assert not bool(most.get_parameter("0.weight")[sparse.get_parameter("0.weight") == 0].any())
    assert not caplog.text


def test_the_state_of_another_model_s_surgeon_is_refused() -> None:
    surgeon = Surgeon(net(), inputs(), method="magnitude")
    surgeon.prune(0.5)
    state = surgeon.state_dict()
    other = Surgeon(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)), inputs())
    with pytest.raises(ValueError, match=r"masks '0.weight' of shape \(16, 8\), which is of shape \(12, 8\)"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match=r"'0.weight' of shape \(16, 8\), which is missing here"):
        Surgeon(nn.Linear(8, 4), inputs()).load_state_dict(state)
    assert not other.masks
    excluding = Surgeon(copy.deepcopy(surgeon.model), inputs(), method="magnitude", exclude=["^2"])
    excluding.load_state_dict(state)
    excluding.prune(0.7)
    assert excluding.masks.keys() == {"0.weight", "2.weight"}
