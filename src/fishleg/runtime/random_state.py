"""Saving, restoring and seeding the global random generators of torch, Python and NumPy."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def loader_parts(loader: object) -> list[Any]:
    """Return a loader and its samplers: the objects that may hold a random generator or an epoch number.

    Args:
        loader: The loader.

    Returns:
        The loader, its sampler, its batch sampler and the sampler of that; None for each missing one.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    return [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]


def loader_generators(loader: object) -> list[torch.Generator]:
    """Return the random generators that a loader or one of its samplers owns.

    Args:
        loader: The loader.

    Returns:
        The generators, each one once.
    """
    found = (getattr(part, "generator", None) for part in loader_parts(loader))
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


class RandomStream:
    """A separate stream of the global random generators of torch, Python and NumPy.

    Code inside of `active()` continues the stream. Code outside does not advance it.

    Args:
        seed: The seed from which the stream starts.
    """

    def __init__(self, seed: int) -> None:
        with seeded(seed):
            self.state = get_random_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use this stream as the global random state, and restore the previous state afterwards."""
        with _restored_afterwards():
            set_random_state(self.state)
            try:
                yield
            finally:
                self.state = get_random_state()


@contextmanager
def seeded(seed: int, *loaders: object) -> Iterator[None]:
    """Seed the global random generators, and restore their states afterwards.

    Args:
        seed: The seed.
        *loaders: Loaders whose own generators, and those of their samplers, are seeded and restored as well.

    Example:
        >>> with seeded(0):
        ...     first = torch.rand(2)
        >>> with seeded(0):
        ...     assert torch.equal(first, torch.rand(2))
    """
    own = {id(g): g for loader in loaders for g in loader_generators(loader)}.values()
    states = [generator.get_state() for generator in own]
    with _restored_afterwards():
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
def _restored_afterwards() -> Iterator[None]:
    """Restore the global random state at the end of the block."""
    before = get_random_state()
    try:
        yield
    finally:
        set_random_state(before)


def get_random_state() -> dict[str, Any]:
    """Return the states of the global random generators.

    Returns:
        The states of torch and Python, and those of CUDA and NumPy if they are in use. The values are
        tensors, numbers, strings and tuples, which a checkpoint can store.
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the states of the global random generators.

    Args:
        state: The result of `get_random_state`.
    """
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        name, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((name, keys.numpy().astype("uint32"), *rest))
