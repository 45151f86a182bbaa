"""Start a run in a new directory, or go on with one that was interrupted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from fishleg.formats import checkpoint
from fishleg.runs.directory import DENSE, RECIPE, RUN, check_unused, read_record
from fishleg.runs.errors import ToolError
from fishleg.runs.events import Listener
from fishleg.runs.recipe import Recipe, load_recipe, make_recipe
from fishleg.runs.run import Run
from fishleg.runs.setup import prepare
from fishleg.runs.sources import Data

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
    prepared = prepare(recipe, base, model=model, data=data)
    return Run(prepared, directory, listeners=listeners, command=command)


def resume(
    directory: str | Path,
    *,
    model: nn.Module | None = None,
    data: Data | None = None,
    listeners: Sequence[Listener] = (),
) -> Run:
    """Go on with the run in a directory, from its last good checkpoint.

    Args:
        directory: The directory of the run.
        model: The model, if the run was started with one in hand; its weights do not matter.
        data: The loaders, if the run was started with loaders in hand.
        listeners: Objects that receive every event.

    Returns:
        The run; `execute` does the rest of the work.

    Raises:
        ToolError: There is no run, it is finished, or what it needs cannot be read.
    """
    directory = Path(directory).resolve()
    record = read_record(directory)
    if record.get("status") == "finished":
        raise ToolError(f"the run in {directory} is finished: there is nothing to resume")
    if not isinstance(record.get("base"), str) or not isinstance(record.get("warnings"), list):
        raise ToolError(f"{directory / RUN} holds no record of a run")
    recipe = make_recipe(load_recipe(directory / RECIPE))
    try:
        dense = checkpoint.load(directory / DENSE)
    except checkpoint.CheckpointError as error:
        again = f"fishleg prune --recipe {directory / RECIPE} --out ANOTHER"
        raise ToolError(f"{error}. Nothing can go on without it; to start again: {again}") from None
    prepared = prepare(recipe, Path(record["base"]), model=model, data=data, dense=dense)
    if record.get("threads") not in (None, torch.get_num_threads()):
        logger.warning(
            "the run began with %s CPU threads and goes on with %s: results may differ in the last bits "
            "(set OMP_NUM_THREADS to go on as before)",
            record["threads"], torch.get_num_threads(),
        )  # fmt: skip
    return Run(prepared, directory, listeners=listeners, record=record)
