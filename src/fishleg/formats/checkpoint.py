"""Checkpoints: any nested state as one safetensors file, written atomically, with a checksum.

Tensors are stored as the tensors of the file, and everything else as JSON in its header. Nothing is
unpickled on loading, so a file from an unknown source cannot execute code. A truncated or modified file is
detected by its checksum; the checkpoint before it is used then, with a warning.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fishleg.formats.files import remove_leftovers, write_atomically
from fishleg.formats.tensor_files import checksum, read_tensors, to_bytes

logger = logging.getLogger(__name__)
_FORMAT = "fishleg-1"  # the version of the file format
SUFFIX = ".ckpt"
"""The suffix of checkpoint files."""
_NUMBERED = re.compile(rf"([0-9]{{6}}|[1-9][0-9]{{6,}}){re.escape(SUFFIX)}")


class CheckpointError(ValueError):
    """A checkpoint cannot be written, cannot be read, or is damaged."""


def save(path: Path, state: Any, *, new: bool = False) -> None:
    """Write a nested state to a file; an existing file is replaced only if this succeeds.

    Args:
        path: The file.
        state: Dictionaries, lists, tuples, tensors, numbers, strings and None, nested in any way. An object
            of another type raises a TypeError.
        new: Whether the file must not exist yet.

    Raises:
        CheckpointError: If the file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_encode(state, tensors))
    metadata = {"format": _FORMAT, "structure": structure, "sha256": checksum(tensors, structure)}
    try:
        write_atomically(path, to_bytes(tensors or {"": torch.zeros(0)}, metadata), new=new)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


def load(path: Path) -> Any:
    """Read a state that was written by `save`.

    Args:
        path: The file.

    Returns:
        The state; its tensors are on the CPU.

    Raises:
        CheckpointError: If the file does not exist, is not a checkpoint, or is damaged.
    """
    try:
        tensors, metadata = read_tensors(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    tensors.pop("", None)
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is not a fishleg checkpoint (format {metadata.get('format')!r})")
    if checksum(tensors, metadata.get("structure", "")) != metadata.get("sha256"):
        raise CheckpointError(f"{path} is damaged: its checksum does not match")
    try:
        return _decode(json.loads(metadata["structure"]), tensors)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointError(f"{path} holds no state that this version can read: {reason}") from error


class Store:
    """The checkpoints of one run: numbered files in a directory, of which the newest are kept.

    Only files that this store wrote or was told about are read, replaced or deleted.

    Args:
        directory: The directory; it is created when the first checkpoint is saved.
        keep: How many checkpoints are kept.
        written: How many checkpoints the run has written so far, with the numbers below this one; others in
            the directory are not its own. Default: every checkpoint in the directory is.

    Raises:
        ValueError: If `keep` is less than 1.
    """

    def __init__(self, directory: Path, keep: int = 3, written: int | None = None) -> None:
        if keep < 1:
            raise ValueError(f"keep must be >= 1, got {keep}")
        self.directory, self.keep = directory, keep
        found = (path.name for path in directory.glob(f"*{SUFFIX}") if _NUMBERED.fullmatch(path.name))
        self.owned = sorted((n for n in found if written is None or _number(n) < written), key=_number)
        self._written = written or 0

    def paths(self) -> list[Path]:
        """Return the files of all checkpoints of the run, oldest first.

        Returns:
            Their paths.
        """
        paths = [self.directory / name for name in sorted(self.owned, key=_number)]
        return [path for path in paths if os.path.lexists(path)]

    def next_path(self) -> Path:
        """Return where the next checkpoint will be written.

        Returns:
            The path.
        """
        return self.directory / f"{self.next_number:06d}{SUFFIX}"

    @property
    def next_number(self) -> int:
        """The number of the next checkpoint."""
        return max(self._written, max(map(_number, self.owned), default=-1) + 1)

    def check_next(self) -> None:
        """Check that the name of the next checkpoint is free.

        Raises:
            CheckpointError: There is something of that name, which is not of this run.
        """
        if os.path.lexists(self.next_path()):
            raise CheckpointError(
                f"{self.next_path()} exists and was not written by this run: move it elsewhere"
            )

    def save(self, state: Any, *, protect: Path | None = None) -> Path:
        """Write the next checkpoint, then delete old ones and incomplete files of the run.

        Args:
            state: The state, as for `save`.
            protect: A checkpoint that is not deleted.

        Returns:
            The path of the new checkpoint.

        Raises:
            CheckpointError: If the file cannot be written, or exists and does not belong to the run.
        """
        self.check_next()
        path, before = self.next_path(), self.paths()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            save(path, state, new=True)
        except (CheckpointError, OSError) as error:
            last = f"; the last complete checkpoint is {before[-1]}" if before else ""
            raise CheckpointError(f"{error}{last}") from error
        self.owned.append(path.name)
        self._written = _number(path.name) + 1
        remove_leftovers(self.directory / name for name in self.owned)
        self._delete(self.paths()[: -self.keep], protect)
        return path

    def keep_last(self) -> None:
        """Delete all checkpoints but the newest."""
        self._delete(self.paths()[:-1])

    def _delete(self, paths: Iterable[Path], protect: Path | None = None) -> None:
        for path in paths:
            if path != protect:
                path.unlink()
                self.owned.remove(path.name)

    def latest(self, before: Path | None = None) -> tuple[Path, Any] | None:
        """Read the newest checkpoint that is not damaged. A damaged one is skipped with a warning.

        Args:
            before: Only checkpoints older than this one are read: its content has turned out not to fit.

        Returns:
            The path and the state; None if there is no checkpoint.

        Raises:
            CheckpointError: If there are checkpoints, but none of them can be read.
        """
        paths = self.paths()
        if before is not None:
            paths = [path for path in paths if _number(path.name) < _number(before.name)]
        for path in reversed(paths):
            try:
                return path, load(path)
            except CheckpointError as error:
                logger.warning("%s. The checkpoint before it is used", error)
        if paths:
            raise CheckpointError(f"none of the {len(paths)} checkpoints in {self.directory} can be read")
        return None


def _number(name: str) -> int:
    """Return the number of a checkpoint.

    Raises:
        ValueError: If the name is not that of a checkpoint.
    """
    if not _NUMBERED.fullmatch(name):
        raise ValueError(f"a checkpoint must be named like 000000{SUFFIX}, got {name!r}")
    return int(name.removesuffix(SUFFIX))


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the JSON form of a value; tensors are moved to `tensors` and replaced by their numbers.

    Raises:
        TypeError: If the value cannot be stored.
    """
    encode: Callable[[Any], Any] = lambda item: _encode(item, tensors)  # noqa: E731
    if isinstance(value, Tensor):
        key = str(len(tensors))
        tensors[key] = value.detach().cpu().contiguous().clone()
        return {"$tensor": key}
    if isinstance(value, dict):
        return {"$dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"$tuple": [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"cannot save a {type(value).__name__}: a checkpoint may hold tensors, numbers, strings, None, and "
        "dicts, lists and tuples of them"
    )


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the value of its JSON form; the inverse of `_encode`.

    Raises:
        ValueError: If it is not the JSON form of a value.
    """
    decode: Callable[[Any], Any] = lambda item: _decode(item, tensors)  # noqa: E731
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind, content = next(iter(value.items())) if len(value) == 1 else (None, None)
    if kind == "$tensor" and isinstance(content, str) and content in tensors:
        return tensors[content]
    if kind == "$tuple" and isinstance(content, list):
        return tuple(decode(item) for item in content)
    if kind == "$dict" and isinstance(content, list) and all(map(_is_pair, content)):
        return {decode(key): decode(item) for key, item in content}
    raise ValueError(f"an object with the keys {list(value)[:3]} is no encoded value")


def _is_pair(item: Any) -> bool:
    return isinstance(item, list) and len(item) == 2
