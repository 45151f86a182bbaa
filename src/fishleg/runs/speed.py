"""Measure how long models take, side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fishleg.runtime.batches import Forward, batch_size, move_batch
from fishleg.runtime.modes import evaluation_mode

_WARM_UP = 1  # passes that are not counted: the first is slower


def measure_times(
    calls: Mapping[str, Callable[[], Any]],
    seconds: float = 1.0,
    fewest: int = 3,
    most: int = 50,
    *,
    settle: int = 0,
) -> dict[str, list[float]]:
    """Measure the time of several calls.

    The calls take turns, so that a change of the machine's load affects all of them. A call that follows one
    of another kind finds the caches cold, which costs a small model 20 %: `settle` avoids that.

    Args:
        calls: The calls by name.
        seconds: How long to measure all of them together.
        fewest: The number of passes of each call, at least; the first is not counted.
        most: The number of passes, at most.
        settle: How often each call is made, without being counted, before each counted one.

    Returns:
        The times in milliseconds by name.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    deadline = time.monotonic() + seconds
    passes = 0
    while passes < fewest or (time.monotonic() < deadline and passes < most):
        for name, call in calls.items():
            for _ in range(settle):
                call()
            _wait_for_device()
            before = time.perf_counter()
            call()
            _wait_for_device()
            times[name].append(1000 * (time.perf_counter() - before))
        passes += 1
    return {name: found[_WARM_UP:] for name, found in times.items()}


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@torch.no_grad()
def compare_speed(
    dense: nn.Module, sparse: nn.Module, batch: Any, forward: Forward, seconds: float = 1.0
) -> dict[str, Any]:
    """Measure the time of a forward pass of both models, which run dense kernels.

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
    with evaluation_mode(sparse):
        calls = {"dense": lambda: forward(dense, batch), "sparse": lambda: forward(sparse, batch)}
        times = measure_times(calls, seconds)
    what = f"one batch of {batch_size(batch)}, dense kernels: zeros are multiplied like any other number"
    if sum(p.numel() for p in sparse.parameters()) < sum(p.numel() for p in dense.parameters()):
        what = f"one batch of {batch_size(batch)}, removed rows cut out"
    medians = {f"{name}_ms": statistics.median(found) for name, found in times.items()}
    return {**medians, "what": what}
