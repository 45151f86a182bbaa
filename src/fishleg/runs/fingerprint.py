"""What a resumed run compares to see whether it goes on with the same data and the same model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fishleg.runs.setup import Prepared
from fishleg.runtime.batches import move_batch
from fishleg.runtime.modes import evaluation_mode
from fishleg.runtime.replay import Replayable
from fishleg.runtime.tensors import digest

_OUTPUTS = 256  # how many outputs of the dense model are kept, evenly spread
_ROUNDING = 256  # in units of the outputs' precision: threads and machines change the last bits only


@torch.no_grad()
def take_fingerprint(prepared: Prepared, training: Replayable | None) -> dict[str, Any]:
    """Return hashes of the first batch of each loader, and outputs of the dense model on one of them.

    The loaders are set back to their beginning.

    Args:
        prepared: What the recipe names.
        training: The training loader; None without training.

    Returns:
        Values for JSON.
    """
    evaluation = prepared.evaluator.loader
    assert isinstance(evaluation, Replayable)
    first = _first_batch(prepared.calibration)
    with evaluation_mode(prepared.dense):
        device = next(prepared.dense.parameters()).device
        f = prepared.forward(prepared.dense, move_batch(first, device))
    return {
        "calibration": digest(first),
        "training": None if training is None else digest(_first_batch(training)),
        "evaluation": digest(_first_batch(evaluation)),
        # a logit of −inf is allowed and has no place in JSON
        "outputs": [float(f"{v:.9g}") if math.isfinite(v) else str(v) for v in _some_values(f)],
        "precision": torch.finfo(f.dtype).eps,
    }


def _some_values(f: Tensor) -> list[float]:
    step = max(1, f.numel() // _OUTPUTS)
    values: list[float] = f.flatten()[::step][:_OUTPUTS].double().tolist()
    return values


def _first_batch(loader: Replayable) -> Any:
    loader.restart()
    batch = next(iter(loader), None)
    loader.restart()
    return batch


def differences(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for everything that has changed since a run began.

    Args:
        before: The fingerprint in the record of the run; None: it has none.
        now: The present one.

    Yields:
        One sentence each.
    """
    if not isinstance(before, Mapping):
        return
    end = "The result is not that of an uninterrupted run"
    for name in ("calibration", "training", "evaluation"):
        if before.get(name) != now[name]:
            yield (
                f"the first batch of the {name} data differs from that at the beginning of the run: the data "
                f"have changed, or the loader has randomness that cannot be seeded. {end}"
            )
    if before.get("calibration") == now["calibration"] and not _close(
        before.get("outputs"), now["outputs"], _ROUNDING * now["precision"]
    ):
        yield (
            "the dense model's outputs on the first batch differ from those at the beginning of the run: the "
            f"code of the model (or of forward) has changed. {end}"
        )


def _close(before: Any, now: list[float | str], tolerance: float) -> bool:
    if not isinstance(before, list) or len(before) != len(now):
        return False
    largest = max((abs(v) for v in before if isinstance(v, (int, float))), default=0.0)
    return all(_same(a, b, tolerance * largest) for a, b in zip(before, now, strict=True))


def _same(before: Any, now: float | str, tolerance: float) -> bool:
    if isinstance(before, (int, float)) and isinstance(now, (int, float)):
        return abs(before - now) <= tolerance
    return bool(before == now)
