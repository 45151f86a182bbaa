"""Training with several processes (DistributedDataParallel): one Q and one set of masks for all.

DistributedDataParallel averages gradients. Q is learned outside of it, and each process has its own data.
So the state of the first process is used, and broadcast to all others.
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
    """Return whether other processes train the same model.

    If so, all processes must make the same calls of this module in the same order.

    Args:
        model: The model, possibly wrapped in DistributedDataParallel.

    Returns:
        True if the model is wrapped and its process group has more than one process.
    """
    return isinstance(model, DistributedDataParallel) and dist.get_world_size(_group(model)) > 1


def _group(model: nn.Module) -> dist.ProcessGroup:
    """Return the process group of a model that is wrapped in DistributedDataParallel."""
    assert isinstance(model, DistributedDataParallel)
    group: dist.ProcessGroup = model.process_group
    return group


@torch.no_grad()
def broadcast_from_first(model: nn.Module, tensors: Iterable[Tensor]) -> None:
    """Overwrite tensors with those of the first process; does nothing without other processes.

    Args:
        model: The model that the processes train.
        tensors: The tensors to overwrite in place, the same ones in the same order in each process.
    """
    if not is_distributed(model):
        return
    group = _group(model)
    for tensor in tensors:
        # Some backends support no booleans, and none supports strides.
        sent = tensor.detach().to(torch.uint8) if tensor.dtype == torch.bool else tensor.detach().contiguous()
        dist.broadcast(sent, dist.get_global_rank(group, 0), group=group)
        tensor.copy_(sent)


def mean_over_processes(model: nn.Module, value: float) -> float:
    """Return the mean of a number over the processes that train a model.

    Args:
        model: The model that the processes train.
        value: The number of this process.

    Returns:
        The mean; `value` itself without other processes.
    """
    if not is_distributed(model):
        return value
    total = torch.tensor(value, dtype=torch.float64, device=next(model.parameters()).device)
    dist.all_reduce(total, group=_group(model))
    return float(total) / int(dist.get_world_size(_group(model)))


def warn_if_not_shared(model: nn.Module) -> None:
    """Log a warning, once, if several processes run but do not train this model together.

    Args:
        model: The model, possibly wrapped in DistributedDataParallel.
    """
    if (
        dist.is_available()
        and dist.is_initialized()
        and dist.get_world_size() > 1
        and not is_distributed(model)
    ):
        _warn_once(dist.get_world_size())


@cache
def _warn_once(processes: int) -> None:
    """Log the warning; the cache suppresses repetitions."""
    logger.warning(
        "%d processes are running, and the model is not wrapped in DistributedDataParallel: each process "
        "learns its own Q and masks. To train one model together, pass the wrapped model",
        processes,
    )
