"""How the statistics of BatchNorms are refreshed, and when a model may normalise by the batch."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fishleg.runtime.batch_errors import naming_the_batch
from fishleg.runtime.batches import (
    Forward,
    batch_size,
    default_forward,
    move_batch,
)
from fishleg.runtime.loaders import cycle
from fishleg.runtime.modes import eager_mode, evaluation_mode
from fishleg.runtime.process_group import agreed_batches, get_logger
from fishleg.runtime.random_state import seeded
from fishleg.runtime.tensors import at_least_float32, first_non_finite

logger = get_logger(__name__)


def can_use_batch_statistics(model: nn.Module, batch: Any) -> bool:
    """Return whether normalising by the batch makes a difference and is possible.

    Args:
        model: The model.
        batch: A batch of any format.

    Returns:
        True if a BatchNorm is in training mode and the batch has more than one example.
    """
    norms = (m for m in model.modules() if isinstance(m, _BatchNorm) and m.training)
    return batch_size(batch) > 1 and any(norms)


def refreshable_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers whose running statistics may be renewed.

    A layer is left out if it does not track statistics or is frozen. It counts as frozen if its parameters
    are, or if it is in evaluation mode while the model is in training mode.

    Args:
        model: The model.

    Returns:
        The layers in the model's order.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    norms = [norm for norm in norms if norm.training or not model.training]
    return [norm for norm in norms if norm.weight is None or norm.weight.requires_grad]


@contextmanager
def batch_statistics_mode(model: nn.Module) -> Iterator[None]:
    """Put the layers of `refreshable_norms` into training mode, and restore their modes afterwards.

    Args:
        model: The model; all other modules keep their modes.
    """
    norms = refreshable_norms(model)
    modes = [norm.training for norm in norms]
    try:
        for norm in norms:
            norm.training = True
        yield
    finally:
        for norm, mode in zip(norms, modes, strict=True):
            norm.training = mode


@torch.no_grad()
def batchnorm_input_moments(
    model: nn.Module, batch: Any, forward: Forward = default_forward
) -> dict[_BatchNorm, list[Tensor]]:
    """Compute Σx and Σx² per channel of the inputs of the BatchNorm layers, in evaluation mode.

    The random generators are seeded, so that random operations of the model give the same result each time.
    The model and the generators are not changed.

    Args:
        model: The model.
        batch: A batch of any format, on the model's device.
        forward: `forward(model, batch) -> outputs`.

    Returns:
        For each layer of `refreshable_norms`, one tensor [2, channels] per call of the layer.
    """
    moments: dict[_BatchNorm, list[Tensor]] = {norm: [] for norm in refreshable_norms(model)}

    def record(norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(norm, _BatchNorm)
        x = at_least_float32(args[0] if args else kwargs["input"]).transpose(0, 1).flatten(1)
        moments[norm].append(torch.stack([x.sum(1), x.square().sum(1)]))

    if not moments:
        return moments
    hooks = [norm.register_forward_pre_hook(record, with_kwargs=True) for norm in moments]
    try:
        with eager_mode(), evaluation_mode(model), seeded(0):
            forward(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return moments


@torch.no_grad()
def refresh_batchnorm(
    model: nn.Module,
    loader: Iterable[Any],
    batches: int = 20,
    forward: Forward = default_forward,
    only: Collection[nn.Module] | None = None,
    name: str = "the loader",
) -> int:
    """Re-estimate the running statistics of BatchNorm layers on some batches.

    The layers are those of `refreshable_norms`. Every example has the same weight. A batch that gives a
    channel only one value is left out. The mode of every module is restored. If an exception is raised, the
    old statistics are restored.

    Args:
        model: The model.
        loader: The loader of the batches.
        batches: The number of batches.
        forward: `forward(model, batch) -> outputs`.
        only: If given, only these layers are renewed; the others normalise by their present statistics.
        name: What messages call the loader.

    Returns:
        The number of layers with new statistics.

    Raises:
        ValueError: A batch makes the statistics NaN or infinite; the message names it.
    """
    norms = [norm for norm in refreshable_norms(model) if only is None or norm in only]
    if not norms or batches < 1:
        return 0
    device = next(norms[0].buffers()).device
    modes = {module: module.training for module in model.modules()}
    momenta = {norm: norm.momentum for norm in norms}
    before = {norm: copy.deepcopy(norm.state_dict()) for norm in norms}
    averages = _ExampleAverages(norms)
    try:
        model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.train()
        stream = cycle(loader, name)
        for _, batch in zip(range(batches), agreed_batches(model, stream, name), strict=False):
            with naming_the_batch(stream.place):
                with eager_mode(), averages.counting(batch):
                    forward(model, move_batch(batch, device))
                _check_finite(norms)
        if not any(averages.examples.values()):
            logger.warning(
                "BatchNorm keeps its running statistics from before pruning: renewing them needs batches of "
                "more than one example, and the loader yields none"
            )
        # A layer that is not used in evaluation mode, for example in an auxiliary head, keeps its statistics.
        untouched = {norm: old for norm, old in before.items() if not int(norm.num_batches_tracked or 0)}
        _restore(untouched)
    except BaseException:
        _restore(before)
        raise
    finally:
        for module, mode in modes.items():
            module.training = mode
        for norm, momentum in momenta.items():
            norm.momentum = momentum
        averages.close()
    return len(norms) - len(untouched)


class _ExampleAverages:
    """Sets the momentum of BatchNorm layers so that every example has the same weight in the average."""

    def __init__(self, norms: Sequence[_BatchNorm]) -> None:
        self.examples: dict[_BatchNorm, int] = dict.fromkeys(norms, 0)  # seen so far, by layer
        self._size = 0  # examples in the current batch
        self._hooks = [norm.register_forward_pre_hook(self._count) for norm in norms]

    def _count(self, norm: nn.Module, _: Any) -> None:
        assert isinstance(norm, _BatchNorm)
        self.examples[norm] += self._size
        norm.momentum = self._size / self.examples[norm]

    @contextmanager
    def counting(self, batch: Any) -> Iterator[None]:
        """Count the examples of the batch on which the model is called inside of the block.

        A batch with one value per channel, which BatchNorm rejects, is not counted.

        Raises:
            ValueError: Every other ValueError of the model's call.
        """
        try:
            self._size = batch_size(batch)
        except ValueError:
            self._size = 1  # the number of examples is unknown: every batch has the same weight
        examples = dict(self.examples)
        numbers = {norm: copy.deepcopy(norm.num_batches_tracked) for norm in self.examples}
        try:
            yield
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            self.examples = examples
            for norm, number in numbers.items():
                norm.num_batches_tracked = number

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def _check_finite(norms: Sequence[_BatchNorm]) -> None:
    """Check the statistics after a batch.

    Raises:
        ValueError: Some are NaN or infinite.
    """
    found = {f"{i}.{key}": value for i, norm in enumerate(norms) for key, value in norm.named_buffers()}
    floats = {key: value for key, value in found.items() if value.is_floating_point()}
    if first_non_finite(floats) is not None:
        raise ValueError(
            "the statistics of a BatchNorm are not finite: NaN or Inf in the inputs of the batch"
        )


def _restore(before: Mapping[_BatchNorm, dict[str, Any]]) -> None:
    """Restore saved states of BatchNorm layers."""
    for norm, statistics in before.items():
        norm.load_state_dict(statistics)
