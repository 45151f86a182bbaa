"""Masks under any optimizer, and normalisation statistics after surgery."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fishleg.batches import Forward, batch_size, cycle, default_forward, move_batch
from fishleg.fisher import frozen_statistics, uncompiled, widened
from fishleg.layers import find_layers
from fishleg.streams import seeded

logger = logging.getLogger(__name__)

SPARSE = 0.01  # with a larger share of zeros than that, a model was pruned before


@torch.no_grad()
def apply_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Set every masked weight to exactly 0."""
    for p, mask in _by_parameter(model, masks).items():
        p.masked_fill_(~mask, 0)  # not a product: NaN · 0 is NaN


@torch.no_grad()
def zero_masked(optimizer: Optimizer, model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Set every masked weight, and the optimizer's state for it, to exactly 0."""
    for p, mask in _by_parameter(model, masks).items():
        p.masked_fill_(~mask, 0)  # not a product: NaN · 0 is NaN
        for value in optimizer.state.get(p, {}).values():
            if torch.is_tensor(value) and value.shape == p.shape:
                value.mul_(mask)


def masks_of(model: nn.Module) -> dict[str, Tensor]:
    """The masks of a pruned model, from its zeros: every matrix or kernel that has some.

    A row that is gone takes its bias along, where that is zero, too; a channel whose scale and shift in a
    BatchNorm are both zero is gone as well. A tensor that is nothing but zeros was
    not pruned (no layer is emptied) but starts there, as adapters do, and is left free.
    """
    return _with_biases(model, _weight_masks(model))


def pruned_masks(model: nn.Module, prunable: Collection[str]) -> dict[str, Tensor]:
    """Those of `masks_of` that look like the work of a pruning.

    Unless the `prunable` weights as a whole are sparse, a few zeros in a tensor are chance. And where all
    other entries are of one size, as in an identity or a Dirac kernel, somebody has made the tensor so.
    """
    weights = [model.get_parameter(name) for name in prunable]
    sparse = sum(int((w == 0).sum()) for w in weights) > SPARSE * sum(w.numel() for w in weights)

    def looks_pruned(name: str, mask: Tensor) -> bool:
        kept = model.get_parameter(name).detach()[mask].abs()
        made_so = kept.numel() > 1 and bool(kept.min() == kept.max())
        return not made_so and (sparse or kept.numel() < (1 - SPARSE) * mask.numel())

    return _with_biases(model, {n: mask for n, mask in _weight_masks(model).items() if looks_pruned(n, mask)})


def _weight_masks(model: nn.Module) -> dict[str, Tensor]:
    masks = {
        name: p.detach() != 0 for name, p in model.named_parameters() if p.dim() > 1 and bool((p == 0).any())
    }
    for name in [name for name, mask in masks.items() if not bool(mask.any())]:
        logger.info("%s is all zeros: taken for a start, not for a mask", name)
        del masks[name]
    return masks


def _with_biases(model: nn.Module, masks: dict[str, Tensor]) -> dict[str, Tensor]:
    for layer in find_layers(model):
        if layer.is_matrix and layer.bias is not None and layer.weight in masks:
            gone = ~masks[layer.weight].flatten(1).any(1) & (model.get_parameter(layer.bias) == 0)
            if bool(gone.any()):
                masks[layer.bias] = ~gone
    names = {id(p): name for name, p in model.named_parameters()}
    for norm in (module for module in model.modules() if isinstance(module, _BatchNorm) and module.affine):
        gone = (norm.weight == 0) & (norm.bias == 0)
        if masks and bool(gone.any()) and not bool(gone.all()):
            masks.update({names[id(p)]: ~gone for p in (norm.weight, norm.bias)})
    return masks


def keep_zeros(
    optimizer: Optimizer | Iterable[Optimizer], model: nn.Module, masks: Mapping[str, Tensor] | None = None
) -> RemovableHandle:
    """After every step of any torch optimizer: masked weights, and their state, are exactly 0.

    A model that is trained by several optimizers needs all of them here. Without masks, the model's
    present zeros are kept; a model without any is an error.
    """
    optimizers = as_optimizers(optimizer)
    masks = masks_of(model) if masks is None else masks
    if not masks:
        raise ValueError("the model has no zeros to keep: prune it first, or pass masks")
    _check_masks(model, masks)
    check_owner(optimizers, model, masks)

    def enforce(stepped: Optimizer, *_: Any) -> None:
        zero_masked(stepped, model, masks)

    for each in optimizers:
        enforce(each)
    return joined([each.register_step_post_hook(enforce) for each in optimizers])


def as_optimizers(optimizer: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """One optimizer or several, as a list."""
    found = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    if not found:
        raise ValueError("optimizer must be an optimizer or several of them, got an empty sequence")
    return found


def joined(handles: Sequence[RemovableHandle]) -> RemovableHandle:
    """One handle for all: it removes them together."""
    return handles[0] if len(handles) == 1 else _Handles(handles)


class _Handles(RemovableHandle):
    def __init__(self, handles: Sequence[RemovableHandle]) -> None:
        super().__init__(OrderedDict())
        self.handles = handles

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def _check_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Masks are by parameter name, boolean, and of the parameter's own shape: none is broadcast."""
    for p, (name, mask) in zip(_by_parameter(model, masks), masks.items(), strict=True):
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"the mask of {name!r} must be a boolean tensor (True = kept), got {found}")
        if mask.shape != p.shape:
            raise ValueError(
                f"the mask of {name!r} must have its shape {tuple(p.shape)}, got {tuple(mask.shape)}"
            )


def check_owner(optimizers: Sequence[Optimizer], model: nn.Module, names: Iterable[str]) -> None:
    """An error where some of these parameters are trained by none of the optimizers: their zeros would go.

    Frozen ones need no optimizer.
    """
    moved = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    trained = {name: p for name in names if (p := model.get_parameter(name)).requires_grad}
    missing = [name for name, p in trained.items() if id(p) not in moved]
    if missing and len(missing) == len(trained):
        raise ValueError(
            "the optimizer has none of the model's pruned parameters: it is that of another model; "
            "fishleg.prune returns a copy, which needs an optimizer of its own"
        )
    if missing:
        raise ValueError(
            f"the optimizer does not have {first_few(missing)}, whose zeros another one would fill: pass all "
            "optimizers of the model as a list, and freeze what none of them trains (requires_grad_(False))"
        )


def first_few(names: Sequence[str]) -> str:
    """Some names of many, for a message."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def copied(model: nn.Module, otherwise: str = "") -> nn.Module:
    """A deep copy; an error that says what to do where there can be none."""
    try:
        return copy.deepcopy(model)
    except Exception as error:  # models hold anything: locks, files, handles of other libraries
        raise ValueError(
            f"the model cannot be copied ({type(error).__name__}: {error}): make permanent what "
            f"torch.nn.utils.prune or weight_norm has put on it (prune.remove, remove_weight_norm){otherwise}"
        ) from error


def renewable_norms(model: nn.Module) -> list[_BatchNorm]:
    """The BatchNorms whose statistics may be renewed: they track them, and nobody has frozen them."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    norms = [norm for norm in norms if norm.training or not model.training]
    return [norm for norm in norms if norm.weight is None or norm.weight.requires_grad]


@contextmanager
def normalised_by_batch(model: nn.Module) -> Iterator[None]:
    """Inside, those BatchNorms are in training mode, the rest of the model is as it was."""
    norms = renewable_norms(model)
    modes = [norm.training for norm in norms]
    try:
        for norm in norms:
            norm.training = True
        yield
    finally:
        for norm, mode in zip(norms, modes, strict=True):
            norm.training = mode


@torch.no_grad()
def norm_inputs(
    model: nn.Module, batch: Any, forward: Forward = default_forward
) -> dict[_BatchNorm, list[Tensor]]:
    """What the renewable BatchNorms get on a batch, in evaluation mode: per channel, Σx and Σx² of each call.

    What the user's code may draw at random is the same each time, and nothing is left changed.
    """
    seen: dict[_BatchNorm, list[Tensor]] = {norm: [] for norm in renewable_norms(model)}

    def note(norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(norm, _BatchNorm)
        x = widened(args[0] if args else kwargs["input"]).transpose(0, 1).flatten(1)
        seen[norm].append(torch.stack([x.sum(1), x.square().sum(1)]))

    if not seen:
        return seen
    hooks = [norm.register_forward_pre_hook(note, with_kwargs=True) for norm in seen]
    try:
        with uncompiled(), frozen_statistics(model), seeded(0):
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
    norms = [norm for norm in renewable_norms(model) if only is None or norm in only]
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
            with uncompiled(), averages.of(batch):
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


def _by_parameter(model: nn.Module, masks: Mapping[str, Tensor]) -> dict[nn.Parameter, Tensor]:
    parameters = dict(model.named_parameters())
    for name in masks:
        if name not in parameters:
            raise ValueError(f"mask for unknown parameter {name!r}")
    return {parameters[name]: mask for name, mask in masks.items()}
