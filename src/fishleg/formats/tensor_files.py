"""Safetensors files: equal content gives equal bytes, and every error of reading is a ValueError."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from fishleg.formats.files import check_regular
from fishleg.runtime.tensors import tensor_bytes

CHECKSUM = "fishleg_sha256"
"""A key in a file's header: the checksum of its tensors."""
_LARGEST_GROWTH = 64  # bytes of tensors by byte of the file: as in a packed matrix of zeros in float64
_ALWAYS_ALLOWED = 2**24  # bytes of tensors in any file


def to_bytes(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, with_checksum: bool = False
) -> bytes:
    """Return a safetensors file whose bytes depend on its content alone.

    Safetensors itself writes metadata in random order. Here they are sorted.

    Args:
        tensors: Contiguous tensors by name, which share no memory.
        metadata: Texts for the header.
        with_checksum: Whether the header gets a checksum of the tensors, which `read_tensors` compares.

    Returns:
        The content of the file.
    """
    from safetensors.torch import save

    if with_checksum:
        metadata = {**metadata, CHECKSUM: checksum(tensors)}
    plain = save(dict(tensors))
    end = 8 + int.from_bytes(plain[:8], "little")
    header = {"__metadata__": dict(sorted(metadata.items())), **json.loads(plain[8:end])}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    return b"".join([len(text).to_bytes(8, "little"), text, memoryview(plain)[end:]])


def checksum(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """Return the SHA-256 of tensors and of a text.

    Args:
        tensors: Tensors by name, in any order.
        text: The text.

    Returns:
        Hexadecimal digits.
    """
    sha256 = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha256.update(tensor_bytes(tensor))
    return sha256.hexdigest()


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file.

    Args:
        path: The file.

    Returns:
        Its tensors, on the CPU, and the texts of its header.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no safetensors file, or it is damaged. The message does not name the file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        check_regular(path)
        with safe_open(path, "pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, RuntimeError, TypeError, AttributeError, KeyError) as error:
        # the last three: an element type that this version of torch does not know
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error
    check_growth(tensors.values(), path)
    if CHECKSUM in metadata and metadata[CHECKSUM] != checksum(tensors):
        raise ValueError("it is damaged: its checksum does not match")
    return tensors, metadata


def check_growth(tensors: Iterable[Tensor], path: Path) -> None:
    """Check that tensors are not many times larger than the file that they were read from.

    A view may repeat one value any number of times, and a tensor without entries may have a huge size in
    another dimension, so that its rows need memory as soon as something is computed for each.

    Args:
        tensors: The tensors.
        path: The file.

    Raises:
        ValueError: They are too large. The message does not name the file.
    """
    claimed = sum(math.prod(max(1, size) for size in t.shape) * t.element_size() for t in tensors)
    size = path.stat().st_size
    if claimed > _LARGEST_GROWTH * size + _ALWAYS_ALLOWED:
        raise ValueError(f"it claims {claimed:,} bytes of tensors, the file has {size:,}")
