"""What a finished run writes: the model as it is, packed and cut down, and the report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fishleg.formats import checkpoint
from fishleg.formats.packed import pack
from fishleg.pruning import Surgeon, apply_masks
from fishleg.runs.describe import compare_speed, describe_layers
from fishleg.runs.directory import LOG, MODEL, PACKED, REPORT, SMALL
from fishleg.runs.errors import ToolError
from fishleg.runs.events import read_events
from fishleg.runs.log import RunLog
from fishleg.runs.macs import kept_macs
from fishleg.runs.setup import Prepared
from fishleg.runs.weights import SHRUNK
from fishleg.runtime.batches import Forward
from fishleg.shrinking.shrink import shrink


def write_results(
    prepared: Prepared, surgeon: Surgeon, batch: Any, macs: Mapping[str, int], run_log: RunLog
) -> str:
    """Write the final model, its packed and cut forms and the report; complete the record.

    Args:
        prepared: The recipe, and the dense model to compare with.
        surgeon: The sparse model and its masks.
        batch: A batch for what depends on shapes alone.
        macs: Multiply-adds by weight.
        run_log: The record that is completed.

    Returns:
        One line that says what the run has achieved.
    """
    model, record, directory = surgeon.model, run_log.record, run_log.directory
    recipe = prepared.recipe.to_toml()
    apply_masks(model, surgeon.masks)
    facts = {"sparsity": f"{surgeon.sparsity:.6f}", "recipe": recipe}
    record |= {
        **write_models(directory, model.state_dict(), facts),
        "sparsity": surgeon.sparsity,
        "nonzero": sum(int((p != 0).sum()) for p in model.parameters()),
        "macs_sparse": kept_macs(macs, surgeon.masks),
    }
    runs_as = model
    if surgeon.pattern.whole_rows:
        try:
            runs_as, cut = write_small(directory, model, batch, prepared.forward, facts)
            record |= cut
        except (ValueError, RuntimeError) as error:
            run_log.warn(f"no {SMALL}, removed rows stay in the model as zeros: {error}")
    record["speed"] = compare_speed(prepared.dense, runs_as, batch, prepared.forward)
    record["layers"] = describe_layers(surgeon, macs)
    write_report(directory, {**record, **run_log.summary("finished")}, recipe)
    return _message(prepared, record)


def _message(prepared: Prepared, record: Mapping[str, Any]) -> str:
    evaluator = prepared.evaluator
    dense, sparse = (evaluator.shown(record[which]["metric"]) for which in ("dense", "sparse"))
    small = ""
    if "bytes_small" in record:
        speed = record["speed"]["dense_ms"] / record["speed"]["sparse_ms"]
        small = (
            f"; {SMALL}, without the removed rows, {record['bytes_small']:,} bytes and "
            f"{speed:.2f} times as fast"
        )
    return (
        f"done: {evaluator.name} {dense} -> {sparse} at sparsity {record['sparsity']:.2%}; packed file "
        f"{record['bytes_sparse']:,} of {record['bytes_plain']:,} bytes{small}"
    )


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
