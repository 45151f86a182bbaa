"""Load a finished run: its dense and its final model, its data, and how the model is called."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fishleg.runs.directory import MODEL, SMALL, read_record
from fishleg.runs.errors import ToolError
from fishleg.runs.existing_run import open_run
from fishleg.runs.setup import Phases, Prepared, prepare, quiet
from fishleg.runs.sources import no_exit
from fishleg.runs.weights import apply_weights, load_weights
from fishleg.runtime.models import copy_model


def load_run(
    directory: Path,
    given: Mapping[str, Any] | None = None,
    *,
    trust: bool = False,
    on_phase: Phases = quiet,
) -> Prepared:
    """Build what the recipe of a run names, with the final weights of the run. This runs the code it names.

    Args:
        directory: The directory of the run.
        given: Options that replace those of the recipe, such as the device, by unique name. Files that they
            name are relative to the current directory.
        trust: Whether the recipe may name code that is neither below the current directory nor installed.
        on_phase: Receives a text before each step that may take long.

    Returns:
        What `prepare` returns: `model` is the final model, `dense` the dense one.

    Raises:
        ToolError: There is no run, or it has no final model yet.
    """
    record = read_record(directory)
    if not (directory / MODEL).is_file():
        status = record.get("status")
        raise ToolError(
            f"the run in {directory} has no model yet ({status}). If it was stopped: fishleg resume"
        )
    run = open_run(directory, trust=trust)
    recipe = run.recipe.replace(**{key: _from_here(value) for key, value in (given or {}).items()})
    # the dense model is loaded first: without labels the sparse model is compared with it
    with no_exit():
        prepared = prepare(recipe, run.base, prunes=False, dense=run.dense_weights(), on_phase=on_phase)
    sparse = (directory / MODEL).resolve()
    apply_weights(prepared.model, load_weights(sparse), sparse)
    return prepared


def _from_here(value: Any) -> Any:
    """Return a function's name such as `data.py:test` with the absolute path of its file."""
    place, colon, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return f"{Path.cwd() / place}:{name}" if colon and place.endswith(".py") else value


def load_small(prepared: Prepared, directory: Path) -> nn.Module | None:
    """Load the model without the removed rows, which a run with the pattern "rows" writes.

    Args:
        prepared: What `load_run` returned.
        directory: The directory of the run.

    Returns:
        The smaller model; None if the run wrote none.
    """
    path = (directory / SMALL).resolve()
    if not path.is_file():
        return None
    small = copy_model(prepared.model)
    apply_weights(small, load_weights(path), path)
    return small
