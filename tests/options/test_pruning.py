"""Options of the pruning and of the learning of Q."""

from typing import Any

import pytest

from fishleg import AuxiliaryOptions, PruningOptions, register_structure
from fishleg.inverse.operators import Diagonal
from fishleg.options import OptionError
from fishleg.options.declaration import check_options
from fishleg.options.names import STRUCTURES
from fishleg.pruning.patterns import NM


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "exact"}, "estimator must be one of auto, natural, trace, probe, got 'exact'"),
        ({"lr": 0.0}, "lr must be a number > 0, got 0.0"),
        ({"lr": float("nan")}, "lr must be a number > 0, got nan"),
        ({"betas": (0.9, 1.0)}, r"betas must be 2 numbers in \[0, 1\), got \[0.9, 1.0\]"),
        ({"groups": 0}, "groups must be a whole number >= 1, got 0"),
        ({"groups": 4, "sub_batch": 3}, "sub_batch must be >= groups = 4, got 3"),
        ({"sub_batch": 0}, "sub_batch must be a whole number >= 1, got 0"),
        ({"warm_start": 1}, "warm_start must be a whole number >= 2, got 1"),
        ({"refine_every": 0}, "refine_every must be a whole number >= 1, got 0"),
        ({"eta_floor": 1.5}, r"eta_floor must be in \[0, 1\], got 1.5"),
        ({"probe": "uniform"}, "probe must be one of isotropic, gradient, got 'uniform'"),
        ({"smoothing": 1.0}, r"smoothing must be in \[0, 1\), got 1.0"),
    ],
)
def test_wrong_options_of_the_learning(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AuxiliaryOptions(**options)


def test_automatic_values_are_filled_in_where_none_are_given() -> None:
    automatic = AuxiliaryOptions()
    assert (automatic.groups, automatic.warm_start) == (None, None)
    assert automatic.resolved() == AuxiliaryOptions(groups=1, warm_start=60)
    assert automatic.resolved(groups=4, warm_start=9) == AuxiliaryOptions(groups=4, warm_start=9)
    given = AuxiliaryOptions(groups=2, warm_start=3)
    assert given.resolved(groups=4, warm_start=9) == given


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "fisher"}, "method must be one of fishleg, .*, got 'fisher'; did you mean 'fishleg'?"),
        ({"exclude": "fc"}, "exclude must be a list of texts, got 'fc'"),
        ({"include": "fc"}, "include must be a list of texts, got 'fc'"),
        ({"exclude": ["("]}, r"exclude: '\(' is no regular expression"),
        ({"floor": 1}, r"floor must be in \[0, 1\), got 1"),
        ({"samples": -5}, "samples must be a whole number >= 1, got -5"),
        ({"samples": 64.5}, "samples must be a whole number >= 1, got 64.5"),
        ({"sub_batch": 0}, "sub_batch must be a whole number >= 1, got 0"),
        ({"block_size": 0}, "block_size must be a whole number >= 1, got 0"),
        ({"mask_search_rounds": 12.0}, "mask_search_rounds must be a whole number >= 0, got 12.0"),
        ({"cuts": 0}, "cuts must be a whole number >= 1, got 0"),
        ({"cuts": True}, "cuts must be a whole number >= 1, got True"),
        ({"refine_steps": -1}, "refine_steps must be a whole number >= 0, got -1"),
        ({"gamma": 0}, "gamma must be a number > 0, got 0"),
        ({"pattern": 24}, "pattern must be a text, got 24"),
        ({"structure": "dense"}, "structure must be one of identity, .*, got 'dense'"),
    ],
)
def test_wrong_options_of_the_pruning(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PruningOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"empirical": True}, "needs one of the methods diagonal, obert, mfac, got 'fishleg'"),
        ({"empirical": True, "method": "kfac"}, "needs one of the methods diagonal, obert, mfac, got 'kfac'"),
        (
            {"batch_statistics": True, "batchnorm_batches": 0},
            "batch_statistics = true needs batchnorm_batches >= 1 .*got 0 and 'fishleg'",
        ),
        (
            {"batch_statistics": True, "method": "exact"},
            "batch_statistics = true needs .*a method other than exact, got 20 and 'exact'",
        ),
        (
            {"batch_statistics": True, "auxiliary": AuxiliaryOptions(vectorize=True)},
            "batch_statistics = true and vectorize = true exclude each other",
        ),
        (
            {"cuts": 2, "refine_steps": 0},
            "cuts > 1 needs refine_steps >= 1, got cuts = 2 and refine_steps = 0",
        ),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PruningOptions(**options)


def test_objects_where_names_are_expected() -> None:
    assert PruningOptions(pattern=NM(2, 4)).pattern == NM(2, 4)
    structure = PruningOptions(structure=lambda layer: Diagonal(layer.shape)).structure
    assert callable(structure)
    assert callable(AuxiliaryOptions(probe=lambda generator: {}).probe)


def test_a_registered_structure_is_accepted() -> None:
    register_structure("mine", lambda layer, **_: Diagonal(layer.shape))
    try:
        assert PruningOptions(structure="mine").structure == "mine"
    finally:
        STRUCTURES.remove("mine")


@pytest.mark.parametrize(
    ("options", "by_batch"),
    [
        ({}, True),
        ({"batchnorm_batches": 0}, False),
        ({"batch_statistics": False}, False),
        ({"batch_statistics": True}, True),
    ],
)
def test_batch_statistics_by_default(options: dict[str, Any], by_batch: bool) -> None:
    assert PruningOptions(**options).learns_by_batch is by_batch


def test_option_objects_are_expected_where_options_are_nested() -> None:
    with pytest.raises(OptionError, match="auxiliary must be AuxiliaryOptions, got dict"):
        PruningOptions(auxiliary={"lr": 1.0})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="vectorize = true and batch_statistics = true exclude each other"):
        AuxiliaryOptions(vectorize=True, batch_statistics=True)
    with pytest.raises(OptionError, match="options must be PruningOptions or None, got dict"):
        check_options({}, PruningOptions, "options")
