"""What a finished run leaves behind: the model, plain, packed and cut down, and the report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fishleg.formats import checkpoint
from fishleg.formats.packed import pack
from fishleg.runs.directory import LOG, MODEL, PACKED, REPORT, SMALL
from fishleg.runs.errors import ToolError
from fishleg.runs.events import read_events
from fishleg.runs.weights import SHRUNK
from fishleg.runtime.batches import Forward
from fishleg.shrinking.shrink import shrink


def write_models(directory: Path, state: Mapping[str, Tensor], facts: Mapping[str, str]) -> dict[str, int]:
    """The state dict as it is, and packed, with facts about it; how many bytes each has."""
    unique = _unique(state)
    for name, tensors in ((MODEL, unique), (PACKED, pack(unique))):
        _write(directory / name, tensors, facts)
    plain = (directory / MODEL).stat().st_size  # zeros take as much room as other numbers
    return {"bytes_plain": plain, "bytes_dense": plain, "bytes_sparse": (directory / PACKED).stat().st_size}


def write_small(
    directory: Path, model: nn.Module, batch: Any, forward: Forward, facts: Mapping[str, str]
) -> tuple[nn.Module, dict[str, int]]:
    """The model without its zero rows, also as a file; how large it is."""
    small = shrink(model, batch, forward=forward)
    _write(directory / SMALL, _unique(small.state_dict()), {SHRUNK: "yes", **facts})
    size = (directory / SMALL).stat().st_size
    return small, {"bytes_small": size, "parameters_small": sum(p.numel() for p in small.parameters())}


def _unique(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, with memory of its own: safetensors refuses to share any."""
    return {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}


def _write(path: Path, tensors: dict[str, Tensor], facts: Mapping[str, str]) -> None:
    from safetensors.torch import save as to_bytes

    try:
        checkpoint.write_atomically(path, to_bytes(tensors, {"format": "pt", **facts}))
    except OSError as error:
        raise ToolError(f"cannot write {path}: {error.strerror or error}") from error


def write_report(directory: Path, record: Mapping[str, Any], recipe: str) -> None:
    """The HTML page, from the record and the log."""
    from fishleg.report import render_report

    text = render_report(dict(record), read_events(directory / LOG), recipe)
    checkpoint.write_atomically(directory / REPORT, text.encode())
