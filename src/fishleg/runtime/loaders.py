"""TODO."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fishleg.runtime.batches import batch_size, slice_batch


def check_loader(loader: Any, name: str = "loader") -> None:
    """An iterator can be read once only, which would show after hours; say so at once."""
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
    """A pass over a loader that disturbs no other one.

    A DataLoader with persistent workers has a single iterator and rewinds it: whoever is in the middle of a
    pass, a training loop say, would go on with the batches of the next one.
    """
    if isinstance(loader, DataLoader) and loader.persistent_workers:
        loader = copy.copy(loader)
        loader.__dict__["persistent_workers"] = False
    return iter(loader)


def cycle(loader: Iterable[Any]) -> Iterator[Any]:
    """Batches for ever, one epoch after another; an empty loader is an error."""
    epoch = 0
    while True:
        empty = True
        for batch in iterate(loader):
            empty = False
            yield batch
        if empty and epoch:
            raise ValueError("the loader ran out: it is an iterator; pass one that can be iterated again")
        if empty:
            raise ValueError("the loader is empty: it yielded no batch (or was read to its end before)")
        epoch += 1


def sub_batches(loader: Iterable[Any], size: int) -> Iterator[Any]:
    """Pieces of `size` examples from a loader, for ever."""
    for batch in cycle(loader):
        yield from _pieces(batch, size)


def one_pass(loader: Iterable[Any], size: int, most: int) -> list[Any]:
    """Pieces of `size` examples from one pass over a loader, `most` of them at the most."""
    found = list(islice((piece for batch in iterate(loader) for piece in _pieces(batch, size)), most))
    if not found:
        raise ValueError("the loader is empty: it yielded no batch")
    return found


def _pieces(batch: Any, size: int) -> Iterator[Any]:
    total = batch_size(batch)
    for start in range(0, max(total - size, 0) + 1, size):
        yield slice_batch(batch, start, min(start + size, total))
