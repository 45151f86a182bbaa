"""Inspect and evaluate checkpoints and runs: sparsity, pattern, size, origin and accuracy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fishleg.formats import checkpoint
from fishleg.formats.packed import pack
from fishleg.options.text import printable
from fishleg.pruning.patterns import NM, Blocks, Rows, as_pattern
from fishleg.runs.directory import CHECKPOINTS, MODEL, PACKED, RUN, read_record
from fishleg.runs.errors import ToolError
from fishleg.runs.load import load_run
from fishleg.runs.recipe import Recipe
from fishleg.runs.setup import Phases, Prepared, prepare, quiet
from fishleg.runs.sources import no_exit
from fishleg.runs.weights import load_weights


@dataclass(frozen=True)
class TensorFacts:
    """Facts about one tensor of a checkpoint.

    Args:
        name: The name of the tensor.
        shape: Its shape.
        size: The number of its entries.
        sparsity: The share of zeros.
        kept: The number of entries that are not zero.
        pattern: The strictest N:M pattern that holds along the inputs, or "".
        dead_rows: The number of rows that are zero everywhere.
        holds: Whether the requested pattern holds; None: none was requested, or the tensor has no zeros.
    """

    name: str
    shape: list[int]
    size: int
    sparsity: float
    kept: int
    pattern: str
    dead_rows: int
    holds: bool | None = None


@dataclass(frozen=True)
class Inspection:
    """Facts about a checkpoint.

    Args:
        path: The file.
        bytes: Its size.
        bytes_packed: Its size in packed form.
        sparsity: The share of zeros in the weights that the run prunes. If the run is unknown, in the
            matrices that have zeros.
        sparsity_of: The weights that `sparsity` refers to, in words.
        tensors: Facts about each tensor.
        made: How it was made: entries of the run's record, its recipe, the state of its masks.
        pattern: The requested pattern.
        holds: Whether the requested pattern holds in every matrix that has zeros.
    """

    path: str
    bytes: int
    bytes_packed: int
    sparsity: float
    sparsity_of: str
    tensors: list[TensorFacts]
    made: dict[str, Any]
    pattern: str | None = None
    holds: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return all facts as values for JSON."""
        return asdict(self)

    def table(self) -> str:
        """Return a table for the terminal, without characters that could control it."""
        names = [printable(t.name, one_line=True) for t in self.tensors]
        width = max(map(len, names))
        lines = [
            f"{'tensor':<{width}} {'shape':>16} {'size':>10} {'kept':>10} {'zeros':>8} {'pattern':>8} "
            f"{'dead rows':>10}"
        ]
        for name, t in zip(names, self.tensors, strict=True):
            shape = "x".join(map(str, t.shape)) or "scalar"
            verdict = "" if t.holds is None else f"  {self.pattern} {'holds' if t.holds else 'VIOLATED'}"
            dead = t.dead_rows or ""
            lines.append(
                f"{name:<{width}} {shape:>16} {t.size:>10,} {t.kept:>10,} {t.sparsity:>8.1%} "
                f"{t.pattern:>8} {dead:>10}{verdict}"
            )
        lines.append(f"\n{self.path}: {self.bytes:,} bytes; packed size {self.bytes_packed:,} bytes")
        lines.append(f"sparsity of the {self.sparsity_of}: {self.sparsity:.2%}")
        if self.pattern is not None:
            lines.append(f"pattern {self.pattern}: {'holds' if self.holds else 'does NOT hold'}")
        made = {key: value for key, value in self.made.items() if key != "sparsity"}  # stands above
        lines += [f"{key}: {value}" for key, value in made.items()]
        return printable("\n".join(lines))


def inspect_path(path: Path, pattern: str | None = None) -> Inspection:
    """Inspect a state dict (.safetensors, .pt), a packed one, a checkpoint of a run, or a run's directory.

    Args:
        path: The file or directory.
        pattern: A pattern to check, such as "2:4".

    Returns:
        The facts.

    Raises:
        ToolError: There is no such file, or it holds no state dict.
    """
    from safetensors.torch import save as to_bytes

    made: dict[str, Any] = {}
    prunable: set[str] = set()
    if pattern is not None:
        as_pattern(pattern)
    if path.is_dir():
        made, prunable = _how_made(path), _prunable(path)
        final = path / MODEL
        if final.is_file():
            path = final
        else:
            latest = checkpoint.Store(path / CHECKPOINTS).latest()
            if latest is None:
                raise ToolError(f"there is no model and no checkpoint in {path}")
            path = latest[0]
    if not path.is_file():
        raise ToolError(f"there is no file {path}")
    if path.suffix == checkpoint.SUFFIX:
        content = checkpoint.load(path)
        state = content.get("model", content) if isinstance(content, dict) else {}
        if not _is_state_dict(state):
            raise ToolError(f"{path} holds no state dict of tensors")
        try:
            inside = _masks_inside(content, state)
        except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            reason = printable(str(error), one_line=True)
            raise ToolError(f"{path} holds masks that do not fit its weights: {reason}") from None
        made = {**(made or _how_made(path.parent.parent)), **inside}
        prunable = prunable or _prunable(path.parent.parent)
    else:
        state = load_weights(path)
        made = made or _recipe_inside(path)
    if path.suffix == ".safetensors":  # such a file does not keep the order of the model
        state = dict(sorted(state.items(), key=lambda item: _natural(item[0])))
    size = path.stat().st_size
    tensors = [_checked_facts(name, tensor, pattern, path) for name, tensor in state.items()]
    zeroed = {t.name for t in tensors if t.sparsity > 0 and len(t.shape) > 1}
    pruned = [t for t in tensors if t.name in (prunable or zeroed)]
    sparsity_of = "prunable matrices" if prunable else "matrices that have zeros"
    zeros, total = sum(t.sparsity * t.size for t in pruned), sum(t.size for t in pruned)
    beside = path.with_name(PACKED)  # of a run; it also holds the recipe
    if path.name in (MODEL, beside.name) and beside.is_file():
        packed = beside.stat().st_size
    else:
        try:
            packed = len(to_bytes({name: t.contiguous() for name, t in pack(state).items()}))
        except (ValueError, KeyError, RuntimeError) as error:  # a reserved name, or an unusual element type
            raise ToolError(f"{path} cannot be packed: {printable(str(error), one_line=True)}") from None
    verdicts = [t.holds for t in tensors if t.holds is not None]
    holds = None if pattern is None else bool(verdicts) and all(verdicts)
    sparsity = zeros / total if total else 0.0
    return Inspection(str(path), size, packed, sparsity, sparsity_of, tensors, made, pattern, holds)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 2 before layer 12."""
    parts = re.split("([0-9]+)", name)  # every second one is a number, which may be too long for int
    return [(len(part.lstrip("0")) if i % 2 else 0, part) for i, part in enumerate(parts)]


def _is_state_dict(state: Any) -> bool:
    return bool(
        isinstance(state, dict)
        and state
        and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items())
    )


def _checked_facts(name: str, tensor: Tensor, pattern: str | None, path: Path) -> TensorFacts:
    try:
        return _facts(name, tensor, pattern)
    except RuntimeError:  # an element type that cannot be compared with zero
        shown = printable(name, one_line=True)
        raise ToolError(f"{path} holds {shown} of dtype {tensor.dtype}, which cannot be inspected") from None


def _facts(name: str, tensor: Tensor, pattern: str | None) -> TensorFacts:
    sparsity = float((tensor == 0).float().mean()) if tensor.numel() else 0.0
    matrix = tensor.dim() > 1 and tensor.is_floating_point()
    found = ""
    if matrix and sparsity > 0:
        # far above a pattern's own sparsity it holds by chance
        named = {"1:4": 0.75, "1:2": 0.5, "2:4": 0.5, "4:8": 0.5}
        fits = (p for p, limit in named.items() if sparsity < limit + 0.02 and _holds(tensor, p))
        found = next(fits, "")
    dead = int((tensor.flatten(1) == 0).all(1).sum()) if matrix else 0
    holds = None
    if pattern is not None and matrix and sparsity > 0:
        holds = _holds(tensor, pattern)
    kept = int((tensor != 0).sum())
    return TensorFacts(name, list(tensor.shape), tensor.numel(), sparsity, kept, found, dead, holds)


def _holds(tensor: Tensor, pattern: str) -> bool:
    rule = as_pattern(pattern)
    if rule.unsuitable(tuple(tensor.shape)) is not None:
        return False
    if isinstance(rule, NM):
        return bool((tensor.movedim(1, -1).reshape(-1, rule.m) != 0).sum(1).le(rule.n).all())
    if isinstance(rule, Blocks):
        groups = tensor.movedim(1, -1).reshape(-1, rule.size) != 0
        return bool((groups.all(1) | ~groups.any(1)).all())
    if isinstance(rule, Rows):
        rows = tensor.flatten(1) != 0
        return bool((rows.all(1) | ~rows.any(1)).all())
    return True


def _how_made(directory: Path) -> dict[str, Any]:
    if not (directory / RUN).is_file():
        return {}
    record = read_record(directory)
    keys = ("status", "name", "method", "mode", "pattern", "sparsity", "started", "command")
    return {key: record[key] for key in keys if record.get(key) is not None}


def _prunable(directory: Path) -> set[str]:
    """Return the weights that the run in a directory prunes; some may have no zeros.

    Raises:
        ToolError: Its record cannot be read.
    """
    if not (directory / RUN).is_file():
        return set()
    layers = read_record(directory).get("layers", [])
    try:
        return {str(layer["name"]) for layer in layers if layer["reason"] is None}
    except (KeyError, TypeError):
        raise ToolError(f"{directory / 'run.json'} holds no record of a run") from None


def _masks_inside(content: dict[str, Any], state: dict[str, Tensor]) -> dict[str, Any]:
    """Return how far a run's checkpoint is, and whether its weights agree with its masks."""
    surgeon = (content.get("session") or {}).get("surgeon")
    if not isinstance(surgeon, dict):
        return {}
    masks = surgeon["masks"]
    removed = sum(int((~mask).sum()) for mask in masks.values())
    alive = sum(int((state[name][~mask] != 0).sum()) for name, mask in masks.items() if name in state)
    stages, step = len(surgeon["history"]), (content["session"].get("fine_tuner") or {}).get("step")
    place = f"{stages} pruning step{'' if stages == 1 else 's'} done"
    place += "" if step is None else f", training step {step}"
    obeyed = "all of them zero" if not alive else f"{alive:,} of them NOT zero"
    return {"place": place, "masks": f"{removed:,} weights of {len(masks)} tensors masked, {obeyed}"}


def _recipe_inside(path: Path) -> dict[str, Any]:
    if path.suffix != ".safetensors":
        return {}
    from safetensors import safe_open

    with safe_open(path, "pt") as file:  # which `load_weights` has read before
        metadata = file.metadata() or {}
    return {"recipe": "\n" + metadata["recipe"]} if "recipe" in metadata else {}


def evaluate_recipe(recipe: Recipe, *, on_phase: Phases = quiet) -> dict[str, Any]:
    """Evaluate the model that a recipe names.

    Args:
        recipe: The model and the data.
        on_phase: Receives a text before each step that may take long.

    Returns:
        The metric by its name, and the loss if there are labels.
    """
    with no_exit():
        prepared = prepare(recipe, prunes=False, on_phase=on_phase)
        on_phase("evaluating the model")
        return _evaluation(prepared)


def evaluate_run(
    directory: Path,
    *,
    given: Mapping[str, Any] | None = None,
    trust: bool = False,
    on_phase: Phases = quiet,
) -> dict[str, Any]:
    """Evaluate the final model of a run. This runs the code that its recipe names.

    Args:
        directory: The directory of the run.
        given: Options that replace those of the recipe, such as other data, by unique name.
        trust: Whether the recipe may name code that is neither below the current directory nor installed.
        on_phase: Receives a text before each step that may take long.

    Returns:
        The metric by its name, and the loss if there are labels.
    """
    with no_exit():
        prepared = load_run(directory, given, trust=trust, on_phase=on_phase)
        on_phase("evaluating the model")
        return _evaluation(prepared)


def _evaluation(prepared: Prepared) -> dict[str, Any]:
    name, result = prepared.evaluator.name, prepared.evaluator(prepared.model)
    return {name: result.metric, **({} if result.loss is None else {"loss": result.loss})}
