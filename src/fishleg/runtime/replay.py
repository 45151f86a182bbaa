"""Replayable loaders: each batch depends only on the seed, the number of the pass and its place in it.

A run that was stopped in the middle of a pass can be resumed with identical results only if its data are
identical. So each pass over a loader starts from its own seed, and batches are drawn with random numbers
that nothing else uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fishleg.runtime.batch_errors import LoaderError, raise_loader_error
from fishleg.runtime.loaders import iterate
from fishleg.runtime.process_group import get_logger
from fishleg.runtime.random_state import RandomStream, loader_generators, loader_parts
from fishleg.runtime.tensors import digest

__all__ = ["LoaderError", "Replayable"]

logger = get_logger(__name__)


class Replayable:
    """A wrapper that makes any loader replayable; iterate over it as over the loader itself.

    Shuffling, workers and augmentation use the global random generators of torch, Python and NumPy, or a
    generator of the loader or its sampler. All of them are seeded for each pass. The global generators are
    restored between two batches. `set_epoch` of the loader, its samplers and its dataset is called with the
    number of the pass. A loader with another source of randomness cannot be replayed; resuming it then logs a
    warning.

    Args:
        loader: The loader.
        seed: The seed of the whole sequence of passes.
        name: What messages call the loader.

    Raises:
        LoaderError: During iteration, if the loader raises.

    Example:
        >>> stream = Replayable([1, 2, 3])
        >>> iterator = iter(stream)
        >>> next(iterator), next(iterator)
        (1, 2)
        >>> resumed = Replayable([1, 2, 3])
        >>> resumed.load_state_dict(stream.state_dict())
        >>> list(resumed)
        [3]
    """

    def __init__(self, loader: Iterable[Any], seed: int = 0, name: str = "the loader") -> None:
        self.loader, self.seed, self.name = loader, seed, name
        self.passes = 0  # number of passes started
        self.place = 0  # number of batches drawn in the current pass
        self._loaded: dict[str, Any] | None = None  # the loaded state, until the next pass continues from it
        self._last: Any = None  # the batch drawn last

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    @property
    def drawn(self) -> tuple[int, int]:
        """The place in its pass, and the pass, of the batch that was drawn last, each from 1."""
        return self.place, self.passes

    def __iter__(self) -> Iterator[Any]:
        loaded, self._loaded = self._loaded, None
        skip, expected = (loaded["place"], loaded["last"]) if loaded else (0, None)
        randomness = RandomStream(1_000_003 * self.seed + self.passes)
        with randomness.active():
            self._prepare_pass(self.passes)
            iterator = iterate(self.loader)
        self.passes, self.place = self.passes + 1, 0
        while True:
            with randomness.active():
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                except Exception as error:
                    raise_loader_error(self.name, self.place + 1, self.passes, error)
            self.place, self._last = self.place + 1, batch
            if self.place < skip:
                continue
            if self.place == skip:
                if expected is not None and digest(batch) != expected:
                    logger.warning(
                        "the loader is not reproducible: batch %d of pass %d differs from that before the "
                        "interruption. The result may differ from that of an uninterrupted run",
                        self.place, self.passes,
                    )  # fmt: skip
                continue
            yield batch
        if skip and self.place <= skip:  # the state was saved at the end of a pass: continue with the next
            yield from self

    def state_dict(self, *, unused: int = 0) -> dict[str, Any]:
        """Return the position in the sequence of batches.

        Args:
            unused: How many of the batches drawn last were not used yet. They are drawn again on resuming.

        Returns:
            The number of passes started, the place in the current pass, and a hash of the last batch.
        """
        if self._loaded is not None:
            return dict(self._loaded)
        last = None if self._last is None or unused else digest(self._last)
        return {"passes": self.passes, "place": self.place - unused, "last": last}

    def restart(self, passes: int = 0) -> None:
        """Begin anew: the next iteration is the pass of the given number.

        Args:
            passes: How many passes count as done.
        """
        self.passes, self.place, self._loaded, self._last = passes, 0, None, None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position: the next pass continues after the batch that was drawn last.

        Args:
            state: The result of `state_dict`.
        """
        started = state["passes"] > 0
        self.passes, self.place = state["passes"] - started, state["place"]
        self._loaded = dict(state) if started else None

    def _prepare_pass(self, number: int) -> None:
        """Set the epoch and seed the loader's own generators for a pass."""
        for part in [*loader_parts(self.loader), getattr(self.loader, "dataset", None)]:
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(number)
        for generator in loader_generators(self.loader):
            generator.manual_seed(1_000_003 * self.seed + number)
