"""Checking that a smaller model computes the same outputs as the model it was made from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fishleg.runtime.batches import Forward, map_tensors
from fishleg.runtime.models import abbreviate, copy_model
from fishleg.runtime.random_state import seeded
from fishleg.shrinking.trace import all_outputs

_FIXED_SIZE = "the model does not run without its zero rows: its code contains a fixed size"


@torch.no_grad()
def check_same_outputs(
    model: nn.Module, small: nn.Module, batch: Any, forward: Forward, unused: list[str]
) -> None:
    """Check that two models have the same outputs, for a batch and for random numbers in its place.

    Copies of the models are compared in float64, in which only an error makes a difference. If the model
    does not run in float64, its own dtypes are used. Outputs with other values raise a RuntimeError.

    Args:
        model: The original model.
        small: The smaller model.
        batch: A batch of any format, on the device of the models.
        forward: `forward(model, batch) -> outputs`.
        unused: Parameters that the outputs do not use, for the error message.

    Raises:
        ValueError: If the smaller model does not run, or has outputs of another shape.
    """
    copies = [copy_model(each).eval() for each in (model, small)]
    try:
        compared = [copy_model(each).double() for each in copies]
        inputs = map_tensors(batch, lambda t: t.double() if t.is_floating_point() else t)
        _seeded_outputs(compared[0], inputs, forward)
    except (RuntimeError, TypeError, ValueError):  # the model has fixed dtypes
        compared, inputs = copies, batch
    for trial in [inputs, map_tensors(inputs, _random_like)]:
        expected = _seeded_outputs(compared[0], trial, forward)
        try:
            found = _seeded_outputs(compared[1], trial, forward)
        except Exception as error:
            also = f", or calls {abbreviate(unused)}, which the outputs do not use" if unused else ""
            raise ValueError(
                f"{_FIXED_SIZE} (for example x.view(-1, 512); use x.flatten(1)){also}: "
                f"{type(error).__name__}: {error}"
            ) from error
        for a, b in zip(expected, found, strict=True):
            _check_equal(a, b)


def _seeded_outputs(model: nn.Module, batch: Any, forward: Forward) -> list[Tensor]:
    """Return the outputs for a copy of the batch, which the model may overwrite, and a fixed random seed."""
    with seeded(0):
        return all_outputs(model, map_tensors(batch, Tensor.clone), forward)


def _random_like(tensor: Tensor) -> Tensor:
    """Return random numbers with the mean and scale of a tensor.

    A tensor that is not floating-point may hold token numbers, and is returned as it is.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    scale = tensor.std(correction=0).nan_to_num(1.0).clamp(min=1e-3)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return (tensor.mean() + scale * drawn.to(tensor)).to(tensor)


def _check_equal(expected: Tensor, found: Tensor) -> None:
    """Check that two outputs are equal up to rounding errors.

    Raises:
        ValueError: If their shapes differ.
        RuntimeError: If their values differ.
    """
    if found.shape != expected.shape:
        raise ValueError(f"{_FIXED_SIZE}: outputs have shape {list(found.shape)}, not {list(expected.shape)}")
    if not expected.is_floating_point():
        same, difference, tolerance = torch.equal(expected, found), torch.inf, 0.0
    else:
        finite = expected.isfinite()
        size = float(expected[finite].abs().max()) if bool(finite.any()) else 0.0
        is_double = expected.dtype == torch.float64
        tolerance = (1e-9 if is_double else torch.finfo(expected.dtype).eps ** 0.5) * size
        same = torch.allclose(found, expected, rtol=0, atol=tolerance, equal_nan=True)
        difference = float((found - expected)[finite].abs().max()) if bool(finite.any()) else torch.inf
    if not same:
        raise RuntimeError(
            f"the smaller model's outputs differ by {difference:.3g} (allowed: {tolerance:.3g}); the "
            "original model is unchanged. If it is deterministic in evaluation mode, please report a bug"
        )
