"""Pruning from within a training loop of one's own: when it is due, and zeros that last in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fishleg.optim.fishleg import FishLeg
from fishleg.pruning.keep_zeros import as_optimizers, check_optimizers_cover, join_handles, zero_removed
from fishleg.pruning.surgeon import PruneStep, Surgeon


def attach(
    surgeon: Surgeon,
    optimizer: Optimizer | Iterable[Optimizer],
    sparsities: Sequence[float],
    *,
    every: int,
    start: int = 0,
    done: int = 0,
    on_prune: Callable[[PruneStep], None] | None = None,
) -> RemovableHandle:
    """Prune from within a training loop of your own, after the optimizer's steps.

    `start` steps go by untouched, the next is followed by the first pruning, then every `every`-th; one that
    fails is due again after the next step. Zeros last after every step of the optimizer, those included that
    the surgeon, or an earlier pruning, has made before. The surgeon refines a Q of its own: that of a FishLeg
    optimizer is damped for steps, too much for scores. A model that is trained by several optimizers needs
    all of them here; the steps of the first are counted.

    To go on after a restart, load the states of model, surgeon and optimizer, and attach the same schedule
    with the number of steps that were `done`.
    """
    if every < 1 or start < 0 or done < 0:
        raise ValueError(f"every must be >= 1, start and done >= 0, got {every}, {start} and {done}")
    reached = surgeon.history[-1].target if surgeon.history else 0.0
    targets = [target for target in surgeon.check_targets(sparsities) if target > reached]
    total = len(sparsities)
    due = min(max(0, -(-(done - start) // every)), total)  # prunings that these steps should have brought
    if total - len(targets) != due:
        raise ValueError(
            f"after {done} steps {due} of {total} prunings should be done, and "
            f"the surgeon has reached {reached:g}: load its state_dict, or pass the number of steps as done"
        )
    optimizers = as_optimizers(optimizer)
    check_optimizers_cover(optimizers, surgeon.model, surgeon.prunable)
    if targets and not surgeon.history:
        surgeon.check_removes(targets[0])
    surgeon.note_zeros()
    check_optimizers_cover(optimizers, surgeon.model, [*surgeon.prunable, *surgeon.elsewhere, *surgeon.masks])
    surgeon.trains = True
    first, *others = optimizers
    count = done - start

    def after_any(stepped: Optimizer, *_: Any) -> None:
        if not isinstance(stepped, FishLeg):  # which keeps to masks that it knows by itself
            enforce(stepped, surgeon)

    def after_first(stepped: Optimizer, *_: Any) -> None:
        nonlocal count
        count += 1
        after_any(stepped)  # Q is refined, and the step measured, at the sparse model
        if not targets or total - len(targets) >= -(-count // every):
            return
        try:
            step = surgeon.prune(targets[0], inverse=surgeon.refine(24))
            del targets[0]
        finally:
            for each in (stepped, *others):
                enforce(each, surgeon)
        if on_prune is not None:
            on_prune(step)

    for each in optimizers:
        enforce(each, surgeon)
    hooks = [first.register_step_post_hook(after_first)]
    return join_handles(hooks + [each.register_step_post_hook(after_any) for each in others])


def enforce(optimizer: Optimizer, surgeon: Surgeon) -> None:
    """The surgeon's masks, as they are now, and zeros elsewhere: in the weights and the optimizer's state.

    FishLeg keeps to them from then on. Its Q goes on learning the Fisher matrix of all weights: its structure
    fits that one much better than the masked one, and the joint compensation takes care of what is removed
    (docs/deviations.md).
    """
    found = {} if surgeon.history else surgeon.found
    masks = {**surgeon.elsewhere, **found, **surgeon.masks}
    if not masks:
        return
    if isinstance(optimizer, FishLeg):
        optimizer.set_masks(masks, restrict=False)
    else:
        zero_removed(optimizer, surgeon.model, masks)
