"""The names that options accept are those that the other rooms know."""

import pytest
from torch import nn

from fishleg.curvature.likelihoods import as_likelihood
from fishleg.inverse import InverseFisher, find_method
from fishleg.options import names
from fishleg.pruning import schedule
from fishleg.pruning.patterns import as_pattern


def test_every_method_has_code() -> None:
    assert set(names.EMPIRICAL_METHODS) <= set(names.METHODS)
    for method in names.METHODS:
        assert callable(find_method(method).build)


@pytest.mark.parametrize("structure", list(names.STRUCTURES))
def test_every_structure_has_code(structure: str) -> None:
    InverseFisher.from_model(nn.Sequential(nn.Linear(3, 2)), structure)


def test_every_likelihood_pattern_and_schedule_has_code() -> None:
    for likelihood in names.LIKELIHOODS:
        as_likelihood(likelihood)
    for pattern in names.PATTERNS:
        as_pattern("block:4" if pattern == "block" else pattern)
    for kind in names.SCHEDULES:
        schedule(kind, 0.9, 3)
