"""Loaders that can be replayed: which batch comes next depends on (seed, pass, place) alone.

A run that is stopped in the middle of an epoch can only go on bit for bit if the data do. So each pass over
a loader starts from a seed of its own, and drawing a batch uses random numbers that nothing else uses.
"""

from __future__ import annotations

import hashlib
import logging
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fishleg.batches import iterate, map_tensors

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


def _parts(loader: object) -> list[Any]:
    """A loader and what it draws by: its samplers, where it has some."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]


def _generators(loader: object) -> list[torch.Generator]:
    """The generators of its own that a loader draws by."""
    found = (getattr(part, "generator", None) for part in _parts(loader))
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


class _Randomness:
    """The global generators of torch, Python and NumPy, as a stream that is switched in and out."""

    def __init__(self, seed: int) -> None:
        with seeded(seed):
            self.state = random_state()

    @contextmanager
    def used(self) -> Iterator[None]:
        with _kept():
            set_random_state(self.state)
            try:
                yield
            finally:
                self.state = random_state()


@contextmanager
def seeded(seed: int, *loaders: object) -> Iterator[None]:
    """Within, the global generators start from this seed; afterwards they are as they were.

    So do generators that belong to one of the loaders, or to its sampler.
    """
    own = {id(g): g for loader in loaders for g in _generators(loader)}.values()
    states = [generator.get_state() for generator in own]
    with _kept():
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        for generator in own:
            generator.manual_seed(seed)
        try:
            yield
        finally:
            for generator, state in zip(own, states, strict=True):
                generator.set_state(state)


@contextmanager
def _kept() -> Iterator[None]:
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


def random_state() -> dict[str, Any]:
    """The states of the global generators."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        name, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((name, keys.numpy().astype("uint32"), *rest))


def tensor_bytes(tensor: torch.Tensor) -> bytes | memoryview:
    """The values of a tensor of any dtype, in row-major order."""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    try:
        return memoryview(flat.numpy())
    except RuntimeError:  # without NumPy
        return bytes(flat.tolist())


def digest(batch: Any) -> str:
    """A short hash of all tensors in a batch."""
    found = hashlib.sha256()

    def add(tensor: torch.Tensor) -> torch.Tensor:
        found.update(tensor_bytes(tensor))
        return tensor

    map_tensors(batch, add)
    return found.hexdigest()[:16]


__all__ = [
    "LoaderError",
    "Replayable",
    "digest",
    "random_state",
    "seeded",
    "set_random_state",
    "tensor_bytes",
]
