"""From a recipe to a run: what is refused, and which defaults hold, before any work."""

import pytest
import torch
from killing import make_model
from torch import nn

from fishleg import runs
from fishleg.runs.recipe import make_recipe
from fishleg.runs.sensitivity import analyse
from fishleg.runs.sources import Data


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 600), nn.ReLU(), nn.Linear(600, 4))


def batches(width: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(16, width, generator=generator) for _ in range(2)]


def test_method_exact_is_refused_only_for_layers_that_are_pruned(tmp_path):
    options = {"model": "mine", "method": "exact", "sparsity": 0.5, "out": "run"}
    with pytest.raises(ValueError, match=r"at most 4096 parameters, '0' has 5400"):
        runs.start(make_recipe(options), model=wide(), data=Data(batches()), base=tmp_path)
    recipe = make_recipe({**options, "include": ["^2.weight$"]})
    run = runs.start(recipe, model=wide(), data=Data(batches()), base=tmp_path)
    assert run.surgeon.weights.names == ["2.weight"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("pattern", "expected"), [("1:16", 0.9375), ("2:4", 0.5), ("global", 0.9)])
def test_the_default_sparsity_is_the_same_everywhere(tmp_path, pattern, expected):
    options = {"model": "mine", "pattern": pattern, "out": "run", "mode": "one-shot"}
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    run = runs.start(make_recipe(options), model=model, data=Data(batches(32)), base=tmp_path)
    assert run.plan is not None
    assert run.plan.targets == [expected]


def test_a_sensitivity_is_judged_at_the_default_sparsity():
    found = analyse(
        make_recipe({"model": "killing:make_model", "data": "killing:loader", "pattern": "1:4", "samples": 8})
    )
    assert found.at == 0.75
    assert set(found.curves) <= set(dict(make_model().named_parameters()))
