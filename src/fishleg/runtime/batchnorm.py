"""TODO."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fishleg.runtime.batches import (
    Forward,
    batch_size,
    default_forward,
    move_batch,
)
from fishleg.runtime.loaders import cycle
from fishleg.runtime.modes import eager_mode, evaluation_mode
from fishleg.runtime.random_state import seeded
from fishleg.runtime.tensors import at_least_float32

logger = logging.getLogger(__name__)


def can_use_batch_statistics(model: nn.Module, batch: Any) -> bool:
    """Whether a BatchNorm would use them, and has them: a single example has none."""
    norms = (m for m in model.modules() if isinstance(m, _BatchNorm) and m.training)
    return batch_size(batch) > 1 and any(norms)


def refreshable_norms(model: nn.Module) -> list[_BatchNorm]:
    """The BatchNorms whose statistics may be renewed: they track them, and nobody has frozen them."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    norms = [norm for norm in norms if norm.training or not model.training]
    return [norm for norm in norms if norm.weight is None or norm.weight.requires_grad]


@contextmanager
def batch_statistics_mode(model: nn.Module) -> Iterator[None]:
    """Inside, those BatchNorms are in training mode, the rest of the model is as it was."""
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
    """What the renewable BatchNorms get on a batch, in evaluation mode: per channel, Σx and Σx² of each call.

    What the user's code may draw at random is the same each time, and nothing is left changed.
    """
    seen: dict[_BatchNorm, list[Tensor]] = {norm: [] for norm in refreshable_norms(model)}

    def note(norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(norm, _BatchNorm)
        x = at_least_float32(args[0] if args else kwargs["input"]).transpose(0, 1).flatten(1)
        seen[norm].append(torch.stack([x.sum(1), x.square().sum(1)]))

    if not seen:
        return seen
    hooks = [norm.register_forward_pre_hook(note, with_kwargs=True) for norm in seen]
    try:
        with eager_mode(), evaluation_mode(model), seeded(0):
            forward(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


@torch.no_grad()
def refresh_batchnorm(
    model: nn.Module,
    loader: Iterable[Any],
    batches: int = 20,
    forward: Forward = default_forward,
    only: Collection[nn.Module] | None = None,
) -> int:
    """Re-estimate BatchNorm's running statistics on some batches; returns how many layers were refreshed.

    Only layers that track statistics change, and in a model that is being trained only those in training
    mode: a BatchNorm in eval mode there is frozen on purpose, and so is one whose parameters are. A batch of
    one example is left out where its channels have a single value. Every module's mode is restored.
    `only` restricts it to some of them; the others then normalise by the statistics that they have.
    """
    norms = [norm for norm in refreshable_norms(model) if only is None or norm in only]
    if not norms or batches < 1:
        return 0
    device = next(norms[0].buffers()).device
    modes = {module: module.training for module in model.modules()}
    momenta = {norm: norm.momentum for norm in norms}
    before = {norm: copy.deepcopy(norm.state_dict()) for norm in norms}
    averages = _Averages(norms)
    try:
        model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.train()
        for _, batch in zip(range(batches), cycle(loader), strict=False):
            with eager_mode(), averages.of(batch):
                forward(model, move_batch(batch, device))
        if not any(averages.seen.values()):
            logger.warning(
                "BatchNorm's statistics are those from before the pruning: they need batches of more than "
                "one example, and the loader has none"
            )
        # a norm that the evaluated model does not use, say in a head for training only, keeps what it had
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


class _Averages:
    """Running statistics in which every example counts the same, whatever the size of its batch."""

    def __init__(self, norms: Sequence[_BatchNorm]) -> None:
        self.seen: dict[_BatchNorm, int] = dict.fromkeys(norms, 0)  # examples, by norm: not all see all
        self._size = 0
        self._hooks = [norm.register_forward_pre_hook(self._count) for norm in norms]

    def _count(self, norm: nn.Module, _: Any) -> None:
        assert isinstance(norm, _BatchNorm)
        self.seen[norm] += self._size
        norm.momentum = self._size / self.seen[norm]

    @contextmanager
    def of(self, batch: Any) -> Iterator[None]:
        """Inside, the model is called on the batch; one that is too small for a norm is not counted."""
        try:
            self._size = batch_size(batch)
        except ValueError:
            self._size = 1  # nobody can tell: batches count the same then
        seen, numbers = dict(self.seen), {norm: copy.deepcopy(norm.num_batches_tracked) for norm in self.seen}
        try:
            yield
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            self.seen = seen
            for norm, number in numbers.items():
                norm.num_batches_tracked = number

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _restore(before: Mapping[_BatchNorm, dict[str, Any]]) -> None:
    for norm, statistics in before.items():
        norm.load_state_dict(statistics)
