"""Safetensors files: equal content gives equal bytes, and every error of reading is a ValueError."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from fishleg.formats.files import check_regular


def to_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return a safetensors file whose bytes depend on its content alone.

    Safetensors itself writes metadata in random order. Here they are sorted.

    Args:
        tensors: Contiguous tensors by name, which share no memory.
        metadata: Texts for the header.

    Returns:
        The content of the file.
    """
    from safetensors.torch import save

    plain = save(dict(tensors))
    end = 8 + int.from_bytes(plain[:8], "little")
    header = {"__metadata__": dict(sorted(metadata.items())), **json.loads(plain[8:end])}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    return b"".join([len(text).to_bytes(8, "little"), text, memoryview(plain)[end:]])


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
    return tensors, metadata
