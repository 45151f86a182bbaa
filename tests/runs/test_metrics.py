"""Accuracy, loss and agreement."""

import pytest
import torch
from killing import loader, make_model
from small_runs import batches
from torch import nn

from fishleg import Categorical, runs
from fishleg.runs.errors import ToolError
from fishleg.runs.metrics import Evaluator, NonFiniteOutputs
from fishleg.runs.recipe import make_recipe
from fishleg.runs.sources import Data


def test_without_labels_agreement_is_measured(tmp_path):
    inputs = [x for x, _ in loader()]
    options = {"model": "mine", "samples": 16, "sub_batch": 8, "sparsity": 0.5, "stages": 2, "out": "run"}
    record = runs.start(make_recipe(options), model=make_model(), data=Data(inputs), base=tmp_path).execute()
    assert record["metric"] == "agreement"
    assert record["dense"] == {"metric": 1.0, "loss": None}


def test_evaluator_measures_what_it_says():
    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(3))
    x = torch.eye(3).repeat(2, 1)
    y = torch.tensor([0, 1, 2, 0, 1, 1])
    from fishleg import Gaussian

    accuracy = Evaluator([(x[:4], y[:4]), (x[4:], y[4:])], Categorical())
    assert accuracy(model).metric == pytest.approx(5 / 6)
    assert accuracy.formatted(5 / 6) == "83.33 %"
    squared = Evaluator([(x, x + 2)], Gaussian())
    assert (squared.name, squared.higher_is_better) == ("mse", False)
    assert squared(model).metric == pytest.approx(4)
    assert squared.drop(2.0, 2.2) == pytest.approx(0.1)
    custom = Evaluator([(x, y)], Categorical(), custom=lambda m, loader: 7)
    assert custom(model).metric == 7
    assert custom.drop(50, 49) == pytest.approx(0.02)  # relative: nobody knows its unit


@pytest.mark.parametrize("custom", [False, True])
def test_a_late_batch_with_nan_is_named(custom):
    data = batches()
    data[4][0][0, 0, 0, 0] = float("nan")

    def metric(model, loader):
        return sum(float(model(x).sum()) for x, _ in loader)

    evaluator = Evaluator(data, Categorical(), custom=metric if custom else None)
    with pytest.raises(ToolError, match="batch 5 of the data to evaluate on holds NaN in its inputs"):
        evaluator(make_model())


def test_infinities_are_told_where_they_reach_the_outputs():
    data = batches()
    data[3][0][0, 0, 0, 0] = float("inf")
    with pytest.raises(NonFiniteOutputs, match=r"batch 4 .* not finite \(NaN or Inf\); the batch holds Inf"):
        Evaluator(data, Categorical())(make_model())


class Masked(nn.Module):
    """Attention with a mask of −inf, which is how torch writes it."""

    def __init__(self):
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(4, 1, batch_first=True), nn.Linear(4, 3)

    def forward(self, x, mask):
        return self.last(self.attention(x, x, x, attn_mask=mask[0])[0].mean(1))


def test_minus_infinity_in_a_mask_is_fine():
    mask = torch.full((8, 5, 5), float("-inf")).triu(1)
    data = [{"x": torch.randn(8, 5, 4), "mask": mask, "labels": torch.zeros(8, dtype=torch.long)}]
    assert 0 <= Evaluator(data, Categorical())(Masked()).metric <= 1


def test_a_metric_of_ones_own_may_have_targets_with_nan():
    data = [(x, torch.full((8,), float("nan"))) for x, _ in batches()]
    assert (
        Evaluator(data, Categorical(), custom=lambda model, loader: len(list(loader)))(make_model()).metric
        == 6
    )


class NaNAtSix(nn.Module):
    """Outputs NaN where the first input is above a bound."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 3)

    def forward(self, x):
        x = x.flatten(1)
        return self.inner(x) + torch.where(x[:, :1] > 100, torch.nan, 0.0)


@pytest.mark.parametrize("custom", [False, True])
def test_late_outputs_that_are_not_finite_are_named(custom):
    data = batches()
    data[5][0][0, 0, 0, 0] = 1000.0

    def metric(model, loader):
        return sum(float(model(x).nan_to_num().sum()) for x, _ in loader)

    evaluator = Evaluator(data, Categorical(), custom=metric if custom else None)
    match = (
        "outputs hold NaN" if custom else "batch 6 of the data to evaluate on: the model's outputs are not"
    )
    with pytest.raises(NonFiniteOutputs, match=match):
        evaluator(NaNAtSix())


def test_a_late_batch_that_the_model_cannot_be_called_on_is_named():
    data = [*batches(), (torch.zeros(8, 1, 3, 3), torch.zeros(8, dtype=torch.long))]
    with pytest.raises(ToolError, match="batch 7 of the data to evaluate on: the model cannot be called"):
        Evaluator(data, Categorical())(make_model())


def test_progress_is_told_batch_by_batch():
    evaluator, heard = Evaluator(batches(), Categorical(), most_batches=4), []
    evaluator.on_batch = lambda done, total: heard.append((done, total))
    evaluator(make_model())
    assert heard == [(1, 4), (2, 4), (3, 4), (4, 4)]
