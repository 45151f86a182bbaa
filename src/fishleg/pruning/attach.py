"""Pruning from within a training loop of one's own: when it is due, and zeros that last in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fishleg.curvature.likelihoods import Likelihood
from fishleg.optim.fishleg import FishLeg
from fishleg.options import PruningOptions
from fishleg.pruning.events import Event
from fishleg.pruning.keep_zeros import as_optimizers, check_optimizers_cover
from fishleg.pruning.session import PruningSession
from fishleg.pruning.zero_keeper import ZeroKeeper
from fishleg.runtime.batches import Forward, default_forward


def attach(
    model: nn.Module,
    loader: Iterable[Any],
    optimizer: Optimizer | Iterable[Optimizer],
    sparsities: Sequence[float],
    *,
    every: int,
    start: int = 0,
    likelihood: Likelihood | str = "categorical",
    options: PruningOptions | None = None,
    forward: Forward = default_forward,
    generator: torch.Generator | None = None,
    on_event: Callable[[Event], None] | None = None,
    state: Mapping[str, Any] | None = None,
) -> AttachedPruning:
    """Prune from within a training loop of your own, after the optimizer's steps.

    The first pruning follows step `start` + 1, the others every `every` steps. A pruning that fails is tried
    again after the next step. Zeros last after every step of the optimizer, including those that an earlier
    pruning has made. Q is refined by the session; that of a FishLeg optimizer is damped for steps, which is
    too much for scores.

    Args:
        model: The model that is trained; it is pruned in place.
        loader: Calibration batches; inputs suffice.
        optimizer: The optimizer, or all of them. The steps of the first are counted.
        sparsities: The sparsity after each pruning, rising.
        every: Optimizer steps from one pruning to the next.
        start: Optimizer steps before the first pruning.
        likelihood: The distribution of the outputs, or its name.
        options: How to prune; default: `PruningOptions()`.
        forward: How the model is called on a batch.
        generator: The source of random numbers; default: seed 0.
        on_event: Receives every event of the pruning.
        state: What `state_dict` of an earlier attachment returned, to go on after a restart. The model and
            the optimizers must have got back their states.

    Returns:
        A handle; `remove` ends the pruning and the keeping of zeros.

    Raises:
        ValueError: A number is out of range, or the optimizers do not train all pruned parameters.
    """
    if every < 1 or start < 0:
        raise ValueError(f"every must be >= 1 and start >= 0, got {every} and {start}")
    session = PruningSession(
        model, loader, likelihood=likelihood, options=options, forward=forward, generator=generator,
        trained_elsewhere=True,
    )  # fmt: skip
    targets = session.surgeon.check_targets(sparsities)
    optimizers = as_optimizers(optimizer)
    check_optimizers_cover(optimizers, model, session.surgeon.weights.names)
    if state is None:
        session.surgeon.check_removes(targets[0])
    attachment = AttachedPruning(session, optimizers, targets, every=every, start=start, on_event=on_event)
    if state is not None:
        attachment.load_state_dict(state)
    return attachment


class AttachedPruning:
    """Pruning that is attached to optimizers; made by `attach`.

    Args:
        session: The session that prunes.
        optimizers: All optimizers of the model; the steps of the first are counted.
        targets: The sparsity after each pruning.
        every: Optimizer steps from one pruning to the next.
        start: Optimizer steps before the first pruning.
        on_event: Receives every event of the pruning.

    Attributes:
        session: The session that prunes.
        steps: Steps of the first optimizer so far.
    """

    def __init__(
        self,
        session: PruningSession,
        optimizers: Sequence[Optimizer],
        targets: Sequence[float],
        *,
        every: int,
        start: int,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.session, self.optimizers, self.targets = session, list(optimizers), list(targets)
        self.every, self.start, self.on_event = every, start, on_event
        self.steps = 0
        self._zeros = ZeroKeeper(session.surgeon.weights)
        self._enforce_everywhere()
        first, *others = self.optimizers
        self._hooks = [first.register_step_post_hook(self._after_first)]
        self._hooks += [each.register_step_post_hook(self._after_any) for each in others]

    def _enforce_everywhere(self) -> None:
        masks = self.session.surgeon.masks
        self._zeros.check_covered(self.optimizers, masks)
        for each in self.optimizers:
            self._zeros.enforce(each, masks)

    def _after_any(self, stepped: Optimizer, *_: Any) -> None:
        if not isinstance(stepped, FishLeg):  # which keeps to masks that it knows by itself
            self._zeros.enforce(stepped, self.session.surgeon.masks)

    def _after_first(self, stepped: Optimizer, *_: Any) -> None:
        self.steps += 1
        self._after_any(stepped)  # Q is refined, and the step measured, at the sparse model
        target = self._due
        if target is None:
            return
        try:
            for event in self.session.stage(target, of=len(self.targets)):
                if self.on_event is not None:
                    self.on_event(event)
        finally:
            for each in self.optimizers:
                self._zeros.enforce(each, self.session.surgeon.masks)

    @property
    def _due(self) -> float | None:
        """The sparsity to go to now; None where no pruning is due."""
        history = self.session.surgeon.history
        reached = history[-1].target if history else 0.0
        left = [target for target in self.targets if target > reached]
        due = -(-(self.steps - self.start) // self.every)  # prunings that these steps should have brought
        return left[0] if left and len(self.targets) - len(left) < due else None

    def remove(self) -> None:
        """End the pruning and the keeping of zeros."""
        for hook in self._hooks:
            hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the state of the session."""
        return {"steps": self.steps, "session": self.session.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, after model and optimizers got back their states.

        Args:
            state: The saved state.
        """
        self.session.load_state_dict(state["session"])
        self.steps = state["steps"]
        self._enforce_everywhere()
