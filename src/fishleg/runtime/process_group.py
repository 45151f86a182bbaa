"""Several processes that train one model: they must have one Q and one set of masks.

Gradients are averaged by DistributedDataParallel, but Q is learned outside of it, and each process has data
of its own. So what it learns is that of the first process, and all others get it from there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

logger = logging.getLogger(__name__)


def is_distributed(model: nn.Module) -> bool:
    """Whether other processes train the same model; all of them have to make the same calls then."""
    return isinstance(model, DistributedDataParallel) and dist.get_world_size(_group(model)) > 1


def _group(model: nn.Module) -> dist.ProcessGroup:
    assert isinstance(model, DistributedDataParallel)
    group: dist.ProcessGroup = model.process_group
    return group


@torch.no_grad()
def broadcast_from_first(model: nn.Module, tensors: Iterable[Tensor]) -> None:
    """Overwrite these tensors by those of the first process that shares the model."""
    if not is_distributed(model):
        return
    group = _group(model)
    for tensor in tensors:
        # some backends know no booleans, and none knows strides
        sent = tensor.detach().to(torch.uint8) if tensor.dtype == torch.bool else tensor.detach().contiguous()
        dist.broadcast(sent, dist.get_global_rank(group, 0), group=group)
        tensor.copy_(sent)


def mean_over_processes(model: nn.Module, value: float) -> float:
    """The mean of a number over the processes that share the model."""
    if not is_distributed(model):
        return value
    total = torch.tensor(value, dtype=torch.float64, device=next(model.parameters()).device)
    dist.all_reduce(total, group=_group(model))
    return float(total) / int(dist.get_world_size(_group(model)))


def warn_if_not_shared(model: nn.Module) -> None:
    """Say so when there are other processes that this model is not shared with."""
    if (
        dist.is_available()
        and dist.is_initialized()
        and dist.get_world_size() > 1
        and not is_distributed(model)
    ):
        _tell(dist.get_world_size())


@cache
def _tell(processes: int) -> None:
    logger.warning(
        "%d processes are running, and the model is not wrapped in DistributedDataParallel: each of them "
        "gets a Q and masks of its own. To train one model together, pass the wrapped model",
        processes,
    )
