"""Training with several processes (DistributedDataParallel): one Q and one set of masks for all.

DistributedDataParallel averages gradients. Q is learned outside of it, and each process has its own data.
So the state of the first process is used, and broadcast to all others.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel


def world_size() -> int:
    """Return how many processes were started together; nothing is initialised.

    Returns:
        The size of the process group, or else what the launcher (torchrun) has put into WORLD_SIZE, or 1.
    """
    if dist.is_available() and dist.is_initialized():
        return int(dist.get_world_size())
    return _number_from_environment("WORLD_SIZE", 1)


def is_first_process() -> bool:
    """Return whether this is the only process, or the first of several: the one that reports.

    Returns:
        True if its rank is 0.
    """
    if dist.is_available() and dist.is_initialized():
        return int(dist.get_rank()) == 0
    return world_size() < 2 or _number_from_environment("RANK", 0) == 0


def _number_from_environment(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default


class _FromFirstProcess(logging.Filter):
    """Lets everything pass in the first process, and errors only in the others."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.WARNING or is_first_process()


def get_logger(name: str) -> logging.Logger:
    """Return a logger whose warnings come from the first of several processes only.

    Args:
        name: The name of the module.

    Returns:
        The logger of that name.
    """
    found = logging.getLogger(name)
    if not any(isinstance(each, _FromFirstProcess) for each in found.filters):
        found.addFilter(_FromFirstProcess())
    return found


logger = get_logger(__name__)


def check_not_sharded(model: nn.Module) -> None:
    """Refuse a model whose parameters are divided among processes.

    Args:
        model: The model.

    Raises:
        ValueError: The model is sharded: FSDP, or parameters that are DTensors.
    """
    wrapped = [m for m in model.modules() if _is_a(m, "FullyShardedDataParallel") or _is_a(m, "FSDPModule")]
    sharded = [name for name, p in model.named_parameters() if _is_a(p, "DTensor")]
    if not wrapped and not sharded:
        return
    if not wrapped:
        kind = f"DTensor parameters ({sharded[0]})"
    elif _is_a(wrapped[0], "FSDPModule"):
        kind = "fully_shard (FSDP2)"
    else:
        kind = "FullyShardedDataParallel (FSDP)"
    raise ValueError(
        f"the model is sharded by {kind}, and fishleg needs whole parameters in each process: wrap it "
        "in DistributedDataParallel instead (keep_zeros with an optimizer of torch works for sharded models)"
    )


def _is_a(value: object, name: str) -> bool:
    """Return whether a class of torch.distributed is among the types of a value; nothing is imported."""
    return any(
        each.__name__ == name and each.__module__.startswith("torch.distributed")
        for each in type(value).__mro__
    )


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


def gather_numbers(model: nn.Module, *numbers: int) -> list[tuple[int, ...]]:
    """Return whole numbers of every process that trains a model.

    Args:
        model: The model that the processes train.
        numbers: The numbers of this process.

    Returns:
        The numbers by rank; only those of this process without others.
    """
    if not is_distributed(model):
        return [numbers]
    sent = torch.tensor(numbers, device=next(model.parameters()).device)
    found = [torch.zeros_like(sent) for _ in range(dist.get_world_size(_group(model)))]
    dist.all_gather(found, sent, group=_group(model))
    return [tuple(one) for one in torch.stack(found).tolist()]


def check_equal_numbers(model: nn.Module, number: int, what: str, remedy: str) -> None:
    """Check, in all processes at once, that each has the same number.

    Args:
        model: The model that the processes train.
        number: The number of this process.
        what: What the number counts, for the message.
        remedy: What to do, for the message.

    Raises:
        ValueError: The numbers differ. All processes raise it.
    """
    numbers = [one for (one,) in gather_numbers(model, number)]
    if len(set(numbers)) > 1:
        raise ValueError(
            f"the processes differ in the number of {what}: {_by_rank(numbers)}. They would wait for each "
            f"other without end: {remedy}"
        )


def agree_on_batch(model: nn.Module, name: str, drawn: int, error: Exception | None) -> None:
    """Raise in all processes if one of them could not draw a batch; the others would wait for it.

    Args:
        model: The model that the processes train.
        name: What messages call the loader.
        drawn: How many batches this process has drawn.
        error: What this process got instead of a batch; None: a batch.

    Raises:
        ValueError: A process has no batch.
    """
    if not is_distributed(model):
        if error is not None:
            raise error
        return
    drawn_by, failed = zip(*gather_numbers(model, drawn, int(error is not None)), strict=True)
    ranks = [str(rank) for rank, flag in enumerate(failed) if flag]
    if ranks:
        reason = "" if error is None else f" ({type(error).__name__}: {error})"
        raise ValueError(
            f"{name} gave no further batch on rank {', '.join(ranks)}{reason}. Batches drawn: "
            f"{_by_rank(drawn_by)}. Each process needs a loader that can be read again and again"
        ) from error


def agreed_batches(model: nn.Module, batches: Iterator[Any], name: str) -> Iterator[Any]:
    """Iterate over batches in all processes at once: if one has no further batch, all of them raise.

    Args:
        model: The model that the processes train; without other processes nothing is exchanged.
        batches: The batches of this process, without end.
        name: What messages call the loader.

    Yields:
        The batches.
    """
    drawn = 0
    while True:
        batch, error = None, None
        try:
            batch = next(batches)
            drawn += 1
        except StopIteration:
            return
        except Exception as found:
            error = found
        agree_on_batch(model, name, drawn, error)
        yield batch


def _by_rank(numbers: Iterable[int]) -> str:
    return ", ".join(f"rank {rank} has {number}" for rank, number in enumerate(numbers))


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
