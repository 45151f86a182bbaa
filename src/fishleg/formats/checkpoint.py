"""Checkpoints: any nested state as one safetensors file, written atomically, with a checksum.

Tensors are the file's tensors; everything else is JSON in its header. Nothing is unpickled on loading, so a
file from elsewhere can hold wrong numbers but no code. A file that is truncated or was changed is detected,
and the one before it is used, loudly.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fishleg.runtime.tensors import tensor_bytes

logger = logging.getLogger(__name__)
FORMAT = "fishleg-1"
SUFFIX = ".ckpt"


class CheckpointError(ValueError):
    """A checkpoint cannot be written, or cannot be trusted."""


def save(path: Path, state: Any) -> None:
    """Write a nested state (mappings, lists, tuples, tensors, numbers, strings, None) or nothing at all."""
    from safetensors.torch import save as to_bytes

    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_encode(state, tensors))
    metadata = {"format": FORMAT, "structure": structure, "sha256": _checksum(tensors, structure)}
    try:
        write_atomically(path, to_bytes(tensors or {"": torch.zeros(0)}, metadata))
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


def load(path: Path) -> Any:
    """Read back what `save` wrote; CheckpointError where the file is not exactly that."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys() if name}  # noqa: SIM118
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}") from error
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a fishleg checkpoint (format {metadata.get('format')!r})")
    if _checksum(tensors, metadata.get("structure", "")) != metadata.get("sha256"):
        raise CheckpointError(f"{path} is damaged: its checksum does not match")
    return _decode(json.loads(metadata["structure"]), tensors)


class Store:
    """The checkpoints of one run: numbered files in a directory, the last few are kept."""

    def __init__(self, directory: Path, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep must be >= 1, got {keep}")
        self.directory, self.keep = directory, keep

    def paths(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.directory.glob(f"[0-9]*{SUFFIX}"))

    def save(self, state: Any, *, protect: Path | None = None) -> Path:
        """Write the next one, then let go of those beyond `keep` (never of `protect`)."""
        self.directory.mkdir(parents=True, exist_ok=True)
        paths = self.paths()
        number = int(paths[-1].stem) + 1 if paths else 0
        path = self.directory / f"{number:06d}{SUFFIX}"
        try:
            save(path, state)
        except CheckpointError as error:
            last = f"; the last good one is {paths[-1]}" if paths else ""
            raise CheckpointError(f"{error}{last}") from error
        for old in self.paths()[: -self.keep]:
            if old != protect:
                old.unlink()
        for leftover in self.directory.glob("*.partial"):
            leftover.unlink()
        return path

    def latest(self) -> tuple[Path, Any] | None:
        """The newest checkpoint that is whole; None where there is no file at all."""
        paths = self.paths()
        for path in reversed(paths):
            try:
                return path, load(path)
            except CheckpointError as error:
                logger.warning("%s. Going back to the one before it", error)
        if paths:
            raise CheckpointError(f"none of the {len(paths)} checkpoints in {self.directory} can be read")
        return None


def write_atomically(path: Path, data: bytes) -> None:
    """The whole file or nothing: a temporary file, forced to disk, renamed over the old one."""
    temporary = path.with_name(f"{path.name}.partial")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # the rename itself; not every file system can do this
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_json(path: Path, value: Any) -> None:
    """A JSON file, whole or not at all; a list of plain values takes one line."""
    text = json.dumps(value, indent=1)
    # no string holds a raw line break, so only the layout is touched
    text = re.sub(r"\[\n[^\[\]{}]*\n *\]", lambda found: re.sub(r"\n *", " ", found[0]), text)
    write_atomically(path, f"{text}\n".encode())


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The JSON form; tensors are put aside under a number."""
    again: Callable[[Any], Any] = lambda item: _encode(item, tensors)  # noqa: E731
    if isinstance(value, Tensor):
        key = str(len(tensors))
        tensors[key] = value.detach().cpu().contiguous().clone()
        return {"$tensor": key}
    if isinstance(value, dict):
        return {"$dict": [[again(key), again(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"$tuple": [again(item) for item in value]}
    if isinstance(value, list):
        return [again(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"cannot save a {type(value).__name__}: only tensors, numbers, strings, containers")


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    again: Callable[[Any], Any] = lambda item: _decode(item, tensors)  # noqa: E731
    if isinstance(value, list):
        return [again(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "$tensor":
        return tensors[content]
    if kind == "$tuple":
        return tuple(again(item) for item in content)
    return {again(key): again(item) for key, item in content}


def _checksum(tensors: dict[str, Tensor], structure: str) -> str:
    found = hashlib.sha256(structure.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor_bytes(tensor))
    return found.hexdigest()
