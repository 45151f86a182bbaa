"""Reading batches from the user's loader: one pass, endless passes, and sub-batches of a given size."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fishleg.runtime.batches import batch_size, slice_batch


def check_loader(loader: Any, name: str = "loader") -> None:
    """Check that an object can serve as a loader, before any time is spent on it.

    Args:
        loader: The object that should yield batches, again on every pass.
        name: The name of the argument, for the error message.

    Raises:
        ValueError: If the loader is a tensor or a map-style dataset, which yield single examples; if it is an
            iterator, which can be read only once; or if it is not iterable.
    """
    if isinstance(loader, Tensor) or (
        isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
    ):
        raise ValueError(
            f"{name} is a {type(loader).__name__}, which yields single examples: pass a DataLoader, or a "
            "list of batches"
        )
    if hasattr(loader, "__next__"):
        raise ValueError(f"{name} is an iterator, which can be read once only: pass a DataLoader or a list")
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise ValueError(f"{name} must yield batches, got {type(loader).__name__}")


def iterate(loader: Iterable[Any]) -> Iterator[Any]:
    """Start a pass over a loader that does not disturb other passes.

    A DataLoader with persistent workers has a single iterator and restarts it for each pass. A training loop
    in the middle of a pass would then continue with batches of the new one. So this pass uses a copy of the
    loader without persistent workers.

    Args:
        loader: The loader.

    Returns:
        An iterator over its batches.
    """
    if isinstance(loader, DataLoader) and loader.persistent_workers:
        loader = copy.copy(loader)
        loader.__dict__["persistent_workers"] = False
    return iter(loader)


def cycle(loader: Iterable[Any]) -> Iterator[Any]:
    """Iterate over a loader without end, one pass after another.

    Args:
        loader: The loader.

    Yields:
        Batches.

    Raises:
        ValueError: If a pass yields no batch.
    """
    epoch = 0
    while True:
        empty = True
        for batch in iterate(loader):
            empty = False
            yield batch
        if empty and epoch:
            raise ValueError(
                "the loader is exhausted after one pass: it is an iterator; pass a DataLoader or a list"
            )
        if empty:
            raise ValueError("the loader is empty: it yielded no batch (or is an exhausted iterator)")
        epoch += 1


def sub_batches(loader: Iterable[Any], size: int) -> Iterator[Any]:
    """Split the batches of a loader into sub-batches, without end.

    Args:
        loader: The loader.
        size: The number of examples in a sub-batch. A batch with fewer examples is used as a whole; examples
            that do not fill a sub-batch are left out.

    Yields:
        Sub-batches.
    """
    for batch in cycle(loader):
        yield from _split(batch, size)


def one_pass(loader: Iterable[Any], size: int, most: int) -> list[Any]:
    """Return the sub-batches of one pass over a loader.

    Args:
        loader: The loader.
        size: The number of examples in a sub-batch, as in `sub_batches`.
        most: The largest number of sub-batches to return.

    Returns:
        The sub-batches, at least one.

    Raises:
        ValueError: If the loader yields no batch.
    """
    parts = list(islice((part for batch in iterate(loader) for part in _split(batch, size)), most))
    if not parts:
        raise ValueError("the loader is empty: it yielded no batch")
    return parts


def _split(batch: Any, size: int) -> Iterator[Any]:
    """Yield the complete sub-batches of one batch, or the batch itself if it is smaller than `size`."""
    total = batch_size(batch)
    for start in range(0, max(total - size, 0) + 1, size):
        yield slice_batch(batch, start, min(start + size, total))
