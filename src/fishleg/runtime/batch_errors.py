"""Errors that name the batch at which they were raised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class LoaderError(ValueError):
    """The user's loader raised an exception while a batch was drawn."""


def raise_loader_error(name: str, batch: int, passes: int, error: Exception) -> NoReturn:
    """Raise an error that names the batch at which a loader failed.

    Args:
        name: The loader, for instance `the training loader`.
        batch: The number of the batch in its pass, from 1.
        passes: The number of the pass, from 1.
        error: What the loader raised.

    Raises:
        LoaderError: Always. It has the type and the message of the original, too.
    """
    reason = error_text(error)
    kind = type(error).__name__
    # a worker process repeats the type in its message
    told = reason if reason.startswith(f"{kind}:") else f"{kind}: {reason}"
    raise LoaderError(f"{name} failed at batch {batch} of pass {passes}: {told}") from error


def error_text(error: BaseException) -> str:
    """Return the whole message of an error, without the traceback that a DataLoader's worker puts into it.

    Args:
        error: The error.

    Returns:
        Its message, which may have several lines. If it holds a traceback, what follows it.
    """
    text = str(error).strip()
    lines = text.splitlines()
    frames = [i for i, line in enumerate(lines) if line.startswith("  File ")]
    if "Traceback (most recent call last):" not in text or not frames:
        return text
    last = frames[-1] + 1
    while last < len(lines) and lines[last].startswith("    "):
        last += 1
    return "\n".join(lines[last:]).strip() or text


@contextmanager
def naming_the_batch(place: str) -> Iterator[None]:
    """Put the place of a batch in front of the message of every error that is raised in the block.

    The exception stays the same object, of the same type. Only one that composes its message of other
    things, as an OSError does, becomes the cause of a RuntimeError. A `LoaderError` names its batch already.

    Args:
        place: The place, for instance `batch 7 of pass 1 of the training loader`.

    Raises:
        LoaderError: The block has raised it.
        RuntimeError: The message of the exception could not be changed.
    """
    try:
        yield
    except LoaderError:
        raise
    except Exception as error:
        if str(error).startswith(f"at {place}"):
            raise
        message, old = f"at {place}: {_described(error)}", error.args
        error.args = (message,)
        if message in str(error) or isinstance(error, KeyError):  # whose text is the key in quotes
            raise
        error.args = old
        raise RuntimeError(message) from error


def _described(error: Exception) -> str:
    """Return the message of an error; its type is a part of it where the message alone says too little."""
    plain = isinstance(error, (ValueError, RuntimeError)) and str(error)
    return str(error) if plain else f"{type(error).__name__}: {error}"
