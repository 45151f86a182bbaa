"""A resumed run notices other data and another model, and nothing else."""

import pytest
import torch
from killing import loader, make_model
from small_runs import batches, interrupt, warnings_of
from torch import nn

from fishleg import runs
from fishleg.runs.sources import Data


def test_a_resumed_run_with_everything_as_before_warns_of_nothing(tmp_path):
    directory = interrupt(tmp_path, make_model(), Data(loader(), None, loader()))
    record = runs.resume(directory, model=make_model(), data=Data(loader(), None, loader())).execute()
    assert warnings_of(record) == []


@pytest.mark.parametrize("which", ["calibration", "evaluation", "training"])
def test_other_data_are_noticed(tmp_path, which):
    gradual = {"mode": "gradual", "steps": 2} if which == "training" else {}
    good, other = batches(), [(x + 0.01, y) for x, y in batches()]
    directory = interrupt(tmp_path, make_model(), Data(good, good, good), **gradual)
    named = {"calibration": good, "train": good, "evaluation": good}
    named["train" if which == "training" else which] = other
    record = runs.resume(directory, model=make_model(), data=Data(**named)).execute()
    told = warnings_of(record)
    assert len(told) == 1
    assert f"the first batch of the {which} data differs" in told[0]
    assert any(which in line for line in (directory / "report.html").read_text().splitlines())


def test_another_activation_function_is_noticed(tmp_path):
    directory = interrupt(tmp_path, make_model(), Data(batches()))
    model = make_model()
    model[6] = nn.ReLU()
    record = runs.resume(directory, model=model, data=Data(batches())).execute()
    assert len(warnings_of(record)) == 1
    assert "the dense model's outputs on the first batch differ" in warnings_of(record)[0]


class MinusInfinity(nn.Module):
    """A class that can never be: its logit is −inf."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3))

    def forward(self, x):
        return torch.cat([self.inner(x), torch.full((len(x), 1), float("-inf"))], 1)


def test_a_model_with_a_logit_of_minus_infinity_can_be_resumed(tmp_path):
    directory = interrupt(tmp_path, MinusInfinity(), Data(batches()))
    record = runs.resume(directory, model=MinusInfinity(), data=Data(batches())).execute()
    assert record["status"] == "finished"
    assert warnings_of(record) == []


def test_a_slightly_different_activation_function_is_noticed(tmp_path):
    def with_gelu(how: str) -> nn.Module:
        model = make_model()
        model[6] = nn.GELU(how)
        return model

    directory = interrupt(tmp_path, with_gelu("none"), Data(batches()))
    record = runs.resume(directory, model=with_gelu("tanh"), data=Data(batches())).execute()
    assert "the dense model's outputs on the first batch differ" in warnings_of(record)[0]
