"""Reading batches from the user's loader: one pass, endless passes, and sub-batches of a given size."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fishleg.runtime.batch_errors import LoaderError, naming_the_batch, raise_loader_error
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
    if callable(loader) and not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise ValueError(f"{name} is a function or a class: pass what it returns, such as {name}()")
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


class BatchStream(Iterator[Any]):
    """Iterates over a loader, one pass after another, and knows the place of the batch that it drew last.

    Args:
        loader: The loader.
        name: What messages call it.
        endless: Whether one pass follows another; otherwise there is one.

    Attributes:
        place: The place of the batch that was drawn last, for error messages.

    Raises:
        LoaderError: During iteration, if the loader raises.
        ValueError: During iteration, if a pass yields no batch.
    """

    def __init__(self, loader: Iterable[Any], name: str = "the loader", *, endless: bool = True) -> None:
        self.loader, self.name, self.endless = loader, name, endless
        self._iterator: Iterator[Any] | None = None
        self._passes = 0  # passes started
        self._count = 0  # batches drawn in the present pass
        self._drawn = 0  # in all passes

    def __next__(self) -> Any:
        while True:
            batch, ended = self._draw()
            if not ended:
                return batch
            if not self.endless:
                raise StopIteration
            self._check_not_empty()
            self._iterator = None

    def _draw(self) -> tuple[Any, bool]:
        """Return the next batch of the present pass, and whether the pass has ended instead.

        Raises:
            LoaderError: The loader raised an exception.
        """
        try:
            if self._iterator is None:
                self._passes, self._count = self._passes + 1, 0
                self._iterator = iterate(self.loader)
            batch = next(self._iterator)
        except StopIteration:
            return None, True
        except LoaderError:
            raise
        except Exception as error:
            raise_loader_error(self.name, self._count + 1, self._passes, error)
        self._count, self._drawn = self._count + 1, self._drawn + 1
        return batch, False

    def _check_not_empty(self) -> None:
        if not self._count and self._passes > 1:
            raise ValueError(
                f"{self.name} is exhausted after one pass: it is an iterator; pass a DataLoader or a list"
            )
        if not self._count:
            raise ValueError(f"{self.name} is empty: it yielded no batch (or is an exhausted iterator)")

    @property
    def drawn(self) -> int:
        """How many batches were drawn in all passes."""
        return self._drawn

    @property
    def place(self) -> str:
        """The place of the batch that was drawn last."""
        drawn = getattr(self.loader, "drawn", None)  # a `Replayable` knows better after a restart
        batch, passes = drawn if isinstance(drawn, tuple) else (self._count, self._passes)
        return f"batch {batch} of pass {passes} of {self.name}"


class SubBatchStream(BatchStream):
    """Iterates over the sub-batches of a loader; see `BatchStream`.

    Args:
        loader: The loader.
        size: The number of examples in a sub-batch.
        name: What messages call the loader.
        endless: Whether one pass follows another; otherwise there is one.
    """

    def __init__(
        self, loader: Iterable[Any], size: int, name: str = "the loader", *, endless: bool = True
    ) -> None:
        super().__init__(loader, name, endless=endless)
        self.size = size
        self._parts: Iterator[Any] = iter(())
        self._peeked: list[Any] = []

    def __next__(self) -> Any:
        if self._peeked:
            return self._peeked.pop()
        while True:
            with naming_the_batch(self.place):
                part = next(self._parts, None)
            if part is not None:
                return part
            self._parts = _split(super().__next__(), self.size)

    def peek(self) -> Any:
        """Return the next sub-batch without going on; before the first one only."""
        part = next(self)
        self._peeked.append(part)
        return part


def cycle(loader: Iterable[Any], name: str = "the loader") -> BatchStream:
    """Iterate over a loader without end, one pass after another.

    Args:
        loader: The loader.
        name: What messages call it.

    Returns:
        An iterator over batches. It raises a ValueError if a pass yields no batch.
    """
    return BatchStream(loader, name)


def sub_batches(loader: Iterable[Any], size: int, name: str = "the loader") -> SubBatchStream:
    """Split the batches of a loader into sub-batches, without end.

    Args:
        loader: The loader.
        size: The number of examples in a sub-batch. A batch with fewer examples is used as a whole; examples
            that do not fill a sub-batch are left out.
        name: What messages call the loader.

    Returns:
        An iterator over sub-batches.
    """
    return SubBatchStream(loader, size, name)


def one_pass(loader: Iterable[Any], size: int, most: int, name: str = "the loader") -> list[Any]:
    """Return the sub-batches of one pass over a loader.

    Args:
        loader: The loader.
        size: The number of examples in a sub-batch, as in `sub_batches`.
        most: The largest number of sub-batches to return.
        name: What messages call the loader.

    Returns:
        The sub-batches, at least one.

    Raises:
        ValueError: If the loader yields no batch.
    """
    parts = list(islice(SubBatchStream(loader, size, name, endless=False), most))
    if not parts:
        raise ValueError(f"{name} is empty: it yielded no batch")
    return parts


def _split(batch: Any, size: int) -> Iterator[Any]:
    """Yield the complete sub-batches of one batch, or the batch itself if it is smaller than `size`."""
    total = batch_size(batch)
    for start in range(0, max(total - size, 0) + 1, size):
        yield slice_batch(batch, start, min(start + size, total))
