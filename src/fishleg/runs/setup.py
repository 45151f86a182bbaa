"""From a recipe to everything a run needs: model, loaders, evaluator, surgeon; all of it checked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.curvature.likelihoods import Likelihood, as_likelihood
from fishleg.inverse import AuxiliaryStats
from fishleg.pruning import PruningSession
from fishleg.runs import sources
from fishleg.runs.errors import ToolError
from fishleg.runs.metrics import Evaluator, has_nan, why_not
from fishleg.runs.recipe import Recipe
from fishleg.runs.weights import apply_weights, load_weights
from fishleg.runtime.batches import Forward, default_forward, inputs_of, map_tensors, move_batch, targets_of
from fishleg.runtime.modes import evaluation_mode
from fishleg.runtime.random_state import seeded
from fishleg.runtime.replay import Replayable

_UNNAMED_EVALUATION = 50  # batches of the calibration data, where no eval_data are named


Phases = Callable[[str], None]
"""Receives a text before each step that may take long."""


def quiet(message: str) -> None:
    """Show nothing.

    Args:
        message: What is being done.
    """


@dataclass(frozen=True)
class Prepared:
    """What a recipe names, built and checked.

    Args:
        recipe: The recipe.
        base: The directory that relative paths refer to.
        model: The model with its weights.
        dense: A copy of it that stays as it is.
        data: The loaders as they were given.
        calibration: The calibration loader, made repeatable.
        forward: How the model is called on a batch.
        likelihood: The distribution of the outputs.
        evaluator: What measures models.
    """

    recipe: Recipe
    base: Path
    model: nn.Module
    dense: nn.Module
    data: sources.Data
    calibration: Replayable
    forward: Forward
    likelihood: Likelihood
    evaluator: Evaluator

    def draw_batch(self) -> Any:
        """Draw a batch, for what depends on shapes alone.

        Returns:
            The first batch of a new pass over the calibration loader.
        """
        return next(iter(self.data.calibration))


def prepare(
    recipe: Recipe,
    base: Path | None = None,
    *,
    model: nn.Module | None = None,
    data: sources.Data | None = None,
    prunes: bool = True,
    dense: Mapping[str, Tensor] | None = None,
    on_phase: Phases = quiet,
) -> Prepared:
    """Build and check everything that a recipe names.

    Args:
        recipe: The recipe.
        base: The directory that relative paths refer to; default: the current one.
        model: A model to use instead of the one that the recipe names.
        data: Loaders to use instead of those that the recipe names.
        prunes: Whether the model will be pruned; calibration data are needed then.
        dense: Weights to use instead of the recipe's: a resumed run has its own copy of them.
        on_phase: Receives a text before each step that may take long.

    Returns:
        What is ready to be worked on.

    Raises:
        ToolError: Something cannot be found, loaded or called.
    """
    base = base or Path.cwd()
    recipe.check()
    device, seed = as_device(recipe.run.device), recipe.run.seed
    if recipe.run.threads is not None:
        torch.set_num_threads(recipe.run.threads)
    if data is None:  # before the model: that of a workload takes a while to train
        named = recipe.data
        on_phase(f"reading the data ({named.data or recipe.model.model})")
        with seeded(seed):  # a random split, for instance, is the same after a restart
            data = sources.make_data(
                recipe.model.model, named.data, named.train_data, named.eval_data, base, calibrated=prunes
            )
    on_phase(f"building the model ({recipe.model.model})")
    model = _make_model(recipe, base, model, dense).to(device)
    forward = default_forward
    if recipe.model.forward:
        forward = sources.find_function(recipe.model.forward, "forward", base)
    custom = sources.find_function(recipe.data.metric, "metric", base) if recipe.data.metric else None
    likelihood = as_likelihood(recipe.model.likelihood)
    on_phase("calling the model on the first batches")
    _preflight(model, data, forward, likelihood)
    still = copy.deepcopy(model).eval()
    evaluation = data.evaluation if data.evaluation is not None else data.calibration
    evaluator = Evaluator(
        Replayable(evaluation, seed + 2, "the evaluation loader"), likelihood, forward,
        reference=still if prunes or dense is not None else None, custom=custom,
        most_batches=_UNNAMED_EVALUATION if data.evaluation is None else None,
    )  # fmt: skip
    calibration = Replayable(data.calibration, seed, "the calibration loader")
    return Prepared(recipe, base, model, still, data, calibration, forward, likelihood, evaluator)


def _make_model(
    recipe: Recipe, base: Path, model: nn.Module | None, dense: Mapping[str, Tensor] | None
) -> nn.Module:
    """Return the model with its weights. The file of weights is read first, so that its errors come early.

    Raises:
        ToolError: The model has no parameters.
    """
    named = recipe.model
    own = dense is None and named.weights is not None
    weights = load_weights(str(named.weights), base) if own else None
    if model is None:
        with seeded(recipe.run.seed):
            model = sources.make_model(named.model, base, trained=dense is None and named.weights is None)
    if next(model.parameters(), None) is None:
        raise ToolError(f"model: {named.model} returned a module without parameters")
    if dense is not None:
        apply_weights(model, dict(dense), "the run's own copy")
    elif weights is not None:
        apply_weights(model, weights, str(named.weights))
    return model


def make_session(
    prepared: Prepared,
    train_loader: Iterable[Any] | None = None,
    on_auxiliary_step: Callable[[AuxiliaryStats], None] | None = None,
) -> PruningSession:
    """Make the session that prunes a prepared model.

    Args:
        prepared: What `prepare` returned.
        train_loader: Training batches, where the recipe trains.
        on_auxiliary_step: Receives the statistics of every step of Q's learning.

    Returns:
        The session.

    Raises:
        ToolError: The empirical Fisher is asked for and the data have no labels.
    """
    recipe, options = prepared.recipe, prepared.recipe.pruning
    if options.empirical and targets_of(prepared.draw_batch()) is None:
        raise ToolError("empirical = true needs labels: data must yield (inputs, targets)")
    return PruningSession(
        prepared.model, prepared.calibration, likelihood=prepared.likelihood, options=options,
        fine_tuning=recipe.trains, train_loader=train_loader, forward=prepared.forward,
        generator=torch.Generator().manual_seed(recipe.run.seed), on_auxiliary_step=on_auxiliary_step,
    )  # fmt: skip


def _preflight(model: nn.Module, data: sources.Data, forward: Forward, likelihood: Likelihood) -> None:
    """Call the model on the first batches of every loader, so that errors come early.

    Raises:
        ToolError: A loader is empty, or its batches do not fit the model.
    """
    loaders = {"data": data.calibration, "train_data": data.train, "eval_data": data.evaluation}
    if data.evaluation is data.calibration:
        del loaders["data"]
    device = next(model.parameters()).device
    for name, loader in loaders.items():
        if loader is None:
            continue
        count = 0
        for batch in _first_batches(loader, name):
            count += 1
            try:
                inputs = inputs_of(batch) if forward is default_forward else batch
            except ValueError as error:
                raise ToolError(f"{name}: {error} (on the command line: --forward net.py:call)") from None
            _check_no_nan(inputs, name, "inputs")
            try:
                with torch.no_grad(), evaluation_mode(model):
                    f = forward(model, move_batch(batch, device))
            except Exception as error:
                raise ToolError(
                    f"{name}: the model cannot be called on batch {count} ({_shapes(batch)}): "
                    f"{sources.describe_error(error)}"
                ) from error
            y = targets_of(batch)
            _check_no_nan(y, name, "targets")
            try:
                likelihood.check(f, None if y is None else y.to(device))
            except ValueError as error:
                raise ToolError(f"{name}: {error}") from None
            if not likelihood.finite(f):
                found = f"are not finite (NaN or Inf){why_not(batch)}"
                raise ToolError(f"{name}: the model's outputs on batch {count} {found}")
        if not count:
            raise ToolError(f"{name}: the loader is empty, it yields no batch")


def _first_batches(loader: Iterable[Any], name: str, most: int = 2) -> Iterator[Any]:
    iterator = None
    for count in range(1, most + 1):
        try:
            iterator = iter(loader) if iterator is None else iterator
            batch = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise ToolError(
                f"{name}: drawing batch {count} raised {sources.describe_error(error)}"
            ) from error
        yield batch


def as_device(name: str) -> torch.device:
    """Return a device by its name, after a test that it can be used.

    Args:
        name: A name that torch knows, or "auto": the GPU if there is one, else the CPU.

    Returns:
        The device.

    Raises:
        ToolError: The device cannot be used.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        float(torch.zeros(1, device=device, dtype=torch.float64))  # "meta" has no values, mps no float64
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ToolError(f"device {name!r} cannot be used: {reason}") from None
    return device


def _check_no_nan(values: Any, name: str, what: str) -> None:
    if has_nan(values):
        raise ToolError(f"{name}: the first batches hold NaN in their {what}")


def _shapes(batch: Any) -> str:
    found: list[str] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}")
        return tensor

    map_tensors(batch, note)
    return ", ".join(found) or f"a {type(batch).__name__} without tensors"
