"""Export a model to a file that other programs can load: .onnx, .pt2 or .safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.formats.new_file import check_new_file, write_new_file
from fishleg.formats.onnx import missing_packages, to_onnx
from fishleg.formats.packed import pack, unpack
from fishleg.formats.tensor_files import to_bytes
from fishleg.formats.traced import to_pt2, trace_model
from fishleg.runs.errors import ToolError
from fishleg.runs.load import load_run, load_small
from fishleg.runs.recipe import Recipe
from fishleg.runs.setup import Phases, Prepared, prepare, quiet
from fishleg.runs.weights import SHRUNK
from fishleg.runtime.batches import Forward, default_forward
from fishleg.runtime.random_state import seeded

SUFFIXES = (".onnx", ".pt2", ".safetensors")


@dataclass(frozen=True)
class Export:
    """What was written.

    Args:
        path: The file.
        bytes: Its size.
        model: Which model it holds: "model", "sparse", or "shrunk" (without the removed rows).
        inputs: The names of its inputs; a state dict has none.
        batch_sizes: The batch sizes at which its outputs were compared with those of the PyTorch model.
        difference: The largest difference of the outputs, relative to the largest output. For a state dict:
            of its values, which are the same bits.
        hint: Code that loads it.
    """

    path: str
    bytes: int
    model: str
    inputs: list[str]
    batch_sizes: list[int]
    difference: float
    hint: str

    def as_dict(self) -> dict[str, Any]:
        """Return all facts as values for JSON."""
        return asdict(self)

    def text(self) -> str:
        """Return a few lines for the terminal."""
        which = {
            "model": "the model",
            "sparse": "the sparse model",
            "shrunk": "the model without its removed rows",
        }
        if self.batch_sizes:
            sizes = ", ".join(map(str, self.batch_sizes))
            checked = f"checked at batch sizes {sizes}: largest relative difference {self.difference:.1e}"
        else:
            checked = "checked: read back, every value is the same"
        return f"{self.path}: {which[self.model]}, {self.bytes:,} bytes\n{checked}\nload it: {self.hint}"


def check_export(path: Path, packed: bool = False) -> None:
    """Check all that can be checked before a model is loaded.

    Args:
        path: The file to write.
        packed: Whether the state dict is packed.

    Raises:
        ToolError: The suffix is unknown, the file exists or cannot be written, or a package is missing.
    """
    if path.suffix not in SUFFIXES:
        raise ToolError(f"to: the file must end in {', '.join(SUFFIXES)}, got {str(path)!r}")
    if packed and path.suffix != ".safetensors":
        raise ToolError(f"packed is a form of .safetensors files, got to = {str(path)!r}")
    try:
        check_new_file(path)
    except ValueError as error:
        raise ToolError(f"to: {error}") from None
    missing = missing_packages() if path.suffix == ".onnx" else []
    if missing:
        raise ToolError(f"an .onnx file needs {', '.join(missing)}: pip install 'fishleg[onnx]'")


def export_run(
    directory: Path,
    path: Path,
    *,
    packed: bool = False,
    shrunk: bool = True,
    given: Mapping[str, Any] | None = None,
    trust: bool = False,
    on_phase: Phases = quiet,
) -> Export:
    """Export the final model of a run: with the pattern "rows" the model without the removed rows.

    Args:
        directory: The directory of the run.
        path: The file to write; its suffix names the format.
        packed: Whether a state dict is packed: one bit per weight, and the values that are not zero.
        shrunk: Whether removed rows are cut out, where the run has such a model.
        given: Options that replace those of the recipe, by unique name.
        trust: Whether the recipe may name code that is neither below the current directory nor installed.
        on_phase: Receives a text before each step that may take long.

    Returns:
        What was written.
    """
    check_export(path, packed)
    prepared = load_run(directory, given, trust=trust, on_phase=on_phase)
    small = load_small(prepared, directory) if shrunk else None
    which = "sparse" if small is None else "shrunk"
    on_phase(f"exporting and checking {path}")
    return _export(prepared, prepared.model if small is None else small, which, path, packed)


def export_recipe(recipe: Recipe, path: Path, *, packed: bool = False, on_phase: Phases = quiet) -> Export:
    """Export the model that a recipe names.

    Args:
        recipe: The model, its weights, and data for an example batch.
        path: The file to write; its suffix names the format.
        packed: Whether a state dict is packed: one bit per weight, and the values that are not zero.
        on_phase: Receives a text before each step that may take long.

    Returns:
        What was written.
    """
    check_export(path, packed)
    prepared = prepare(recipe, prunes=False, on_phase=on_phase)
    on_phase(f"exporting and checking {path}")
    return _export(prepared, prepared.model, "model", path, packed)


def _export(prepared: Prepared, model: nn.Module, which: str, path: Path, packed: bool) -> Export:
    with seeded(prepared.recipe.run.seed):  # a loader that shuffles
        batch = prepared.draw_batch()
    try:
        return export_model(model, batch, path, prepared.forward, packed=packed, which=which)
    except ValueError as error:
        raise ToolError(str(error)) from error


def export_model(
    model: nn.Module,
    batch: Any,
    path: Path,
    forward: Forward = default_forward,
    *,
    packed: bool = False,
    which: str = "model",
) -> Export:
    """Export a model to a new file. Its outputs are compared with the model's before the file appears.

    Args:
        model: The model; it is not changed.
        batch: An example batch.
        path: The file to write; its suffix names the format.
        forward: How the model is called on a batch.
        packed: Whether a state dict is packed: one bit per weight, and the values that are not zero.
        which: "shrunk" for a model that was cut down to its kept rows.

    Returns:
        What was written.
    """
    check_export(path, packed)
    if path.suffix == ".safetensors":
        data = _to_safetensors(model.state_dict(), packed, which == "shrunk")
        names, sizes, difference = [], [], 0.0
    else:
        traced = trace_model(model, batch, forward)
        data, difference = (to_onnx if path.suffix == ".onnx" else to_pt2)(traced)
        names, sizes = traced.call.names, traced.sizes()
    hint = _hint(path, names, packed, which == "shrunk")
    write_new_file(path, data)
    return Export(str(path), len(data), which, names, sizes, difference, hint)


def _to_safetensors(state: Mapping[str, Tensor], packed: bool, shrunk: bool) -> bytes:
    """Return the bytes of a file, read back and compared.

    Raises:
        ValueError: If a value was not read back as it was.
    """
    from safetensors.torch import load

    plain = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    header = {"format": "pt", **({SHRUNK: "yes"} if shrunk else {})}
    data = to_bytes(pack(plain) if packed else plain, header, with_checksum=True)
    again = unpack(load(data))
    for name, value in plain.items():
        if name not in again or again[name].dtype != value.dtype or not torch.equal(again[name], value):
            raise ValueError(f"{name} is not the same after reading it back. Nothing is written")
    return data


def _hint(path: Path, names: list[str], packed: bool, shrunk: bool) -> str:
    shown, arguments = repr(str(path)), ", ".join(names)
    if path.suffix == ".onnx":
        feed = ", ".join(f"{name!r}: {name}" for name in names)
        return f"onnxruntime.InferenceSession({shown}).run(None, {{{feed}}})  # NumPy arrays"
    if path.suffix == ".pt2":
        return f"torch.export.load({shown}).module()({arguments})"
    load = f"fishleg.formats.unpack({shown})" if packed else f"safetensors.torch.load_file({shown})"
    return f"fishleg.load_shrunk(model, {load})" if shrunk else f"model.load_state_dict({load})"
