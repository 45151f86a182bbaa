"""Loaders that can be replayed: which batch comes next depends on (seed, pass, place) alone.

A run that is stopped in the middle of an epoch can only go on bit for bit if the data do. So each pass over
a loader starts from a seed of its own, and drawing a batch uses random numbers that nothing else uses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from fishleg.runtime.loaders import iterate
from fishleg.runtime.random_state import _generators, _parts, _Randomness
from fishleg.runtime.tensors import digest

logger = logging.getLogger(__name__)


class LoaderError(ValueError):
    """The user's loader raised something."""


class Replayable:
    """A loader of any kind, made repeatable; iterate over it as usual.

    Shuffling, workers and augmentation follow torch's, Python's and NumPy's global generators, or a generator
    of the loader or its sampler: all are seeded for each pass, and left as they were in between. What has a
    `set_epoch` is told the number of the pass. A loader with hidden randomness of its own cannot be replayed;
    going on after a restart then gives a warning.
    """

    def __init__(self, loader: Iterable[Any], seed: int = 0) -> None:
        self.loader, self.seed = loader, seed
        self.passes = 0  # started so far
        self.place = 0  # batches drawn in the present pass
        self._loaded: dict[str, Any] | None = None  # where to go on, until the next iteration does so
        self._last: Any = None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        loaded, self._loaded = self._loaded, None
        skip, expected = (loaded["place"], loaded["last"]) if loaded else (0, None)
        source = _Randomness(1_000_003 * self.seed + self.passes)
        with source.used():
            self._announce(self.passes)
            iterator = iterate(self.loader)
        self.passes, self.place = self.passes + 1, 0
        while True:
            with source.used():
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                except Exception as error:
                    told = (str(error).strip().splitlines() or [""])[-1]
                    raise LoaderError(
                        f"the loader failed at batch {self.place + 1} of pass {self.passes}: "
                        f"{type(error).__name__}: {told}"
                    ) from error
            self.place, self._last = self.place + 1, batch
            if self.place < skip:
                continue
            if self.place == skip:
                if expected is not None and digest(batch) != expected:
                    logger.warning(
                        "the loader did not repeat itself: batch %d of pass %d is not the one before the "
                        "interruption. The run goes on, but its result may differ from an undisturbed one",
                        self.place, self.passes,
                    )  # fmt: skip
                continue
            yield batch
        if skip and self.place <= skip:  # interrupted right at the end of a pass: go on with the next one
            yield from self

    def state_dict(self, *, unused: int = 0) -> dict[str, Any]:
        """Where the stream is; `unused` batches at the end were drawn and not looked at yet."""
        if self._loaded is not None:
            return dict(self._loaded)
        last = None if self._last is None or unused else digest(self._last)
        return {"passes": self.passes, "place": self.place - unused, "last": last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on after the batch that was drawn last."""
        started = state["passes"] > 0
        self.passes, self.place = state["passes"] - started, state["place"]
        self._loaded = dict(state) if started else None

    def _announce(self, number: int) -> None:
        for part in [*_parts(self.loader), getattr(self.loader, "dataset", None)]:
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(number)
        for generator in _generators(self.loader):
            generator.manual_seed(1_000_003 * self.seed + number)
