"""The one call: a trained model and a loader in, a sparse model out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from fishleg.curvature.likelihoods import Likelihood
from fishleg.options import FineTuningOptions, OptionError, PruningOptions, RunOptions, ScheduleOptions
from fishleg.pruning.events import Event
from fishleg.pruning.patterns import Pattern
from fishleg.pruning.schedules import as_number, plan_schedule
from fishleg.pruning.session import PruningSession
from fishleg.runtime.batches import Forward, default_forward
from fishleg.runtime.models import copy_model
from fishleg.runtime.modes import gradients_enabled
from fishleg.runtime.process_group import check_not_sharded, is_first_process
from fishleg.runtime.random_state import seeded


def prune(
    model: nn.Module,
    loader: Iterable[Any],
    sparsity: float | str | Sequence[float | str] | None = None,
    *,
    pattern: Pattern | str | None = None,
    method: str | None = None,
    exclude: Sequence[str] = (),
    mode: str = "staged",
    stages: int | None = None,
    likelihood: Likelihood | str = "categorical",
    options: PruningOptions | None = None,
    fine_tuning: FineTuningOptions | None = None,
    train_loader: Iterable[Any] | None = None,
    forward: Forward = default_forward,
    inplace: bool = False,
    seed: int = 0,
    progress: Callable[[Event], None] | None = None,
) -> nn.Module:
    """Return a sparse copy of a trained model.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> sparse = prune(model, [torch.randn(64, 8) for _ in range(4)], 0.5, progress=lambda event: None)
    >>> int((sparse[0].weight == 0).sum() + (sparse[2].weight == 0).sum())
    96

    Args:
        model: The trained model.
        loader: Calibration batches. Inputs suffice, except for mode "gradual" without distillation.
        sparsity: The share of the prunable weights to remove (0.9 or "90%"), or the list of the sparsities
            after each stage. Default: all that an N:M pattern asks for, else 0.9.
        pattern: What is removed together: "global", "layer", "2:4" (any N:M), "block:4", "rows" or a
            `Pattern`. Default: "global".
        method: Which Q scores and compensates. Default: "fishleg".
        exclude: Parameters, modules or regular expressions that are left dense.
        mode: "staged" (prune and compensate in several stages; no training), "one-shot" (a single stage), or
            "gradual" (train after each stage).
        stages: The number of stages. By default each keeps 75 % of what the last one left (95 % of whole
            rows without training). They begin at the sparsity that the model has already.
        likelihood: The distribution of the outputs, or its name.
        options: All other options, instead of pattern, method and exclude.
        fine_tuning: How to train in mode "gradual".
        train_loader: Training batches of mode "gradual"; default: `loader`.
        forward: How the model is called on a batch.
        inplace: Prune the model itself instead of a copy.
        seed: The seed of everything random.
        progress: Receives every event; default: a line for each on standard error.

    Returns:
        The sparse model, of the same class.

    Raises:
        ValueError: An argument is wrong, or nothing would be removed.
    """
    options = _merged(options, pattern, method, exclude)
    ScheduleOptions(mode=mode, stages=stages)  # the rules of the declarations hold here, too
    seed = RunOptions(seed=seed).seed
    _check_training(mode, fine_tuning, train_loader)
    if isinstance(model, nn.Module):  # otherwise the session says what is wrong with it
        check_not_sharded(model)
    model = model if inplace else copy_model(model, ", or pass inplace=True to prune the model itself")
    with seeded(seed, loader, train_loader):  # to look at the data may draw random numbers
        session = PruningSession(
            model, loader, likelihood=likelihood, options=options, train_loader=train_loader, forward=forward,
            fine_tuning=(fine_tuning or FineTuningOptions()) if mode == "gradual" else None,
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
    surgeon = session.surgeon
    present = surgeon.weights.share_of_zeros
    targets = plan_schedule(sparsity, surgeon.pattern, mode, stages, start=present)
    listed = isinstance(as_number(sparsity), Sequence) and not isinstance(sparsity, str)
    surgeon.check_removes(targets[0] if listed else targets[-1])
    report = _to_stderr if progress is None else progress
    with gradients_enabled(), seeded(seed, loader, train_loader):  # for shuffling and dropout
        for event in session.run(targets):
            report(event)
    return model


def _merged(
    options: PruningOptions | None, pattern: Pattern | str | None, method: str | None, exclude: Sequence[str]
) -> PruningOptions:
    """Return the options, or those that the short keywords give.

    Raises:
        OptionError: Both are given.
    """
    short: dict[str, Any] = {
        "pattern": pattern,
        "method": method,
        "exclude": None if exclude == () else exclude,
    }
    given = {name: value for name, value in short.items() if value is not None}
    if options is not None and given:
        raise OptionError(f"pass either options or {', '.join(given)}, got both")
    return PruningOptions(**given) if options is None else options


def _check_training(mode: str, fine_tuning: object | None, train_loader: object | None) -> None:
    for name, value in (("fine_tuning", fine_tuning), ("train_loader", train_loader)):
        if value is not None and mode != "gradual":
            raise OptionError(f"{name} needs mode='gradual', got mode={mode!r}")


def _to_stderr(event: Event) -> None:
    if (line := str(event)) and is_first_process():
        print(line, file=sys.stderr, flush=True)
