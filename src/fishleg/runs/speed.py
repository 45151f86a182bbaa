"""Compare the speed of the dense and the sparse model."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

from fishleg.runtime.batches import Forward, batch_size, move_batch


@torch.no_grad()
def compare_speed(
    dense: nn.Module, sparse: nn.Module, batch: Any, forward: Forward, seconds: float = 1.0
) -> dict[str, Any]:
    """Measure the time of a forward pass of both models.

    The models take turns, so that a change of the machine's load affects both. Both run dense kernels.

    Args:
        dense: The dense model, in evaluation mode.
        sparse: The sparse model; it is put into evaluation mode for the measurement.
        batch: The batch that both models are called on.
        forward: How a model is called on a batch.
        seconds: How long to measure; there are between 3 and 50 passes of each model.

    Returns:
        The medians `dense_ms` and `sparse_ms` in milliseconds, and in `what` how they were measured.
    """
    batch = move_batch(batch, next(sparse.parameters()).device)
    times: tuple[list[float], list[float]] = [], []
    modes = {module: module.training for module in sparse.modules()}
    sparse.eval()
    try:
        deadline = time.monotonic() + seconds
        while len(times[0]) < 3 or (time.monotonic() < deadline and len(times[0]) < 50):
            for model, found in zip((dense, sparse), times, strict=True):
                before = time.perf_counter()
                forward(model, batch)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                found.append(1000 * (time.perf_counter() - before))
    finally:
        for module, mode in modes.items():
            module.training = mode
    dense_ms, sparse_ms = (statistics.median(found[1:]) for found in times)  # the first pass is slower
    what = f"one batch of {batch_size(batch)}, dense kernels: zeros are multiplied like any other number"
    if sum(p.numel() for p in sparse.parameters()) < sum(p.numel() for p in dense.parameters()):
        what = f"one batch of {batch_size(batch)}, removed rows cut out"
    return {"dense_ms": dense_ms, "sparse_ms": sparse_ms, "what": what}
