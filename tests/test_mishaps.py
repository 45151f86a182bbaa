"""What goes wrong in a user's hands: it is told, early, and nothing is pretended."""

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fishleg.curvature.outputs import AllIgnoredError
from fishleg.inverse.auxiliary import Auxiliary
from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.pruning import api
from fishleg.pruning.attach import attach
from fishleg.pruning.gradual import Gradual, gradual
from fishleg.pruning.keep_zeros import zero_removed
from fishleg.pruning.masks import apply_masks
from fishleg.pruning.options import PruningOptions
from fishleg.pruning.surgeon import Surgeon
from fishleg.pruning.tuning import FineTuningOptions
from fishleg.runtime.batchnorm import refresh_batchnorm

QUICK: dict[str, Any] = {"samples": 8, "sub_batch": 8}
Batch = tuple[Tensor, Tensor]


def mlp(*, dropout: float = 0.0) -> nn.Sequential:
    layers = [nn.Linear(6, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4)]
    torch.manual_seed(0)
    for layer in layers:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    return nn.Sequential(*layers)


def examples(count: int = 6) -> list[Batch]:
    inputs = torch.randn(count, 32, 6, generator=torch.Generator().manual_seed(0))
    return [(x, x[:, :4].argmax(1)) for x in inputs]


def test_masked_weights_are_zero_even_where_they_were_nan() -> None:
    layer = nn.Linear(3, 2)
    masks = {"weight": torch.tensor([[True, False, True], [False, True, True]])}
    for enforce in (
        lambda: apply_masks(layer, masks),
        lambda: zero_removed(torch.optim.SGD([layer.weight], lr=1), layer, masks),
    ):
        with torch.no_grad():
            layer.weight.fill_(math.nan)
        enforce()
        assert torch.equal(layer.weight == 0, ~masks["weight"])


def test_training_that_diverges_is_an_error_not_a_result() -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
    data = [(x, 10 * x[:, :4]) for x, _ in examples()]
    surgeon = Surgeon(model, data, "gaussian", method="magnitude", **QUICK)
    told = r"loss is not finite \((inf|nan)\) at step \d+ of 30 after sparsity 0\.5"
    with pytest.raises(ValueError, match=told):
        gradual(surgeon, [0.5], tuning=FineTuningOptions(optimizer="sgd", lr=1e6, steps=30))


def test_the_last_step_may_be_the_one_that_diverges() -> None:
    run = Gradual(
        Surgeon(mlp(), examples(), method="magnitude", **QUICK),
        tuning=FineTuningOptions(optimizer="sgd", steps=2),
    )
    run.prune(0.5)
    steps = run.train()
    next(steps)
    next(steps)
    with torch.no_grad():
        run.surgeon.model[0].bias.fill_(math.inf)
    with pytest.raises(ValueError, match=r"training has made '0\.bias' infinite or NaN"):
        next(steps)


def test_batches_without_a_label_that_counts_are_left_out() -> None:
    """They say nothing: neither the weights nor the pace may move."""
    data = examples()
    empty = (data[0][0], torch.full((32,), -100))
    plain, mixed = ([*data], [x for batch in data for x in (empty, batch)])
    ends = []
    for loader in (plain, mixed):
        surgeon = Surgeon(mlp(), data, method="magnitude", **QUICK)
        run = Gradual(surgeon, loader, FineTuningOptions(optimizer="sgd", steps=5))
        run.prune(0.5)
        losses = list(run.train())
        assert len(losses) == 5
        ends.append(losses)
    assert ends[0] == ends[1]
    run = Gradual(Surgeon(mlp(), data, **QUICK), mixed, FineTuningOptions(steps=5, refine=1, cuts=1))
    expected = Gradual(Surgeon(mlp(), data, **QUICK), plain, FineTuningOptions(steps=3))
    assert run.given == pytest.approx(expected.given, rel=0.3)
    run.prune(0.5)
    assert all(map(math.isfinite, run.train()))
    assert all(map(math.isfinite, run.recent))
    nothing = Gradual(Surgeon(mlp(), data, **QUICK), [empty], FineTuningOptions(optimizer="sgd", steps=5))
    nothing.prune(0.5)
    with pytest.raises(ValueError, match="1001 training batches in a row have no label that counts"):
        list(nothing.train())


def test_q_is_learned_from_the_batches_that_count() -> None:
    model, data = mlp(), examples()
    empty = (data[0][0], torch.full((32,), -100))
    learning = Auxiliary(model, InverseFisher.from_model(model), "categorical")
    seen: list[Any] = []
    learning.learn([empty, *data], steps=6, callback=seen.append, min_steps=6)
    assert len(seen) == 5
    with pytest.raises(AllIgnoredError, match="none of 3 batches has a label that counts"):
        Auxiliary(model, InverseFisher.from_model(model), "categorical").learn([empty], steps=3)


def test_the_given_loss_is_that_of_a_model_with_dropout() -> None:
    """The training loss is, and the pace follows the difference of the two."""
    model = mlp(dropout=0.9)
    with torch.no_grad():
        model[3].weight.mul_(20)
        inputs = [torch.randn(2000, 6) for _ in range(3)]
        data = [(x, model.eval()(x).argmax(1)) for x in inputs]
        model.train()
        with_dropout = sum(float(nn.functional.cross_entropy(model(x), y)) for x, y in data) / 3
        without = sum(float(nn.functional.cross_entropy(model.eval()(x), y)) for x, y in data) / 3
    assert with_dropout > 1.1 * without
    model.train()
    random = torch.get_rng_state()
    run = Gradual(Surgeon(model, data, **QUICK), data, FineTuningOptions(steps=3))
    assert run.given == pytest.approx(with_dropout, rel=0.03)
    assert torch.equal(torch.get_rng_state(), random)


def test_the_pace_is_in_units_of_the_given_loss_where_that_is_large() -> None:
    """Targets a thousand times as large make losses, and the KL of a good step, a million times as large."""
    run = Gradual(
        Surgeon(mlp(), examples(), **QUICK),
        examples(),
        FineTuningOptions(steps=4, max_kl=0.1, step_damping=5),
    )
    run._floor, paces = 0.0, []
    for scale in (1.0, 1e6):
        run.given, run.recent = 2.0 * scale, []
        paces.append(run._pace(2.6 * scale))
    assert paces[1][0] == pytest.approx(1e6 * paces[0][0])
    assert paces[1][1] == pytest.approx(paces[0][1])


def test_most_of_a_model_left_out_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(6, 32, batch_first=True), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x.unsqueeze(1))[0][:, -1])

    data = [x for x, _ in examples()]
    with caplog.at_level(logging.WARNING):
        Surgeon(Tagger(), data)
    assert "only 2.4 % of the model's" in caplog.text
    assert "lstm.weight_hh_l0 (not the weight of a linear layer, convolution or embedding" in caplog.text
    caplog.clear()
    Surgeon(mlp(), data)
    Surgeon(mlp(), data, include=["5.weight"])  # as one likes
    assert not caplog.text


def test_a_schedule_that_cannot_be_met_is_told_before_it_starts() -> None:
    targets = [0.2, 0.4, 0.6]
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    data = [(torch.randn(16, 8), torch.randint(4, (16,)))]
    surgeon = Surgeon(model, data, pattern="2:4", **QUICK)
    with pytest.raises(ValueError, match=r"sparsity of 0\.5 at most, got 0\.6"):
        gradual(surgeon, targets)
    with pytest.raises(ValueError, match=r"sparsity of 0\.5 at most, got 0\.6"):
        attach(surgeon, torch.optim.SGD(model.parameters(), lr=0.1), targets, every=1)
    with pytest.raises(ValueError, match=r"sparsity of 0\.5 at most, got 0\.6"):
        surgeon.staged(targets)
    assert not surgeon.history


def test_few_rows_and_many_stages() -> None:
    """Two stages may round to the same number of rows."""
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4))
    data = [x for x, _ in examples()]
    sparse = api.prune(model, data, 0.9, pattern="rows", progress=lambda _: None, **QUICK)
    assert int((sparse[0].weight != 0).any(1).sum()) == 1
    surgeon = Surgeon(model, data, **QUICK)
    surgeon.prune(0.5)
    with pytest.raises(ValueError, match=r"0\.5 is not above the present"):
        surgeon.prune(0.5)


def test_batchnorm_and_a_last_batch_of_one(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).eval()
    x = torch.randn(65, 6)
    assert refresh_batchnorm(model, list(x.split(32)), 3) == 1
    with torch.no_grad():
        expected = torch.stack([model[0](part).mean(0) for part in x[:64].split(32)]).mean(0)
    torch.testing.assert_close(model[1].running_mean, expected)
    refresh_batchnorm(model, [x[64:], *x[:64].split(32)], 3)  # it is left out wherever it comes
    torch.testing.assert_close(model[1].running_mean, expected)
    assert refresh_batchnorm(model, list(x[:2].split(1)), 3) == 0
    assert "need batches of more than one example" in caplog.text
    torch.testing.assert_close(model[1].running_mean, expected)  # as it was
    model[1].requires_grad_(False)
    assert refresh_batchnorm(model, list((x + 5).split(32)), 3) == 0  # frozen on purpose
    torch.testing.assert_close(model[1].running_mean, expected)


def test_a_pruned_model_is_not_taken_for_the_teacher() -> None:
    model, data = mlp(), examples()
    tuning = FineTuningOptions(distill=True, optimizer="sgd", steps=4)
    surgeon = Surgeon(model, data, method="magnitude", **QUICK)
    run = Gradual(surgeon, data, tuning)
    run.prune(0.5)
    next(run.train())
    late = Gradual(Surgeon(model, data, method="magnitude", **QUICK), data, tuning)
    with pytest.raises(ValueError, match="the teacher is another model"):
        late.load_state_dict(run.state_dict())
    early = Gradual(Surgeon(mlp(), data, method="magnitude", **QUICK), data, tuning)
    early.load_state_dict(run.state_dict())
    assert early.step == 1


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"exclude": "fc"}, "exclude must be a list of regular expressions, got 'fc'"),
        ({"include": "fc"}, "include must be a list of regular expressions, got 'fc'"),
        ({"samples": -5}, "samples must be >= 1 and whole, got -5"),
        ({"sub_batch": 0}, "sub_batch must be >= 1 and whole, got 0"),
        ({"block_size": 0}, "block_size must be >= 1 and whole, got 0"),
        ({"empirical": True}, "empirical=True needs one of diagonal, obert, mfac, got 'fishleg'"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        PruningOptions(**options)


def test_a_later_batch_without_targets_is_told() -> None:
    data = examples()
    run = Gradual(
        Surgeon(mlp(), data, method="magnitude", **QUICK),
        [data[0], data[1][0]],
        FineTuningOptions(optimizer="sgd", steps=4),
    )
    run.prune(0.5)
    with pytest.raises(ValueError, match="a training batch has no targets, others had"):
        list(run.train())
