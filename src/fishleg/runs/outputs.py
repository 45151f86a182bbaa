"""Write the results of a finished run: the sparse model in several forms, and the report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fishleg.formats.files import write_atomically
from fishleg.formats.packed import pack
from fishleg.formats.tensor_files import to_bytes
from fishleg.pruning import Surgeon, apply_masks
from fishleg.runs.describe import describe_layers
from fishleg.runs.directory import LOG, MODEL, PACKED, REPORT, SMALL
from fishleg.runs.errors import ToolError
from fishleg.runs.events import read_events
from fishleg.runs.log import RunLog
from fishleg.runs.macs import count_macs, kept_macs
from fishleg.runs.setup import Prepared
from fishleg.runs.speed import compare_speed
from fishleg.runs.weights import SHRUNK
from fishleg.runtime.batches import Forward
from fishleg.shrinking.shrink import shrink


def write_results(
    prepared: Prepared, surgeon: Surgeon, batch: Any, macs: Mapping[str, int], run_log: RunLog
) -> str:
    """Write the final model, its packed and shrunk forms and the report, and complete the record.

    Args:
        prepared: The recipe, and the dense model to compare with.
        surgeon: The sparse model and its masks.
        batch: A batch to call the models on; its values do not matter.
        macs: Multiply-adds by weight name.
        run_log: The log whose record is completed.

    Returns:
        One line with the results of the run.
    """
    model, record, directory = surgeon.model, run_log.record, run_log.directory
    recipe = prepared.recipe.to_toml()
    apply_masks(model, surgeon.masks)
    # equal runs give equal files, wherever they are written to
    facts = {"sparsity": f"{surgeon.sparsity:.6f}", "recipe": prepared.recipe.to_toml(leave_out=("out",))}
    record |= {
        **_write_models(directory, model.state_dict(), facts),
        "sparsity": surgeon.sparsity,
        "nonzero": sum(int((p != 0).sum()) for p in model.parameters()),
        "macs_sparse": kept_macs(macs, surgeon.masks),
    }
    fastest = model
    if surgeon.pattern.whole_rows:
        try:
            fastest, sizes = _write_small(directory, model, batch, prepared.forward, facts)
            zero_rows = sum(_zero_rows(fastest.get_parameter(name)) for name in surgeon.masks)
            record |= {**sizes, "zero_rows_small": zero_rows}
        except (ValueError, RuntimeError) as error:
            run_log.warn(f"{SMALL} is not written, removed rows stay in the model as zeros: {error}")
    record["speed"] = compare_speed(prepared.dense, fastest, batch, prepared.forward)
    record["layers"] = describe_layers(surgeon, macs)
    _write_report(directory, {**record, **run_log.summary("finished")}, recipe)
    return _message(prepared, record)


def _message(prepared: Prepared, record: Mapping[str, Any]) -> str:
    evaluator = prepared.evaluator
    dense, sparse = (evaluator.formatted(record[which]["metric"]) for which in ("dense", "sparse"))
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


def _write_models(directory: Path, state: Mapping[str, Tensor], facts: Mapping[str, str]) -> dict[str, int]:
    """Write the plain and the packed state dict with facts in their headers, and return their sizes.

    Returns:
        Bytes by entry of the record.
    """
    unique = _unique(state)
    for name, tensors in ((MODEL, unique), (PACKED, pack(unique))):
        _write(directory / name, tensors, facts)
    plain = (directory / MODEL).stat().st_size  # that of the dense model too: zeros are stored as numbers
    return {"bytes_plain": plain, "bytes_dense": plain, "bytes_sparse": (directory / PACKED).stat().st_size}


def _write_small(
    directory: Path, model: nn.Module, batch: Any, forward: Forward, facts: Mapping[str, str]
) -> tuple[nn.Module, dict[str, int]]:
    """Write the model without its zero rows.

    Returns:
        The smaller model, and its sizes by entry of the record.
    """
    small = shrink(model, batch, forward=forward)
    _write(directory / SMALL, _unique(small.state_dict()), {SHRUNK: "yes", **facts})
    return small, {
        "bytes_small": (directory / SMALL).stat().st_size,
        "parameters_small": sum(p.numel() for p in small.parameters()),
        "macs_small": sum(count_macs(small, batch, forward).values()),
    }


def _zero_rows(weight: Tensor) -> int:
    """Return the number of rows of a matrix or kernel that are zero."""
    return 0 if weight.dim() < 2 else int((weight.detach().flatten(1) == 0).all(1).sum())


def _unique(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU: safetensors does not allow tensors that share memory."""
    return {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}


def _write(path: Path, tensors: dict[str, Tensor], facts: Mapping[str, str]) -> None:
    try:
        write_atomically(path, to_bytes(tensors, {"format": "pt", **facts}, with_checksum=True))
    except OSError as error:
        raise ToolError(f"cannot write {path}: {error.strerror or error}") from error


def _write_report(directory: Path, record: Mapping[str, Any], recipe: str) -> None:
    """Write the HTML report from the record and the log."""
    from fishleg.report import render_report

    text = render_report(dict(record), read_events(directory / LOG), recipe, directory)
    write_atomically(directory / REPORT, text.encode())
