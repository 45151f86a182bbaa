"""The surgeon on a small trained convolutional network: exact counts and zeros, lasting accuracy."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from oracles import identical
from torch import Tensor, nn
from torch.nn import functional
from trained import trained_digits

from fishleg.inverse.estimators import METHODS
from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.pruning import diagnostics as looks
from fishleg.pruning.surgeon import Surgeon
from fishleg.workloads.digits import split_digits
from fishleg.workloads.digits_net import DigitsNet

WEIGHTS = {"conv1.weight": 72, "conv2.weight": 1152, "conv3.weight": 4608, "linear.weight": 320}
QUICK: dict[str, Any] = {"samples": 16, "sub_batch": 8, "batchnorm_batches": 2}


@pytest.fixture(scope="module")
def trained() -> DigitsNet:
    return trained_digits(5)


@pytest.fixture
def model(trained: DigitsNet) -> DigitsNet:
    return copy.deepcopy(trained)


@pytest.fixture(scope="module")
def loader() -> list[Tensor]:
    """Images without labels."""
    images, _, _, _ = split_digits()
    return list(images[:640].split(64))


def accuracy(model: nn.Module) -> float:
    _, _, images, labels = split_digits()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).double().mean())


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))


def inputs() -> list[Tensor]:
    return [torch.randn(32, 6) for _ in range(3)]


# --- counts and zeros ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [method for method in METHODS if method != "exact"])
def test_every_method_removes_exactly_what_was_asked(method: str, model: DigitsNet, loader: Any) -> None:
    surgeon = Surgeon(model, loader, method=method, **QUICK)
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


@pytest.mark.parametrize("compensation", ["joint", "independent", "sum", "none"])
def test_exact_method_and_every_compensation(compensation: str) -> None:
    model = mlp()
    before = state(model)
    surgeon = Surgeon(model, inputs(), method="exact", compensation=compensation, samples=2)
    surgeon.prune(0.5)
    zeros = sum(int((p == 0).sum()) for p in model.parameters())
    assert zeros == round(0.5 * (72 + 96 + 24))
    kept = surgeon.masks["2.weight"]
    assert torch.equal(model[2].weight[kept], before["2.weight"][kept]) is (compensation == "none")
    assert torch.equal(model[2].bias, before["2.bias"]) is (compensation == "none")


def test_better_compensation_predicts_less_for_the_same_q(model: DigitsNet, loader: Any) -> None:
    q = Surgeon(model, loader, **QUICK).estimate()
    predicted = []
    for compensation in ("joint", "independent", "none"):
        surgeon = Surgeon(copy.deepcopy(model), loader, compensation=compensation)
        predicted.append(surgeon.prune(0.7, inverse=q).predicted)
    assert predicted[0] < predicted[1] < predicted[2]


def test_the_given_q_decides(model: DigitsNet, loader: Any) -> None:
    """With Q = I the surgeon removes the smallest weights and moves nothing else."""
    before = state(model)
    surgeon = Surgeon(model, loader, floor=0.0)
    surgeon.prune(0.5, inverse=InverseFisher.from_model(model, "identity"))
    magnitudes = torch.cat([before[name].abs().flatten() for name in WEIGHTS])
    threshold = magnitudes.sort().values[round(0.5 * len(magnitudes)) - 1]
    for name, mask in surgeon.masks.items():
        assert torch.equal(mask, before[name].abs() > threshold)
        assert torch.equal(model.get_parameter(name), before[name] * mask)


@pytest.mark.parametrize(("pattern", "share"), [("global", 0.97), ("layer", 0.97), ("2:4", 0.995)])
def test_exchanges_lower_the_predicted_loss(
    pattern: str, share: float, model: DigitsNet, loader: Any
) -> None:
    sparsity = 0.5 if pattern == "2:4" else 0.85
    surgeon = Surgeon(model, loader, pattern=pattern, **QUICK)
    q = surgeon.estimate()
    first = surgeon.select(q, sparsity)
    better = surgeon.exchange(q, first)
    counts = [sum(int((~mask).sum()) for mask in masks.values()) for masks in (first, better)]
    assert counts[0] == counts[1]
    assert any(not torch.equal(first[name], better[name]) for name in first)
    before, after = (sum(surgeon.predict(q, masks).values()) for masks in (first, better))
    assert after < share * before
    plain = Surgeon(copy.deepcopy(model), loader, pattern=pattern, exchanges=0, **QUICK)
    assert all(torch.equal(mask, first[name]) for name, mask in plain.exchange(q, first).items())
    assert plain.prune(sparsity, inverse=q).predicted == pytest.approx(before)
    assert surgeon.prune(sparsity, inverse=q).predicted == pytest.approx(after)


@pytest.mark.parametrize("options", [{"mask_search_across_layers": False}, {"pattern": "layer"}])
def test_exchanges_within_layers_keep_their_counts(
    options: dict[str, Any], model: DigitsNet, loader: Any
) -> None:
    surgeon = Surgeon(model, loader, **options, **QUICK)
    q = surgeon.estimate()
    first = surgeon.select(q, 0.85)
    better = surgeon.exchange(q, first)
    assert {n: int(m.sum()) for n, m in better.items()} == {n: int(m.sum()) for n, m in first.items()}
    before, after = surgeon.predict(q, first), surgeon.predict(q, better)
    assert all(after[name] <= before[name] * 1.0001 for name in first)  # no layer pays for another
    assert sum(after.values()) < 0.97 * sum(before.values())


@pytest.mark.parametrize(
    ("pattern", "sparsity", "loose"), [("global", 0.7, False), ("global", 0.4, True), ("2:4", 0.5, True)]
)
def test_zeros_that_the_masks_do_not_hold_are_told(
    pattern: str, sparsity: float, loose: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, data = mlp(), inputs()
    Surgeon(model, data, **QUICK).prune(0.6)
    assert "were zero already" not in caplog.text
    zero = {name: p == 0 for name, p in model.named_parameters() if p.dim() == 2}
    surgeon = Surgeon(model, data, pattern=pattern, **QUICK)
    surgeon.prune(sparsity)
    count = sum(int((zero[name] & surgeon.masks[name]).sum()) for name in surgeon.prunable)
    assert (count > 0) == loose
    assert (f"{count} weights that were zero already are not among" in caplog.text) == loose


def test_zeros_of_a_sparse_model_stay_zero(model: DigitsNet, loader: Any) -> None:
    """Whoever made them: the second surgeon has no masks of the first."""
    Surgeon(model, loader, **QUICK).prune(0.85)
    zeros = {name: model.get_parameter(name) == 0 for name in WEIGHTS}
    Surgeon(model, loader, **QUICK).prune(0.95)
    assert all(bool((model.get_parameter(name)[gone] == 0).all()) for name, gone in zeros.items())


def test_exchanges_come_near_the_best_of_all_masks() -> None:
    """Against every choice of half of 14 weights: a quarter of the loss above the best is given back."""
    gap = []
    for seed in range(8):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(7, 2, bias=False))
        mixed = torch.randn(7, 7)
        batches = [torch.randn(64, 7) @ mixed for _ in range(4)]
        surgeon = Surgeon(model, batches, samples=64, floor=0.0)
        q = surgeon.estimate()

        def loss(mask: Tensor, surgeon: Surgeon = surgeon, q: InverseFisher = q) -> float:
            return sum(surgeon.predict(q, {"0.weight": mask}).values())

        first = surgeon.select(q, 0.5)
        every = [
            torch.ones(14, dtype=torch.bool).index_fill(0, torch.tensor(chosen), False).view(2, 7)
            for chosen in itertools.combinations(range(14), 7)
        ]
        least = min(loss(mask) for mask in every)
        better = surgeon.exchange(q, first)
        gap.append([loss(masks["0.weight"]) / least - 1 for masks in (first, better)])
    before, after = (sum(column) for column in zip(*gap, strict=True))
    assert after < 0.75 * before
    assert all(b <= a + 1e-6 for a, b in gap)


@pytest.mark.parametrize(
    ("pattern", "reached"),
    [("global", 3076), ("layer", 3076), ("2:4", 3040), ("block:4", 3040), ("rows", None)],
)
def test_every_pattern_in_stages(pattern: str, reached: int | None, model: DigitsNet, loader: Any) -> None:
    surgeon = Surgeon(model, loader, pattern=pattern, **QUICK)
    seen: list[dict[str, Tensor]] = []

    def check(_: object) -> None:
        for name, mask in surgeon.masks.items():
            assert not bool(model.get_parameter(name)[~mask].any())
            assert not seen or not bool((mask & ~seen[-1][name]).any())
        seen.append(surgeon.masks)

    steps = surgeon.staged([0.2, 0.5], check)
    assert steps == surgeon.history
    assert len(seen) == 2
    assert steps[0].gamma == steps[1].gamma > 0
    if pattern == "rows":
        rows = [surgeon.masks[name].flatten(1) for name in surgeon.prunable]
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
    model = mlp()
    surgeon = Surgeon(model, inputs(), pattern="rows", samples=8)
    surgeon.prune(0.5)
    assert "output layer" in str(surgeon.reasons["4.weight"])
    gone = [~surgeon.masks[f"{i}.weight"].any(1) for i in (0, 2)]
    assert int(torch.cat(gone).sum()) == 10
    for i, rows in zip((0, 2), gone, strict=True):
        assert torch.equal(model[i].bias == 0, rows)
        assert torch.equal(surgeon.masks[f"{i}.bias"], ~rows)
    included = Surgeon(mlp(), inputs(), pattern="rows", include=[r"4\.weight"])
    assert included.prunable == ["4.weight"]


def test_the_output_layer_is_the_one_that_is_called_last() -> None:
    class HeadFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.norm, self.body = nn.Linear(6, 3), nn.BatchNorm1d(6), nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.norm(self.body(x)))
            return y

    model = HeadFirst().train()
    surgeon = Surgeon(model, [torch.randn(8, 4)], method="magnitude", pattern="rows")
    assert surgeon.prunable == ["body.weight"]
    assert "output layer" in str(surgeon.reasons["head.weight"])
    assert model.norm.num_batches_tracked == 0
    assert not model.head._forward_hooks
    empty = Surgeon(model, [], method="magnitude", pattern="rows")  # no data: as registered
    assert empty.prunable == ["head.weight"]


def test_rows_of_unequal_length_are_counted_as_rows() -> None:
    """Ten long rows go first: most of the weights, but a quarter of the rows, so that there is more to go."""
    model = nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 10), nn.ReLU(), nn.Linear(10, 3))
    nn.init.normal_(model[2].weight, std=1e-3)
    surgeon = Surgeon(model, [torch.randn(8, 4)], method="magnitude", pattern="rows")
    first, second = surgeon.staged([0.2, 0.5])
    assert (first.sparsity, second.sparsity) == (0.2, 0.5)
    assert first.removed == 8 * 30
    assert first.removed + second.removed == sum(int((~surgeon.masks[f"{i}.weight"]).sum()) for i in (0, 2))


def test_no_layer_is_emptied(model: DigitsNet, loader: Any) -> None:
    """Each weight keeps its share of the mean density, at any sparsity."""
    surgeon = Surgeon(model, loader, method="magnitude", floor=0.5)
    for sparsity in (0.94, 0.99):
        surgeon.prune(sparsity)
        for name, mask in surgeon.masks.items():
            assert int(mask.sum()) >= math.ceil(0.5 * (1 - sparsity) * WEIGHTS[name])


def test_revived_weights_are_removed_again(model: DigitsNet, loader: Any) -> None:
    surgeon = Surgeon(model, loader, **QUICK)
    surgeon.prune(0.4)
    old = surgeon.masks
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    surgeon.prune(0.6)
    assert all(not bool(model.get_parameter(name)[~mask].any()) for name, mask in old.items())


def test_a_learned_q_is_refined_from_stage_to_stage(model: DigitsNet, loader: Any) -> None:
    surgeon = Surgeon(model, loader, **QUICK)
    seen = []
    surgeon.staged([0.2, 0.4, 0.6], lambda _: seen.append((surgeon.inverse, surgeon.learning.steps)))
    assert seen[0][0] is seen[1][0] is seen[2][0]
    assert [steps for _, steps in seen] == [4, 6, 8]


def test_cuts_are_stages_within_one_step(model: DigitsNet, loader: Any) -> None:
    other = copy.deepcopy(model)
    surgeon, by_hand = (Surgeon(m, loader, measure_batches=0, **QUICK) for m in (model, other))
    step = surgeon.prune(0.875, cuts=3, refine=2)
    first = by_hand.prune(0.5)
    rest = [by_hand.prune(sparsity, inverse=by_hand.refine(2)) for sparsity in (0.75, 0.875)]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert (step.target, step.sparsity) == (0.875, rest[-1].sparsity)
    assert step.removed == first.removed + sum(s.removed for s in rest)
    assert step.predicted == pytest.approx(first.predicted + sum(s.predicted for s in rest))
    assert len(surgeon.history) == 1


def test_a_q_that_is_not_learned_cuts_once(model: DigitsNet, loader: Any) -> None:
    other = copy.deepcopy(model)
    for m, cuts in ((model, 1), (other, 3)):
        Surgeon(m, loader, method="diagonal", **QUICK).prune(0.8, cuts=cuts)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_measured_loss_is_the_divergence_from_the_model_before(model: DigitsNet, loader: Any) -> None:
    with torch.no_grad():
        before = [model(x).log_softmax(1) for x in loader[:2]]
    step = Surgeon(model, loader, **QUICK).prune(0.7)
    with torch.no_grad():
        after = [model(x).log_softmax(1) for x in loader[:2]]
    pairs = zip(after, before, strict=True)
    kl = sum(functional.kl_div(f, g, log_target=True, reduction="batchmean") for f, g in pairs) / 2
    assert step.measured == pytest.approx(float(kl), rel=1e-4)
    assert Surgeon(model, loader, measure_batches=0, **QUICK).prune(0.8).measured is None


def test_a_bad_prediction_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    looks.warn_about_prediction(0.9, predicted=0.01, measured=1.0)
    assert "the loss increase was 1, and Q had predicted 0.01" in caplog.text
    caplog.clear()
    looks.warn_about_prediction(0.9, predicted=1.0, measured=0.01)
    assert "the loss increase was 0.01, and Q had predicted 1: better than feared" in caplog.text
    caplog.clear()
    for predicted, measured in ((0.01, 0.03), (0.001, 0.01), (0.01, None)):
        looks.warn_about_prediction(0.9, predicted, measured)
    assert not caplog.text


# --- accuracy -----------------------------------------------------------------------------------------------


def test_learned_q_in_stages_beats_magnitude(trained: DigitsNet, loader: Any) -> None:
    magnitude, learned = copy.deepcopy(trained), copy.deepcopy(trained)
    Surgeon(magnitude, loader, method="magnitude").prune(0.8)
    Surgeon(learned, loader, samples=128).staged([0.4, 0.65, 0.8])
    assert accuracy(trained) > 0.95
    assert accuracy(learned) > accuracy(trained) - 0.04
    assert accuracy(learned) > accuracy(magnitude) + 0.05


# --- what must not change -----------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_only_weights_their_biases_and_statistics_change(
    training: bool, model: DigitsNet, loader: Any
) -> None:
    model.train(training)
    model.bn1.eval()
    model.conv2.weight.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    before = state(model)
    surgeon = Surgeon(model, loader, **QUICK)
    surgeon.prune(0.5)
    assert [module.training for module in model.modules()] == modes
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    norms = ("bn2", "bn3") if training else ("bn1", "bn2", "bn3")
    statistics = {f"{n}.{p}" for n in norms for p in ("running_mean", "running_var", "num_batches_tracked")}
    assert changed == {"conv1.weight", "conv3.weight", "linear.weight", "linear.bias"} | statistics
    assert surgeon.reasons["conv2.weight"] == "frozen"


def test_batchnorm_refresh_can_be_left_out(model: DigitsNet, loader: Any) -> None:
    before = model.bn3.running_mean.clone()
    Surgeon(model, loader, method="magnitude", batchnorm_batches=0).prune(0.5)
    assert torch.equal(model.bn3.running_mean, before)


def test_result_loads_into_a_plain_copy(model: DigitsNet, loader: Any) -> None:
    Surgeon(model, loader, **QUICK).prune(0.5)
    plain = DigitsNet(8).float().eval()
    plain.load_state_dict(model.state_dict())
    assert type(model) is DigitsNet
    assert torch.equal(plain(loader[0]), model(loader[0]))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_same_seed_same_result(trained: DigitsNet, loader: Any) -> None:
    results = []
    for seed in (1, 1, 2):
        model, generator = copy.deepcopy(trained), torch.Generator().manual_seed(seed)
        surgeon = Surgeon(model, loader, generator=generator, **QUICK)
        surgeon.staged([0.3, 0.6])
        results.append((state(model), surgeon.masks, [step.predicted for step in surgeon.history]))
    assert identical(results[0], results[1])
    assert not identical(results[0], results[2])
