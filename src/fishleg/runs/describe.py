"""Facts for the record of a run: the model, its layers, the options, the environment."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import fishleg
from fishleg.pruning import Finished
from fishleg.pruning.saliency import saliency
from fishleg.pruning.surgeon import Surgeon
from fishleg.runs.metrics import Evaluation, Evaluator
from fishleg.runs.recipe import Recipe
from fishleg.runs.setup import Prepared


def first_record(prepared: Prepared, command: str) -> dict[str, Any]:
    """Return what the record of a run holds before any work; a killed run can begin again from it.

    Args:
        prepared: What the recipe names, built and checked.
        command: The command line.

    Returns:
        Values for JSON.
    """
    return {
        "name": prepared.recipe.model.model,
        "base": str(prepared.base),
        "threads": torch.get_num_threads(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": command,
        "recipe": prepared.recipe.sections(),
        "warnings": [],
        "resumed": 0,
        "checkpoints": 0,
    }


def describe_total(surgeon: Surgeon, finished: Finished, recipe: Recipe) -> dict[str, Any] | None:
    """Return the predicted and the measured change of the outputs over all stages, and what to think of it.

    Args:
        surgeon: The surgeon of the run, after its last step.
        finished: The last event of its session.
        recipe: All options of the run.

    Returns:
        Values for JSON; None where the model was trained, which changes its outputs as well.
    """
    if recipe.trains is not None:
        return None
    return {
        "predicted": finished.predicted, "measured": finished.divergence, "steps": len(surgeon.history),
        "verdict": finished.verdict,
    }  # fmt: skip


def describe_run(
    recipe: Recipe, surgeon: Surgeon, evaluator: Evaluator, macs: Mapping[str, int], dense: Evaluation
) -> dict[str, Any]:
    """Return the facts that are known at the start of a run.

    Args:
        recipe: All options of the run.
        surgeon: The surgeon of the run, before its first step.
        evaluator: Measures the model.
        macs: Multiply-adds by weight name.
        dense: The evaluation of the dense model.

    Returns:
        Values for JSON.
    """
    model = surgeon.model
    return {
        "dense": {"metric": dense.metric, "loss": dense.loss},
        "metric": evaluator.name, "metric_unit": evaluator.unit,
        "higher_is_better": evaluator.higher_is_better,
        "mode": recipe.schedule.mode, "method": recipe.pruning.method, "pattern": recipe.pruning.pattern,
        "likelihood": recipe.model.likelihood, "parameters": sum(p.numel() for p in model.parameters()),
        "prunable": sum(model.get_parameter(name).numel() for name in surgeon.weights.names),
        "macs_dense": sum(macs.values()), "environment": environment(model),
        "layers": describe_layers(surgeon, macs),
    }  # fmt: skip


def describe_layers(surgeon: Surgeon, macs: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the facts about every weight matrix and every other pruned parameter.

    Args:
        surgeon: The surgeon of the run.
        macs: Multiply-adds by weight name.

    Returns:
        For each parameter its name, shape, size, sparsity, multiply-adds, the reason why it is not pruned
        (None if it is), and quantiles of its saliency.
    """
    found = []
    for name, p in surgeon.model.named_parameters():
        if p.dim() < 2 and surgeon.weights.reasons[name] is not None:
            continue
        found.append(
            {
                "name": name, "shape": list(p.shape), "size": p.numel(),
                "sparsity": float((p == 0).float().mean()), "reason": surgeon.weights.reasons[name],
                "macs": macs.get(name), "saliency": _saliency_quantiles(surgeon, name),
            }
        )  # fmt: skip
    return found


@torch.no_grad()
def _saliency_quantiles(surgeon: Surgeon, name: str) -> list[float] | None:
    """Return the 5, 25, 50, 75 and 95 % quantiles of the kept weights' saliency, or None without Q."""
    inverse = surgeon.curvature.inverse
    if inverse is None or name not in surgeon.weights.names:
        return None
    layer = surgeon.weights.layers[name]
    w = layer.pack({part: surgeon.model.get_parameter(part).detach() for part in layer.names})
    operator = inverse.unmasked(layer.name)
    values = layer.unpack(saliency(w.to(inverse.reference(layer.name).dtype), operator))[name].flatten()
    values = values[values > 0]
    if not values.numel():
        return None
    quantiles = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=values.dtype, device=values.device)
    # torch.quantile takes at most 2²⁴ values
    return [float(v) for v in torch.quantile(values[: 2**24 - 1], quantiles)]


def environment(model: nn.Module | None = None) -> dict[str, str]:
    """Return the versions and settings that results may depend on.

    Args:
        model: The model whose device is reported; default: the CPU.

    Returns:
        The versions of fishleg, torch and Python, the platform, the device and the number of threads.
    """
    device = "cpu" if model is None else str(next(model.parameters()).device)
    return {
        "fishleg": fishleg.__version__, "torch": torch.__version__, "python": platform.python_version(),
        "platform": platform.platform(), "device": device, "threads": str(torch.get_num_threads()),
    }  # fmt: skip
