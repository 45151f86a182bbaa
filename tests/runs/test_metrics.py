"""Accuracy, loss and agreement."""

import pytest
import torch
from killing import loader, make_model
from torch import nn

from fishleg import runs
from fishleg.runs.metrics import Evaluator
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
    from fishleg import Categorical, Gaussian

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
