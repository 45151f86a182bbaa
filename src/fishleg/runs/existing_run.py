"""A run that is on disk already: its record, its recipe, its dense weights, and whether to trust its code."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fishleg.formats import checkpoint
from fishleg.runs.directory import DENSE, RECIPE, RUN, check_no_links, read_record
from fishleg.runs.errors import ToolError
from fishleg.runs.recipe import KEYS, SECTIONS, Recipe, flatten, load_recipe, make_recipe
from fishleg.runs.sources import Data, untrusted_code

logger = logging.getLogger(__name__)
# Options that an interrupted run may go on with another value of: files may have moved, and the machine may
# be another one. The fingerprint tells whether data and model are still the same.
_MAY_CHANGE = {
    "model", "weights", "forward", "data", "train_data", "eval_data", "metric", "out", "device", "threads",
    "checkpoint_minutes", "keep", "tensorboard", "wandb",
}  # fmt: skip


@dataclass(frozen=True)
class ExistingRun:
    """What the directory of a run says.

    Args:
        directory: The directory.
        record: The content of run.json.
        recipe: All options of the run.
        base: The directory that relative paths in the recipe refer to.
    """

    directory: Path
    record: dict[str, Any]
    recipe: Recipe
    base: Path

    def dense_weights(self, *, model_in_hand: bool = False) -> dict[str, Tensor] | None:
        """Return the dense weights that the run has saved.

        Args:
            model_in_hand: Whether the model is not the one that the recipe names.

        Returns:
            The state dict; None if the run was killed before it saved them, and the recipe says where they
            are.

        Raises:
            ToolError: They cannot be read, or they are needed and missing.
        """
        path = self.directory / DENSE
        if "dense" not in self.record and not path.exists() and not model_in_hand:
            return None
        try:
            state = checkpoint.load(path)
        except checkpoint.CheckpointError as error:
            again = f"fishleg prune --recipe {self.directory / RECIPE} --out ANOTHER"
            raise ToolError(f"{error}. Nothing can go on without it; to start again: {again}") from None
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            raise ToolError(f"{path} holds no state dict of tensors")
        return state


def open_run(
    directory: str | Path, *, trust: bool = False, model: nn.Module | None = None, data: Data | None = None
) -> ExistingRun:
    """Read the directory of a run. No code that it names is run.

    Args:
        directory: The directory of the run.
        trust: Whether its recipe may name code that is neither below the current directory nor installed.
        model: A model in hand, so that the one that the recipe names is not made.
        data: Loaders in hand, so that those that the recipe names are not made.

    Returns:
        What is there.

    Raises:
        ToolError: There is no run, its recipe was edited, or it names code that is not trusted.
    """
    directory = Path(directory).resolve()
    record = read_record(directory)
    _check_record(directory, record)
    check_no_links(directory)
    run = ExistingRun(directory, record, _recipe(directory, record), Path(record["base"]))
    if not trust:
        _check_trusted(run, model, data)
    return run


def _check_record(directory: Path, record: Mapping[str, Any]) -> None:
    """Check that a record has what a run is resumed or evaluated from.

    Raises:
        ToolError: An entry is missing or of another type.
    """
    expected = {"base": str, "warnings": list, "checkpoints": int}
    wrong = [name for name, kind in expected.items() if not isinstance(record.get(name), kind)]
    if wrong:
        raise ToolError(
            f"{directory / RUN} is no record of a run that this version can read: {wrong[0]!r} is missing"
        )


def _recipe(directory: Path, record: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a run, after a comparison with the one that it began with.

    Returns:
        The recipe in recipe.toml. If a killed run has not written it yet, the copy in the record.

    Raises:
        ToolError: recipe.toml was edited in a way that changes the result.
    """
    path, copied = directory / RECIPE, record.get("recipe")
    began = make_recipe(flatten(copied)) if isinstance(copied, Mapping) else None
    if began is not None and not path.exists():
        return began
    recipe = make_recipe(load_recipe(path))
    if began is None:
        return recipe
    edited = {
        key: (old, new)
        for section in SECTIONS
        for key in KEYS[section]
        if (old := began.value(section, key)) != (new := recipe.value(section, key))
    }
    for key, (old, new) in edited.items():
        if key not in _MAY_CHANGE:
            raise ToolError(
                f"{path} was edited after the run began: {key} was {old!r} and is {new!r}. A run goes on "
                "with the options that it began with: undo the change, or start another run"
            )
        logger.warning("%s was edited after the run began: %s was %r and is %r", path, key, old, new)
    return recipe


def _check_trusted(run: ExistingRun, model: nn.Module | None, data: Data | None) -> None:
    """Check that a run's directory does not lead to code from elsewhere.

    Raises:
        ToolError: The recipe names code that is neither below the current directory nor installed.
    """
    named, data_options = run.recipe.model, run.recipe.data
    specs = {"forward": named.forward, "metric": data_options.metric}
    if model is None:
        specs["model"] = named.model
    if data is None:
        specs |= {name: getattr(data_options, name) for name in ("data", "train_data", "eval_data")}
    code = untrusted_code(specs, run.base)
    if code is not None:
        raise ToolError(
            f"the run in {run.directory} would run code that is neither below the current directory nor "
            f"installed: {code}. If you trust it, use --trust (in Python: trust=True)"
        )
