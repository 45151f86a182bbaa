"""One call: a sparse model from a trained one, or an error that leaves the model as it was."""

import copy
import math
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import prune_with, quiet, state_copy
from oracles import identical
from torch import Tensor, nn
from torch.nn import functional

import fishleg
from fishleg import Categorical, FineTuningOptions, PruningOptions
from fishleg.options.names import MODES
from fishleg.pruning import Event, PruneStep, StageDone
from fishleg.workloads.digits_net import DigitsNet

COUNTS = {"0.weight": 8 * 16, "2.weight": 16 * 12, "4.weight": 12 * 4}


TOTAL = sum(COUNTS.values())


QUICK: dict[str, Any] = {"samples": 16, "sub_batch": 8, "refine_steps": 2}


SHORT = FineTuningOptions(steps=3, update_every=2)


class Net(nn.Sequential):
    """A class of the user's own."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4))


@pytest.fixture(scope="module")
def trained() -> Net:
    """For a moment, in float64, so that the quadratic model means something."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(20):
        for x, y in labelled():
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    optimizer.zero_grad()
    return model


@pytest.fixture
def model(trained: Net) -> Net:
    return copy.deepcopy(trained)


def labelled() -> list[tuple[Tensor, Tensor]]:
    inputs = torch.randn(4, 32, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [(x, x[:, :4].argmax(1)) for x in inputs]


def unlabelled() -> list[Tensor]:
    return [x for x, _ in labelled()]


def zeros(model: nn.Module) -> int:
    return sum(int((p == 0).sum()) for p in model.parameters() if p.dim() > 1)


def run(model: nn.Module, loader: Any, sparsity: Any = None, **given: Any) -> Any:
    return prune_with(model, loader, sparsity, **{**QUICK, **given})


def stages(model: nn.Module, loader: Any, sparsity: Any = None, **given: Any) -> list[PruneStep]:
    """What the pruning step of each stage did."""
    events: list[Event] = []
    run(model, loader, sparsity, progress=events.append, **given)
    return [event.step for event in events if isinstance(event, StageDone)]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_copy_or_in_place(mode: str, inplace: bool, model: Net) -> None:
    before = state_copy(model)
    tuning = SHORT if mode == "gradual" else None
    sparse = run(model, labelled(), 0.6, mode=mode, fine_tuning=tuning, inplace=inplace)
    assert (sparse is model) is inplace
    assert identical(dict(model.state_dict()), before) is not inplace
    assert inplace or all(p.grad is None for p in model.parameters())
    assert zeros(sparse) == round(0.6 * TOTAL)
    assert type(sparse) is Net
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in sparse.modules())
    assert all(p.requires_grad and type(p) is nn.Parameter for p in sparse.parameters())
    plain = Net()
    plain.load_state_dict(sparse.state_dict())
    x = unlabelled()[0]
    assert torch.equal(plain(x), sparse(x))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_modes_are_kept(mode: str, training: bool) -> None:
    model = DigitsNet(8).train(training)
    model.bn1.train(not training)
    modes = [module.training for module in model.modules()]
    batches = [(torch.rand(16, 1, 8, 8), torch.randint(10, (16,))) for _ in range(2)]
    tuning = SHORT if mode == "gradual" else None
    sparse = run(model, batches, 0.5, mode=mode, method="magnitude", fine_tuning=tuning)
    assert [module.training for module in sparse.modules()] == modes
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("mode", ["staged", "gradual"])
def test_default_stages_keep_three_quarters_each(mode: str, model: Net) -> None:
    tuning = SHORT if mode == "gradual" else None
    steps = stages(model, labelled(), 0.6, mode=mode, fine_tuning=tuning)
    assert len(steps) == math.ceil(math.log(0.4) / math.log(0.75)) == 4
    kept = [1.0, *(1 - step.target for step in steps)]
    shrink = [b / a for a, b in pairwise(kept)]
    assert shrink == pytest.approx([0.4**0.25] * 4)
    assert min(shrink) >= 0.75
    assert [step.sparsity for step in steps] == [round(s.target * TOTAL) / TOTAL for s in steps]


@pytest.mark.parametrize(("sparsity", "count"), [(0.25, 1), (0.4375, 2), (0.5, 3), (0.9, 9)])
def test_how_many_stages(sparsity: float, count: int, model: Net) -> None:
    """0.75² = 1 − 0.4375 exactly: no third stage by rounding."""
    steps = stages(model, unlabelled(), sparsity, method="magnitude")
    assert len(steps) == count
    assert steps[-1].target == sparsity


def test_stages_and_kind(model: Net) -> None:
    steps = stages(model, unlabelled(), 0.6, stages=2, method="magnitude")
    assert [step.target for step in steps] == pytest.approx([1 - 0.4**0.5, 0.6])
    steps = stages(model, unlabelled(), fishleg.schedule("linear", 0.6, 3), method="magnitude")
    assert [step.target for step in steps] == pytest.approx([0.2, 0.4, 0.6])
    steps = stages(model, unlabelled(), 0.6, mode="one-shot", method="magnitude")
    assert [step.target for step in steps] == [0.6]


@pytest.mark.parametrize("mode", ["staged", "gradual"])
def test_a_list_is_the_schedule(mode: str, model: Net) -> None:
    tuning = SHORT if mode == "gradual" else None
    steps = stages(model, labelled(), [0.2, 0.3, 0.75], mode=mode, fine_tuning=tuning, inplace=True)
    assert [step.target for step in steps] == [0.2, 0.3, 0.75]
    assert zeros(model) == round(0.75 * TOTAL)


def test_default_sparsity(model: Net) -> None:
    assert zeros(run(model, unlabelled(), method="magnitude")) == round(0.9 * TOTAL)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["2:4", "1:4"])
@pytest.mark.parametrize("mode", MODES)
def test_n_of_m_is_reached_by_default(mode: str, pattern: str, model: Net) -> None:
    tuning = SHORT if mode == "gradual" else None
    sparse = run(model, labelled(), pattern=pattern, mode=mode, fine_tuning=tuning)
    for name in COUNTS:
        kept = (sparse.get_parameter(name) != 0).view(-1, 4).sum(1)
        assert bool((kept == int(pattern[0])).all()), name


def test_options_reach_the_surgeon(model: Net) -> None:
    before = state_copy(model)
    sparse = run(model, unlabelled(), 0.5, include=["weight"], exclude=["^4"], compensation="none")
    changed = {name for name, value in sparse.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"0.weight", "2.weight"}
    assert zeros(sparse) == round(0.5 * (COUNTS["0.weight"] + COUNTS["2.weight"]))


def test_the_pattern_may_come_with_the_options(model: Net) -> None:
    """Options as one object mean the same as its fields."""
    options = PruningOptions(pattern="2:4", samples=16, sub_batch=8)
    sparse = fishleg.prune(model, unlabelled(), options=options, progress=quiet)
    assert zeros(sparse) == TOTAL // 2


@pytest.mark.slow
def test_training_helps(model: Net) -> None:
    """The same sparsities with and without training; the loss on the training batches."""
    tuning = FineTuningOptions(steps=40)
    alone = run(model, labelled(), [0.5, 0.8])
    tuned = run(model, labelled(), [0.5, 0.8], mode="gradual", fine_tuning=tuning)

    @torch.no_grad()
    def loss(model: nn.Module) -> float:
        return sum(float(functional.cross_entropy(model(x), y)) for x, y in labelled())

    assert loss(tuned) < 0.7 * loss(alone)


def test_a_loader_of_its_own_for_training(model: Net) -> None:
    """Calibration without labels, training with: possible only if each is used for its purpose."""
    calibration = unlabelled()
    sparse = run(model, calibration, 0.5, mode="gradual", fine_tuning=SHORT, train_loader=labelled())
    assert zeros(sparse) == round(0.5 * TOTAL)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_unlabelled_data(mode: str, model: Net) -> None:
    tuning = FineTuningOptions(steps=3, distill=True) if mode == "gradual" else None
    assert zeros(run(model, unlabelled(), 0.5, mode=mode, fine_tuning=tuning)) == round(0.5 * TOTAL)


@pytest.mark.parametrize("mode", ["staged", "gradual"])
def test_same_seed_same_model(mode: str, model: Net) -> None:
    tuning = SHORT if mode == "gradual" else None
    a, b, c = (
        state_copy(run(model, labelled(), [0.3, 0.6], mode=mode, fine_tuning=tuning, seed=seed))
        for seed in (3, 3, 4)
    )
    assert identical(a, b)
    assert not identical(a, c)


def test_a_line_per_stage(model: Net, capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []

    def note(event: Event) -> None:
        if line := str(event):
            lines.append(line)

    run(model, unlabelled(), [0.25, 0.5], progress=note)
    assert capsys.readouterr() == ("", "")
    for i, (line, percent) in enumerate(zip(lines[:-1], ("25.0%", "50.0%"), strict=True)):
        pattern = rf"\[{i + 1}/2\] sparsity {percent}: loss increase predicted [\d.e-]+, measured [\d.e-]+"
        assert re.fullmatch(pattern, line), line
    done = r"done: 50.0% of the prunable weights removed; KL to the dense model's outputs [\d.e-]+ on the .*"
    assert re.fullmatch(done, lines[-1])
    lines.clear()
    run(model, unlabelled(), [0.25, 0.5], progress=note, measure_batches=0)
    assert len(lines) == 3
    assert lines[-1] == "done: 50.0% of the prunable weights removed"
    assert not any("measured" in line for line in lines)


def test_lines_of_training_on_standard_error(model: Net, capsys: pytest.CaptureFixture[str]) -> None:
    run(model, labelled(), [0.25, 0.5], mode="gradual", fine_tuning=SHORT, progress=None)
    out, err = capsys.readouterr()
    assert out == ""
    starts = [line.split(":")[0] for line in err.splitlines()]
    expected = [f"[{i}/2] {what}" for i in (1, 2) for what in ("sparsity", "step 1/3", "step 3/3")]
    expected.append("done")
    assert [re.sub(r" \d+\.\d%", "", start) for start in starts] == expected


class Tagger(nn.Module):
    """A label for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_token_level_transformer(mode: str) -> None:
    """Two tokens in five are ignored."""
    model = Tagger()
    batches = []
    for _ in range(3):
        tokens = torch.randint(11, (16, 6))
        labels = (tokens % 5).masked_fill(torch.rand(16, 6) < 0.4, -100)
        batches.append((tokens, labels))
    tuning = SHORT if mode == "gradual" else None
    sparse = copy.deepcopy(model)
    steps = stages(
        sparse, batches, 0.5, likelihood=Categorical(), mode=mode, fine_tuning=tuning,
        exclude=["^embed", "^head"], inplace=True,
    )  # fmt: skip
    pruned = [name for name, p in model.named_parameters() if p.dim() > 1 and name.startswith("encoder")]
    assert set(steps[-1].per_layer) == set(pruned)
    assert len(pruned) == 8
    assert zeros(sparse) == round(0.5 * sum(model.get_parameter(name).numel() for name in pruned))
    assert all(step.measured is not None and math.isfinite(step.measured) for step in steps)
    assert torch.equal(sparse.embed.weight, model.embed.weight) is (mode != "gradual")
    assert bool(torch.isfinite(sparse(batches[0][0])).all())


def test_short_keywords_mean_the_same_as_options(model: Net) -> None:
    given: dict[str, Any] = {"pattern": "2:4", "method": "magnitude", "exclude": ["^4"]}
    short = fishleg.prune(model, unlabelled(), progress=quiet, **given)
    long = fishleg.prune(model, unlabelled(), progress=quiet, options=PruningOptions(**given))
    assert identical(dict(short.state_dict()), dict(long.state_dict()))


def test_a_copy_of_a_copy(model: Net) -> None:
    """The result is an ordinary model: it can be copied and pruned on."""
    half = run(model, unlabelled(), 0.5, method="magnitude", stages=1)
    most = run(copy.deepcopy(half), unlabelled(), 0.8, method="magnitude", stages=1)
    for name in COUNTS:
        assert not bool(most.get_parameter(name)[half.get_parameter(name) == 0].any())
    assert zeros(most) == round(0.8 * TOTAL)


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_the_seed_covers_shuffling_and_dropout(own: bool) -> None:
    """Two calls with one seed give the same bits, and leave the loader's generator alone."""
    from torch.utils.data import DataLoader, TensorDataset

    x = torch.randn(48, 6)
    generator = torch.Generator().manual_seed(7) if own else torch.default_generator
    loader = DataLoader(
        TensorDataset(x, x[:, :3].argmax(1)),
        batch_size=16,
        shuffle=True,
        generator=generator if own else None,
    )
    model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.5), nn.ReLU(), nn.Linear(12, 3))
    tuning = FineTuningOptions(steps=3, optimizer="sgd")
    results = []
    for noise in (0, 1):
        generator.manual_seed(noise)
        before = generator.get_state()
        sparse = prune_with(model, loader, 0.5, samples=8, mode="gradual", stages=2, fine_tuning=tuning)
        assert torch.equal(generator.get_state(), before)
        results.append(sparse.state_dict())
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())
