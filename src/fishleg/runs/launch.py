"""Start a run in a new directory, or go on with one that was interrupted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from fishleg.runs.directory import check_unused, read_record
from fishleg.runs.errors import ToolError
from fishleg.runs.events import Listener
from fishleg.runs.existing_run import open_run
from fishleg.runs.recipe import Recipe
from fishleg.runs.run import Run
from fishleg.runs.setup import prepare
from fishleg.runs.sources import Data, no_exit

logger = logging.getLogger(__name__)


def start(
    recipe: Recipe,
    *,
    model: nn.Module | None = None,
    data: Data | None = None,
    base: Path | None = None,
    listeners: Sequence[Listener] = (),
    command: str = "",
) -> Run:
    """Make a new run in the recipe's `out`; everything is checked, and nothing is written yet.

    Args:
        recipe: All options of the run.
        model: A model in hand, instead of the one that the recipe names; it is changed in place.
        data: Loaders in hand, instead of those that the recipe names.
        base: The directory that relative paths refer to; default: the current one.
        listeners: Objects that receive every event.
        command: The command line, for the report.

    Returns:
        The run; `execute` does the work.

    Raises:
        ToolError: The directory is in use, or something that the recipe names is wrong.
    """
    base = base or Path.cwd()
    directory = (base / recipe.run.out).resolve()
    check_unused(directory)
    with no_exit():
        prepared = prepare(recipe, base, model=model, data=data, on_phase=_phases(listeners))
        return Run(prepared, directory, listeners=listeners, command=command)


def resume(
    directory: str | Path,
    *,
    model: nn.Module | None = None,
    data: Data | None = None,
    listeners: Sequence[Listener] = (),
    trust: bool = False,
) -> Run:
    """Go on with the run in a directory, from its last good checkpoint.

    This runs the code that the recipe in the directory names. Code that is neither below the current
    directory nor part of an installed package runs only with `trust`.

    Args:
        directory: The directory of the run.
        model: The model, if the run was started with one in hand; its weights do not matter.
        data: The loaders, if the run was started with loaders in hand.
        listeners: Objects that receive every event.
        trust: Whether the recipe may name code from anywhere.

    Returns:
        The run; `execute` does the rest of the work.

    Raises:
        ToolError: There is no run, it is finished, or what it needs cannot be read or is not trusted.
    """
    if read_record(Path(directory)).get("status") == "finished":
        raise ToolError(f"the run in {directory} is finished: there is nothing to resume")
    run = open_run(directory, trust=trust, model=model, data=data)
    record = run.record
    dense = run.dense_weights(model_in_hand=model is not None)
    with no_exit():
        prepared = prepare(
            run.recipe, run.base, model=model, data=data, dense=dense, on_phase=_phases(listeners)
        )
    if record.get("threads") not in (None, torch.get_num_threads()):
        logger.warning(
            "the run began with %s CPU threads and goes on with %s: results may differ in the last bits "
            "(set OMP_NUM_THREADS to go on as before)",
            record["threads"], torch.get_num_threads(),
        )  # fmt: skip
    with no_exit():
        return Run(prepared, run.directory, listeners=listeners, record=record)


def _phases(listeners: Sequence[Listener]) -> Callable[[str], None]:
    """Return a function that shows what is being done, before there is a log."""

    def show(message: str) -> None:
        for listener in listeners:
            listener.event({"event": "phase", "time": 0.0, "message": message})

    return show
