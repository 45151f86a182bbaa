"""TODO."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


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
