"""Facts about a run for its record: what is pruned, layers, speed, what results may depend on."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

import fishleg
from fishleg.pruning.saliency import saliency
from fishleg.pruning.surgeon import Surgeon
from fishleg.runs.metrics import Evaluation, Evaluator
from fishleg.runs.recipe import Recipe
from fishleg.runtime.batches import Forward, batch_size, move_batch


def describe_run(
    recipe: Recipe, surgeon: Surgeon, evaluator: Evaluator, macs: Mapping[str, int], dense: Evaluation
) -> dict[str, Any]:
    """What is pruned, how, and how good it is before."""
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


def run_warnings(
    recipe: Recipe, surgeon: Surgeon, evaluator: Evaluator, macs: Mapping[str, int], dense: Evaluation
) -> Iterator[str]:
    """What a user may not have thought of, one sentence each."""
    if not recipe.data.eval_data and evaluator.most_batches is not None:
        yield (
            f"the {evaluator.name} is measured on the calibration data; name data that the model "
            "has not seen (eval_data) to know what pruning really costs"
        )
    unknown = [name for name in surgeon.weights.names if name not in macs]
    if unknown:
        yield (
            f"the multiply-adds of {', '.join(unknown[:3])}{' ...' if len(unknown) > 3 else ''} are not "
            "known (used by no module that can be watched): all figures, and max_flops, leave them out"
        )
    chance = 1 / max(evaluator.classes, 1)
    if evaluator.name == "accuracy" and dense.metric < 1.5 * chance:
        yield (
            f"the dense model's accuracy is {dense.metric:.1%}, which is near chance: is it trained "
            "(weights), and are labels and classes in the same order?"
        )


def describe_layers(surgeon: Surgeon, macs: Mapping[str, int]) -> list[dict[str, Any]]:
    """Every weight matrix and every pruned parameter: size, sparsity, why it is not pruned, saliency."""
    found = []
    for name, p in surgeon.model.named_parameters():
        if p.dim() < 2 and surgeon.weights.reasons[name] is not None:
            continue
        found.append(
            {
                "name": name, "shape": list(p.shape), "size": p.numel(),
                "sparsity": float((p == 0).float().mean()), "reason": surgeon.weights.reasons[name],
                "macs": macs.get(name), "saliency": saliency_quantiles(surgeon, name),
            }
        )  # fmt: skip
    return found


@torch.no_grad()
def saliency_quantiles(surgeon: Surgeon, name: str) -> list[float] | None:
    """5, 25, 50, 75 and 95 % of the kept weights' saliency."""
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
    places = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=values.dtype, device=values.device)
    return [float(v) for v in torch.quantile(values[: 2**24 - 1], places)]  # its limit on the size


@torch.no_grad()
def compare_speed(
    dense: nn.Module, sparse: nn.Module, batch: Any, forward: Forward, seconds: float = 1.0
) -> dict[str, Any]:
    """Milliseconds of a forward pass of both, in turns, as medians; both run dense kernels."""
    batch = move_batch(batch, next(sparse.parameters()).device)
    times: tuple[list[float], list[float]] = [], []
    modes = {module: module.training for module in sparse.modules()}
    sparse.eval()
    try:
        deadline = time.monotonic() + seconds
        while len(times[0]) < 3 or (time.monotonic() < deadline and len(times[0]) < 50):
            for model, found in zip((dense, sparse), times, strict=True):
                before = time.perf_counter()
                forward(model, batch)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                found.append(1000 * (time.perf_counter() - before))
    finally:
        for module, mode in modes.items():
            module.training = mode
    dense_ms, sparse_ms = (statistics.median(found[1:]) for found in times)
    what = f"one batch of {batch_size(batch)}, dense kernels: zeros are multiplied like any other number"
    if sum(p.numel() for p in sparse.parameters()) < sum(p.numel() for p in dense.parameters()):
        what = f"one batch of {batch_size(batch)}, removed rows cut out"
    return {"dense_ms": dense_ms, "sparse_ms": sparse_ms, "what": what}


def environment(model: nn.Module | None = None) -> dict[str, str]:
    """What a result may depend on."""
    device = "cpu" if model is None else str(next(model.parameters()).device)
    return {
        "fishleg": fishleg.__version__, "torch": torch.__version__, "python": platform.python_version(),
        "platform": platform.platform(), "device": device, "threads": str(torch.get_num_threads()),
    }  # fmt: skip
