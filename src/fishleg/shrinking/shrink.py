"""Shrinking: remove rows and columns that do not affect the outputs, so that the model becomes faster.

Whole rows of zeros (pattern "rows") cost as much time as other rows until they are removed. `shrink` finds
all that depends on them, removes it, and checks the smaller model against the original one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from fishleg.runtime.batches import Forward, default_forward, move_batch
from fishleg.runtime.models import abbreviate, copy_model
from fishleg.runtime.process_group import get_logger
from fishleg.runtime.tensors import loading_problem
from fishleg.shrinking.channel_graph import ChannelGraph
from fishleg.shrinking.resize import check_sizes, replace_tensors, select_indices
from fishleg.shrinking.trace import parameter_or_buffer, trace_channels
from fishleg.shrinking.verify import check_same_outputs

logger = get_logger(__name__)
_WHY_KEPT = (
    "their outputs are added to outputs that are not zero, are outputs of the model, or enter an operation "
    "that is not supported"
)


def shrink(model: nn.Module, batch: Any, *, forward: Forward = default_forward) -> nn.Module:
    """Return a copy of a pruned model without the rows and columns that its outputs do not depend on.

    The model is traced with `torch.export` in evaluation mode. Finally both models must have the same outputs
    for the batch, and for random numbers in its place. Everything that the model returns keeps its shape and
    values. Branches that the model does not take for this batch are not seen.

    Args:
        model: The pruned model; it is not changed.
        batch: One batch of the loader.
        forward: `forward(model, batch) -> outputs`. A function that returns fewer outputs may allow more to
            be removed.

    Returns:
        The smaller model, of the same class. Load its state dict with `load_shrunk`.

    Raises:
        ValueError: If nothing can be removed, the model cannot be traced, or it does not run with smaller
            tensors.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> with torch.no_grad():
        ...     model[0].weight[:10], model[0].bias[:10] = 0, 0
        >>> shrink(model, torch.randn(2, 8))
        Sequential(
          (0): Linear(in_features=8, out_features=6, bias=True)
          (1): ReLU()
          (2): Linear(in_features=6, out_features=4, bias=True)
        )
    """
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        model = model.module
    if not any(True for _ in model.parameters()):
        raise ValueError("nothing can be cut out: the model has no parameters")
    batch = move_batch(batch, next(model.parameters()).device)
    graph, unused = trace_channels(copy_model(model).eval(), batch, forward)
    small = copy_model(model)
    smaller = {
        name: select_indices(parameter_or_buffer(small, name), {dim: graph.keep(name, dim) for dim in places})
        for name, places in graph.places.items()
        if not all(bool(graph.keep(name, dim).all()) for dim in places)
    }
    kept = _kept_zero_rows(small, graph)
    if not smaller:
        reason = 'no row of a weight is zero together with its bias (pattern="rows" prunes whole rows)'
        if kept:
            reason = f"{sum(kept.values())} rows of {abbreviate(list(kept))} are zero, but {_WHY_KEPT}"
        raise ValueError(f"nothing can be cut out: {reason}")
    replace_tensors(small, smaller)
    check_same_outputs(model, small, batch, forward, unused)
    if kept:
        rows = sum(kept.values())
        logger.warning("%d rows of %s are zero but are kept: %s", rows, abbreviate(list(kept)), _WHY_KEPT)
    if unused:
        logger.warning(
            "%s did not affect the outputs for this batch and are kept: if they are used in another way, for "
            "example in training, their shapes may not fit the smaller model",
            abbreviate(unused),
        )
    return small


def load_shrunk(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Shrink a model to the sizes of a shrunk model's state dict, and load it.

    Args:
        model: A model of the original size; it is changed in place.
        state: The state dict of a model that `shrink` returned.

    Returns:
        The model.

    Raises:
        ValueError: If the state belongs to another model: other names, a tensor that is larger than the
            model's, or sizes that contradict each other within a layer. Also if it holds NaN or Inf, or
            values of another kind, such as integers. The model is not changed then.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> small = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
        >>> load_shrunk(model, small.state_dict())[0].out_features
        6
    """
    own = model.state_dict()
    if own.keys() != state.keys():
        differ = sorted(own.keys() ^ state.keys())
        raise ValueError(f"the state is that of another model: only one of the two has {abbreviate(differ)}")
    for name in own:
        shapes = tuple(state[name].shape), tuple(own[name].shape)
        if len(shapes[0]) != len(shapes[1]) or any(a > b for a, b in zip(*shapes, strict=True)):
            raise ValueError(
                f"{name} has shape {shapes[0]} in the state, which must not exceed {shapes[1]} of the model: "
                "the state is that of another model"
            )
    check_sizes(model, {name: value.shape for name, value in state.items()})
    for name in own:
        if (problem := loading_problem(state[name], own[name])) is not None:
            raise ValueError(f"{name} {problem}")
    smaller = {name: value for name, value in state.items() if value.shape != own[name].shape}
    replace_tensors(model, {name: value.detach().clone().to(own[name]) for name, value in smaller.items()})
    model.load_state_dict(state)
    return model


def _kept_zero_rows(model: nn.Module, graph: ChannelGraph) -> dict[str, int]:
    """Return by weight the number of rows that are zero but cannot be removed."""
    matrices = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    found = {}
    for module_name, module in model.named_modules():
        weight = getattr(module, "weight", None) if isinstance(module, matrices) else None
        if weight is None or not bool((weight != 0).any()):
            continue
        name = f"{module_name}.weight" if module_name else "weight"
        zero = (weight.detach().flatten(1) == 0).all(1).cpu()
        if 0 in graph.places.get(name, {}):
            zero &= graph.keep(name, 0)
        if bool(zero.any()):
            found[name] = int(zero.sum())
    return found
