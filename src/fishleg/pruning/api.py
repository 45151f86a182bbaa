"""The one call: a trained model and a loader in, a sparse model out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from fishleg.curvature.likelihoods import Likelihood
from fishleg.pruning import diagnostics
from fishleg.pruning.gradual import Progress, gradual
from fishleg.pruning.patterns import as_pattern
from fishleg.pruning.schedules import plain, plan_schedule
from fishleg.pruning.surgeon import PruneStep, Surgeon
from fishleg.pruning.tuning import FineTuningOptions
from fishleg.runtime.batches import Forward, default_forward
from fishleg.runtime.models import copy_model
from fishleg.runtime.modes import gradients_enabled
from fishleg.runtime.random_state import seeded

MODES = ("staged", "one-shot", "gradual")


def prune(
    model: nn.Module,
    loader: Iterable[Any],
    sparsity: float | Sequence[float] | None = None,
    *,
    likelihood: Likelihood | str = "categorical",
    mode: str = "staged",
    stages: int | None = None,
    kind: str = "exponential",
    tuning: FineTuningOptions | None = None,
    train_loader: Iterable[Any] | None = None,
    inplace: bool = False,
    seed: int = 0,
    forward: Forward = default_forward,
    progress: Callable[[str], None] | None = None,
    on_stage: Callable[[PruneStep], None] | None = None,
    **options: Any,
) -> nn.Module:
    """A sparse copy of a trained model (the model itself with inplace=True).

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> sparse = prune(model, [torch.randn(64, 8) for _ in range(4)], 0.5, progress=lambda line: None)
    >>> int((sparse[0].weight == 0).sum() + (sparse[2].weight == 0).sum())
    96

    loader: calibration batches; inputs suffice, except for mode="gradual" without distillation.
    sparsity: the fraction of weights to remove (default 0.9, or all that an N:M pattern asks for), or the
        list of all intermediate ones.
    mode: "staged" (prune, compensate, look again; no training), "one-shot" (a single stage), or "gradual"
        (train after each stage, as `tuning` says, on `train_loader` or else `loader`).
    stages, kind: the schedule, see `patterns.schedule`; by default enough stages that each keeps 75 % (of
        whole rows without training, 95 %). They begin at the sparsity that the model has already.
    options: fields of `PruningOptions`, for instance pattern="2:4", exclude=["^fc"], method="magnitude".
    progress: receives a line per stage; default: standard error.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if tuning is not None and mode != "gradual":
        raise ValueError(f"tuning needs mode='gradual', got mode={mode!r}")
    if train_loader is not None and mode != "gradual":
        raise ValueError(f"train_loader needs mode='gradual', got mode={mode!r}")
    given = options.get("options")
    pattern = given.pattern if given is not None else options.get("pattern", "global")
    plan_schedule(sparsity, as_pattern(pattern), mode, stages, kind)  # what is wrong is told at once
    report = _to_stderr if progress is None else progress
    model = model if inplace else copy_model(model, ", or pass inplace=True to prune the model itself")
    with seeded(seed, loader, train_loader):  # what looks at the data may draw random numbers
        surgeon = Surgeon(
            model, loader, likelihood, forward=forward,
            generator=torch.Generator().manual_seed(seed), **options,
        )  # fmt: skip
    targets = plan_schedule(sparsity, surgeon.pattern, mode, stages, kind, start=surgeon.share_of_zeros)
    surgeon.check_removes(targets[0] if isinstance(plain(sparsity), Sequence) else targets[-1])

    def pruned(step: PruneStep) -> None:
        # with Q = I the quadratic model speaks of weights, not of the loss
        predicts = surgeon.options.method != "magnitude"
        known = [f"predicted {step.predicted:.3g}"] * predicts
        known += [] if step.measured is None else [f"measured {step.measured:.3g}"]
        kl = f": KL of this step {', '.join(known)}" if known else ""
        report(f"[{len(surgeon.history)}/{len(targets)}] sparsity {step.sparsity:.1%}{kl}")

    def pruned_for_good(step: PruneStep) -> None:
        pruned(step)
        if on_stage is not None:
            on_stage(step)

    def step_done(p: Progress) -> None:
        if p.step in (1, p.steps) or p.step % 100 == 0:
            report(f"[{p.stage + 1}/{p.stages}] step {p.step}/{p.steps}: training loss {p.loss:.4f}")

    with gradients_enabled(), seeded(seed, loader, train_loader):  # shuffling and dropout, too
        dense = surgeon.output_change.outputs()
        if mode == "gradual":
            gradual(
                surgeon,
                targets,
                train_loader,
                tuning,
                on_prune=pruned,
                on_step=step_done,
                on_stage=on_stage,
            )
        else:
            surgeon.staged(targets, pruned_for_good)
        moved = surgeon.output_change.moved(dense)
    if mode != "gradual" and surgeon.options.method != "magnitude":
        diagnostics.warn_about_total(surgeon.sparsity, [step.predicted for step in surgeon.history], moved)
    total = "" if moved is None else f"; KL to the dense model's outputs {moved:.3g} on the first batches"
    what = "rows" if surgeon.pattern.whole_rows else "prunable weights"
    report(f"done: {surgeon.sparsity:.1%} of the {what} removed{total}")
    return model


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
