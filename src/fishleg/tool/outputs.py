"""What a finished run leaves behind: the model, plain and packed, and the report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fishleg import checkpoint
from fishleg.tool.directory import LOG, MODEL, PACKED, REPORT
from fishleg.tool.errors import ToolError
from fishleg.tool.events import read_events
from fishleg.tool.packing import pack


def write_models(directory: Path, state: Mapping[str, Tensor], facts: Mapping[str, str]) -> dict[str, int]:
    """The state dict as it is, and packed, with facts about it; how many bytes each has."""
    from safetensors.torch import save as to_bytes

    unique = {name: value.clone() for name, value in state.items()}  # safetensors refuses shared memory
    for name, tensors in ((MODEL, unique), (PACKED, pack(unique))):
        try:
            checkpoint.write_atomically(directory / name, to_bytes(tensors, {"format": "pt", **facts}))
        except OSError as error:
            raise ToolError(f"cannot write {directory / name}: {error.strerror or error}") from error
    plain = (directory / MODEL).stat().st_size  # zeros take as much room as other numbers
    return {"bytes_plain": plain, "bytes_dense": plain, "bytes_sparse": (directory / PACKED).stat().st_size}


def write_report(directory: Path, record: Mapping[str, Any], recipe: str) -> None:
    """The HTML page, from the record and the log."""
    from fishleg.report import render_report

    text = render_report(dict(record), read_events(directory / LOG), recipe)
    checkpoint.write_atomically(directory / REPORT, text.encode())
