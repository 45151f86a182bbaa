"""Checks of tensors."""

import pytest
import torch

from fishleg.runtime.tensors import first_non_finite


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_first_non_finite(bad: float) -> None:
    """Of any size and dtype, wherever the value is."""
    tensors = {"a": torch.randn(1000), "b": torch.zeros(3, 5, dtype=torch.bfloat16), "c": torch.ones(())}
    tensors |= {"d": torch.zeros(0), "e": torch.ones(7, dtype=torch.float32)}
    assert first_non_finite(tensors) is None
    assert first_non_finite({}) is None
    for name in ("e", "c", "b", "a"):
        tensors[name].view(-1)[-1] = bad
        assert first_non_finite(tensors) == name


def test_finite_values_whose_norm_overflows_are_finite():
    large = torch.full((512,), 6e4, dtype=torch.float16)
    assert first_non_finite({"a": torch.ones(2), "b": large}) is None
    large[3] = float("inf")
    assert first_non_finite({"a": torch.ones(2), "b": large}) == "b"
