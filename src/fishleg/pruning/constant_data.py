"""Warn about calibration data that say nothing: examples that do not differ, and outputs that do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fishleg.runtime.batches import Forward, batch_size, default_forward, inputs_of
from fishleg.runtime.process_group import get_logger

logger = get_logger(__name__)
_ROUNDING = 8 * torch.finfo(torch.float32).eps  # relative: rows of one product may be rounded differently


def warn_about_constant_data(batches: Sequence[Any], outputs: Sequence[Tensor], forward: Forward) -> None:
    """Warn if all examples of some batches are alike, or if the model's outputs are alike for all of them.

    The KL is close to 0 then, whatever is removed. A single example is never judged.

    Args:
        batches: Some calibration batches.
        outputs: The model's outputs on them; may be empty.
        forward: How the model is called on a batch.
    """
    where = f"the first {len(batches)} batches" if len(batches) > 1 else "the first batch"
    if not _inputs_differ(batches, forward):
        if _all_zero(batches, forward):
            logger.warning(
                "every input in %s of the calibration loader is zero. The curvature of weights that read the "
                "inputs is zero there, and the KL is about 0 whatever is removed: accuracy may fall much. "
                "Look for a placeholder, a missing file or a wrong normalisation, and pass real examples",
                where,
            )
        else:
            logger.warning(
                "all examples in %s of the calibration loader are the same. Curvature, BatchNorm statistics "
                "and the KL are those of a single input, and a KL of about 0 says nothing about others: "
                "accuracy may fall much. Look for a loader that repeats one example, or preprocessing that "
                "erases the inputs, and pass varied examples",
                where,
            )
    elif not _outputs_differ(batches, outputs):
        logger.warning(
            "the model's outputs are the same for all examples in %s of the calibration loader, although the "
            "inputs differ: a dead network. A KL of about 0 says nothing then. Look whether the trained "
            "weights are loaded, at the scale of the inputs, at activations that are always zero, and at "
            "forward",
            where,
        )


def _inputs_differ(batches: Sequence[Any], forward: Forward) -> bool:
    """Return whether two examples differ, or whether that cannot be told. Usually the first two do."""
    first: list[Tensor] | None = None
    count = 0
    for batch in batches:
        leaves = list(_leaves(_inputs(batch, forward)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        try:
            size = batch_size(batch)
        except ValueError:
            return True
        by_example = [t for t in tensors if t.dim() and len(t) == size]
        if not by_example or len(tensors) < len(leaves):
            return True  # texts or other objects
        count += size
        for i in range(1, size):
            if any(not torch.equal(t[i], t[0]) for t in by_example):
                return True
        examples = [t[0] if t.dim() and len(t) == size else t for t in tensors]
        first = examples if first is None else first
        if len(first) != len(examples) or not all(map(torch.equal, first, examples)):
            return True
    return count < 2


def _all_zero(batches: Sequence[Any], forward: Forward) -> bool:
    leaves = [leaf for batch in batches for leaf in _leaves(_inputs(batch, forward))]
    return not any(bool(leaf.any()) for leaf in leaves if isinstance(leaf, Tensor))


def _outputs_differ(batches: Sequence[Any], outputs: Sequence[Tensor]) -> bool:
    """Return whether the outputs of two examples differ by more than rounding, or whether there is one."""
    rows: list[Tensor] = []
    for batch, f in zip(batches, outputs, strict=False):
        try:
            by_example = len(f) == batch_size(batch)
        except ValueError:
            by_example = False
        # where the first dimension is not the examples, all predictions must be alike
        rows.append(f.reshape(len(f), -1) if by_example or f.dim() < 2 else f.flatten(0, -2))
    if sum(map(len, rows)) < 2 or len({row.shape[1] for row in rows}) > 1:
        return True
    reference = rows[0][:1]
    scale = max(float(row.abs().max()) for row in rows)
    return any(not bool(((row - reference).abs() <= _ROUNDING * scale).all()) for row in rows)


def _inputs(batch: Any, forward: Forward) -> Any:
    """Return what the model reads of a batch; all of it for a forward of the user's own."""
    return inputs_of(batch) if forward is default_forward else batch


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what nested mappings, tuples and lists hold, without flags and other numbers."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    elif value is not None and not isinstance(value, (bool, int, float)):
        yield value
