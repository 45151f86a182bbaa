"""From a recipe to everything a run needs: model, loaders, evaluator, surgeon; all of it checked."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.batches import Forward, default_forward, inputs_of, map_tensors, move_batch, targets_of
from fishleg.fisher import frozen_statistics
from fishleg.likelihoods import Likelihood, as_likelihood
from fishleg.streams import Replayable
from fishleg.surgeon import Surgeon, SurgeonOptions
from fishleg.tool import sources
from fishleg.tool.errors import ToolError
from fishleg.tool.metrics import Evaluator
from fishleg.tool.recipe import Recipe

_UNNAMED_EVALUATION = 50  # batches of the calibration data, where no eval_data are named


@dataclass
class Prepared:
    """What is ready to be worked on."""

    recipe: Recipe
    base: Path
    model: nn.Module
    dense: nn.Module  # a copy that stays as it is
    data: sources.Data
    calibration: Replayable
    forward: Forward
    likelihood: Likelihood
    evaluator: Evaluator
    surgeon: Surgeon

    @property
    def first_batch(self) -> Any:
        """Some batch, for what depends on shapes alone."""
        return next(iter(self.data.calibration))


def prepare(
    recipe: Recipe,
    base: Path | None = None,
    *,
    surgery: bool = True,
    dense: Mapping[str, Tensor] | None = None,
) -> Prepared:
    """Build and check; `dense` replaces the weights that the recipe names (a resumed run has its own)."""
    base = base or Path.cwd()
    recipe.check()
    device = as_device(recipe.device)
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    model = sources.make_model(recipe.model, base, trained=dense is None and recipe.weights is None).to(
        device
    )
    if next(model.parameters(), None) is None:
        raise ToolError(f"model: {recipe.model} returned a module without parameters")
    if dense is not None:
        sources.apply_weights(model, dict(dense), "the run's own copy")
    elif recipe.weights is not None:
        sources.apply_weights(model, sources.load_weights(recipe.weights, base), recipe.weights)
    data = sources.make_data(
        recipe.model, recipe.data, recipe.train_data, recipe.eval_data, base, calibrated=surgery
    )
    forward: Forward = default_forward
    if recipe.forward:
        forward = sources.find_function(recipe.forward, "forward", base)
    custom = sources.find_function(recipe.metric, "metric", base) if recipe.metric else None
    likelihood = as_likelihood(recipe.likelihood)
    _preflight(model, data, forward, likelihood)
    still = copy.deepcopy(model).eval()
    evaluation = data.evaluation if data.evaluation is not None else data.calibration
    evaluator = Evaluator(
        Replayable(evaluation, recipe.seed + 2), likelihood, forward, reference=still, custom=custom,
        most_batches=_UNNAMED_EVALUATION if data.evaluation is None else None,
    )  # fmt: skip
    calibration = Replayable(data.calibration, recipe.seed)
    options = {f.name for f in fields(SurgeonOptions)} & {f.name for f in fields(Recipe)}
    surgeon = Surgeon(
        model, calibration, likelihood, forward=forward,
        generator=torch.Generator().manual_seed(recipe.seed),
        **({name: getattr(recipe, name) for name in options} if surgery else {}),
    )  # fmt: skip
    return Prepared(recipe, base, model, still, data, calibration, forward, likelihood, evaluator, surgeon)


def _preflight(model: nn.Module, data: sources.Data, forward: Forward, likelihood: Likelihood) -> None:
    """The first batches of every loader through the model: what is wrong shows here, not in an hour."""
    loaders = {"data": data.calibration, "train_data": data.train, "eval_data": data.evaluation}
    device = next(model.parameters()).device
    for name, loader in loaders.items():
        if loader is None:
            continue
        try:
            batches = list(islice(loader, 2))
        except Exception as error:
            raise ToolError(f"{name}: drawing the first batch raised {sources.told(error)}") from error
        if not batches:
            raise ToolError(f"{name}: the loader is empty")
        for batch in batches:
            _check_finite(inputs_of(batch) if forward is default_forward else batch, name)
            try:
                with torch.no_grad(), frozen_statistics(model):
                    f = forward(model, move_batch(batch, device))
            except Exception as error:
                raise ToolError(
                    f"{name}: the model cannot be called on the first batch ({_shapes(batch)}): "
                    f"{sources.told(error)}"
                ) from error
            y = targets_of(batch)
            try:
                likelihood.check(f, None if y is None else y.to(device))
            except ValueError as error:
                raise ToolError(f"{name}: {error}") from None
            if not bool(f.isfinite().all()):
                raise ToolError(f"{name}: the model's outputs on the first batch are not finite (NaN or Inf)")


def as_device(name: str) -> torch.device:
    """The device by name, tried out."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ToolError(f"device {name!r} cannot be used: {reason}") from None
    return device


def _check_finite(inputs: Any, name: str) -> None:
    def check(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ToolError(f"{name}: the first batches hold NaN or Inf in their inputs")
        return tensor

    map_tensors(inputs, check)


def _shapes(batch: Any) -> str:
    found: list[str] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}")
        return tensor

    map_tensors(batch, note)
    return ", ".join(found) or f"a {type(batch).__name__} without tensors"


__all__ = ["Prepared", "as_device", "prepare"]
