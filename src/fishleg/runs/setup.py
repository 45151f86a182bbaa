"""From a recipe to everything a run needs: model, loaders, evaluator, surgeon; all of it checked."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.curvature.likelihoods import Likelihood, as_likelihood
from fishleg.pruning.options import PruningOptions
from fishleg.pruning.surgeon import Surgeon
from fishleg.runs import sources
from fishleg.runs.errors import ToolError
from fishleg.runs.metrics import Evaluator
from fishleg.runs.recipe import Recipe
from fishleg.runs.weights import apply_weights, load_weights
from fishleg.runtime.batches import Forward, default_forward, inputs_of, map_tensors, move_batch, targets_of
from fishleg.runtime.modes import evaluation_mode
from fishleg.runtime.random_state import seeded
from fishleg.runtime.replay import Replayable

MAX_EXACT = 4096  # parameters per layer, the limit of baselines.estimate
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
    _surgeon: Surgeon | None = None  # None where nothing is to be pruned

    @property
    def surgeon(self) -> Surgeon:
        """What prunes the model."""
        assert self._surgeon is not None
        return self._surgeon

    @property
    def first_batch(self) -> Any:
        """Some batch, for what depends on shapes alone."""
        return next(iter(self.data.calibration))


def prepare(
    recipe: Recipe,
    base: Path | None = None,
    *,
    model: nn.Module | None = None,
    data: sources.Data | None = None,
    surgery: bool = True,
    dense: Mapping[str, Tensor] | None = None,
) -> Prepared:
    """Build and check everything that the recipe names.

    `model` and `data` are used instead of what the recipe says of them; `dense` replaces the model's weights
    (a resumed run has its own copy of them).
    """
    base = base or Path.cwd()
    recipe.check()
    device = as_device(recipe.device)
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    if data is None:  # before the model: a workload's takes a while to train
        with seeded(recipe.seed):  # a random split, say, is the same after a restart
            data = sources.make_data(
                recipe.model, recipe.data, recipe.train_data, recipe.eval_data, base, calibrated=surgery
            )
    weights = None if dense is not None or recipe.weights is None else load_weights(recipe.weights, base)
    forward: Forward = default_forward
    if recipe.forward:
        forward = sources.find_function(recipe.forward, "forward", base)
    custom = sources.find_function(recipe.metric, "metric", base) if recipe.metric else None
    if model is None:
        trained = dense is None and recipe.weights is None
        with seeded(recipe.seed):
            model = sources.make_model(recipe.model, base, trained=trained)
    model = model.to(device)
    if next(model.parameters(), None) is None:
        raise ToolError(f"model: {recipe.model} returned a module without parameters")
    if dense is not None:
        apply_weights(model, dict(dense), "the run's own copy")
    elif weights is not None and recipe.weights is not None:
        apply_weights(model, weights, recipe.weights)
    likelihood = as_likelihood(recipe.likelihood)
    _preflight(model, data, forward, likelihood)
    still = copy.deepcopy(model).eval()
    evaluation = data.evaluation if data.evaluation is not None else data.calibration
    evaluator = Evaluator(
        Replayable(evaluation, recipe.seed + 2), likelihood, forward,
        reference=still if surgery or dense is not None else None, custom=custom,
        most_batches=_UNNAMED_EVALUATION if data.evaluation is None else None,
    )  # fmt: skip
    calibration = Replayable(data.calibration, recipe.seed)
    ready = Prepared(recipe, base, model, still, data, calibration, forward, likelihood, evaluator)
    if surgery:
        ready._surgeon = _make_surgeon(ready)
    return ready


def _make_surgeon(ready: Prepared) -> Surgeon:
    recipe = ready.recipe
    if recipe.empirical and recipe.method != "fishleg" and targets_of(ready.first_batch) is None:
        raise ToolError("empirical = true needs labels: data must yield (inputs, targets)")
    options = {f.name for f in fields(PruningOptions)} & {f.name for f in fields(Recipe)}
    surgeon = Surgeon(
        ready.model, ready.calibration, ready.likelihood, forward=ready.forward,
        generator=torch.Generator().manual_seed(recipe.seed),
        # multiply-adds are planned from the weights that each layer keeps
        mask_search_across_layers=recipe.max_flops is None,
        **{name: getattr(recipe, name) for name in options},
    )  # fmt: skip
    if recipe.method == "exact":
        largest = max(surgeon.layers.values(), key=lambda layer: torch.Size(layer.shape).numel())
        size = torch.Size(largest.shape).numel()
        if size > MAX_EXACT:
            raise ToolError(
                f"method 'exact' needs layers of at most {MAX_EXACT} parameters, {largest.name!r} has {size}"
            )
    return surgeon


def _preflight(model: nn.Module, data: sources.Data, forward: Forward, likelihood: Likelihood) -> None:
    """The first batches of every loader through the model: what is wrong shows here, not in an hour."""
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
            _check_finite(inputs, name, "inputs")
            try:
                with torch.no_grad(), evaluation_mode(model):
                    f = forward(model, move_batch(batch, device))
            except Exception as error:
                raise ToolError(
                    f"{name}: the model cannot be called on batch {count} ({_shapes(batch)}): "
                    f"{sources.describe_error(error)}"
                ) from error
            y = targets_of(batch)
            _check_finite(y, name, "targets")
            try:
                likelihood.check(f, None if y is None else y.to(device))
            except ValueError as error:
                raise ToolError(f"{name}: {error}") from None
            if not likelihood.finite(f):
                raise ToolError(f"{name}: the model's outputs on batch {count} are not finite (NaN or Inf)")
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
    """The device by name, tried out."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        float(torch.zeros(1, device=device, dtype=torch.float64))  # "meta" has no values, mps no float64
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ToolError(f"device {name!r} cannot be used: {reason}") from None
    return device


def _check_finite(values: Any, name: str, what: str) -> None:
    def check(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ToolError(f"{name}: the first batches hold NaN or Inf in their {what}")
        return tensor

    map_tensors(values, check)


def _shapes(batch: Any) -> str:
    found: list[str] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}")
        return tensor

    map_tensors(batch, note)
    return ", ".join(found) or f"a {type(batch).__name__} without tensors"
