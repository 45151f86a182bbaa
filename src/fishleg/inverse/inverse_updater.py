"""Where the Q of a pruned model comes from: estimated, refined or reused. Only this file decides."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.curvature.layers import Layer, find_layers
from fishleg.curvature.likelihoods import Likelihood
from fishleg.inverse.auxiliary import Auxiliary, AuxiliaryStats
from fishleg.inverse.estimators import (
    EstimationProblem,
    estimate_inverse,
    find_method,
    learn_inverse,
    make_problem,
)
from fishleg.inverse.estimators.learned import GROUPS
from fishleg.inverse.estimators.problem import LOADER
from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.options import AuxiliaryOptions, PruningOptions
from fishleg.runtime.batch_errors import naming_the_batch
from fishleg.runtime.batches import Forward, default_forward
from fishleg.runtime.batchnorm import batch_statistics_mode
from fishleg.runtime.loaders import sub_batches
from fishleg.runtime.models import Fingerprint, fingerprint
from fishleg.runtime.modes import gradients_enabled
from fishleg.runtime.process_group import agreed_batches, broadcast_from_first

_FOLLOWING_ETA = 0.05  # smallest natural step while Q follows an F that has moved


class InverseUpdater:
    """The current Q of a model, with everything that is needed to estimate and refine it.

    Args:
        model: The model that Q belongs to.
        loader: Calibration batches.
        likelihood: The distribution of the outputs.
        options: Method, samples, structure and learning of Q. `relative_damping` must be set.
        only: Names of the weights whose Q the rivals estimate; a learned Q covers the whole model.
        layers: The layers of the model; default: they are looked for.
        forward: How the model is called on a batch.
        generator: The source of random numbers.
        on_step: Receives the statistics of every auxiliary step.

    Attributes:
        inverse: The current Q; None before the first estimate.
        learning: The learning that refines Q; None for methods that do not learn.
        gamma: The damping; None until it is given or chosen.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        likelihood: Likelihood,
        options: PruningOptions,
        *,
        only: Collection[str] | None = None,
        layers: list[Layer] | None = None,
        forward: Forward = default_forward,
        generator: torch.Generator | None = None,
        on_step: Callable[[AuxiliaryStats], None] | None = None,
    ) -> None:
        self.model, self.loader, self.likelihood, self.forward = model, loader, likelihood, forward
        self.options, self.only, self.on_step = options, only, on_step
        self._layers = find_layers(model) if layers is None else layers
        self.generator = generator or torch.Generator().manual_seed(0)
        self.inverse: InverseFisher | None = None
        self.learning: Auxiliary | None = None
        self.gamma = options.gamma
        self._estimated_at: Fingerprint | None = None
        self._before_estimate: dict[str, Any] = {}

    @property
    def learns(self) -> bool:
        """Whether Q is learned and can be refined, instead of being estimated afresh."""
        return find_method(self.options.method).learns

    @property
    def is_current(self) -> bool:
        """Whether there is a Q that was made for the weights as they are now."""
        return self.inverse is not None and self._estimated_at == fingerprint(self.model.parameters())

    @property
    def next_update(self) -> str:
        """What `update` would do: `estimate`, `refine` or `reuse`."""
        if self.inverse is None:
            return "estimate"
        if self.is_current:
            return "reuse"
        return "refine" if self.learning is not None else "estimate"

    def update(self, masks: Mapping[str, Tensor], steps: int | None = None) -> InverseFisher:
        """Bring Q up to date with the model.

        There is no Q yet: it is estimated. The weights have not changed since: it is reused. They have:
        a learned Q is refined, which is cheaper and better than to start again; others are estimated afresh.

        Args:
            masks: What is removed already, by parameter; True = kept.
            steps: Auxiliary steps of a refinement; default: as many as take half of the samples of an
                estimate.

        Returns:
            Q.
        """
        action = self.next_update
        if action == "estimate":
            return self.estimate(masks)
        if action == "refine":
            return self.refine(steps)
        assert self.inverse is not None
        return self.inverse

    def latest(self, masks: Mapping[str, Tensor]) -> InverseFisher:
        """Return the last Q, even if the weights have changed since; estimate it where there is none.

        Args:
            masks: What is removed already, by parameter; True = kept.

        Returns:
            Q.
        """
        return self.inverse or self.estimate(masks)

    @gradients_enabled()
    def estimate(self, masks: Mapping[str, Tensor] | None = None) -> InverseFisher:
        """Estimate Q afresh at the model as it is now.

        Args:
            masks: What is removed already, by parameter; True = kept.

        Returns:
            Q.
        """
        if self.learns:
            self.learning = self.new_learning(masks)
            self.inverse, gamma = self.learning.inverse, self.learning.gamma
        else:
            self._before_estimate = {"gamma": self.gamma, "generator": self.generator.get_state()}
            with batch_statistics_mode(self.model) if self.options.batch_statistics else nullcontext():
                self.inverse, gamma = estimate_inverse(self._problem(masks, self.only))
            broadcast_from_first(self.model, [*self.inverse.parameters(), *self.inverse.buffers()])
        if self.gamma is None and find_method(self.options.method).needs_gamma:
            self.gamma = gamma
        self._estimated_at = fingerprint(self.model.parameters())
        return self.inverse

    @gradients_enabled()
    def new_learning(self, masks: Mapping[str, Tensor] | None = None, *, learn: bool = True) -> Auxiliary:
        """Return a Q that is learned at the model as it is now, with its learning.

        Args:
            masks: What is removed already, by parameter; True = kept.
            learn: False leaves Q at its start, for a saved state to be loaded.

        Returns:
            The learning; its `inverse` is Q.
        """
        assert self.options.relative_damping is not None
        with batch_statistics_mode(self.model):
            return learn_inverse(
                self._problem(masks, None), relative_damping=self.options.relative_damping, gamma=self.gamma,
                on_step=self.on_step, learn=learn,
            )  # fmt: skip

    @gradients_enabled()
    def refine(self, steps: int | None = None) -> InverseFisher:
        """Go on learning the same Q at the model as it is now.

        Args:
            steps: Auxiliary steps; default: as many as take half of the samples of an estimate.

        Returns:
            Q.

        Raises:
            ValueError: There is no learned Q to refine.
        """
        if self.learning is None:
            raise ValueError("there is no learned Q to refine: estimate it first (method 'fishleg')")
        groups = self._learning_options.groups or GROUPS
        steps = max(self.options.samples // (2 * groups), 1) if steps is None else steps
        self._configure_for_refinement(self.learning)
        batches = sub_batches(self.loader, groups * self.options.sub_batch, LOADER)
        with batch_statistics_mode(self.model):
            for _, batch in zip(range(steps), agreed_batches(self.model, batches, LOADER), strict=False):
                with naming_the_batch(batches.place):
                    stats = self.learning.try_step(batch)
                if stats is not None and self.on_step is not None:
                    self.on_step(stats)
        self._estimated_at = fingerprint(self.model.parameters())
        return self.learning.inverse

    @property
    def _learning_options(self) -> AuxiliaryOptions:
        return self.options.auxiliary or AuxiliaryOptions()

    @property
    def _by_batch(self) -> bool:
        """Whether Q is refined with the statistics of the batch in BatchNorm."""
        chosen = self._learning_options
        return (self.options.learns_by_batch or chosen.batch_statistics) and not chosen.vectorize

    def _configure_for_refinement(self, learning: Auxiliary) -> None:
        """Prepare the learning for a model that has just been pruned."""
        chosen = self._learning_options
        learning.reconfigure(
            sub_batch=chosen.sub_batch, groups=chosen.groups or GROUPS, refine_every=chosen.refine_every,
            eta_floor=chosen.eta_floor or _FOLLOWING_ETA, batch_statistics=self._by_batch,
        )  # fmt: skip

    def configure_for_training(self, learning: Auxiliary) -> None:
        """Prepare a learning to follow a model in training: few examples a step, BatchNorm as in training.

        Args:
            learning: The learning of this Q, or that of an optimizer that has a Q of its own.
        """
        chosen = self._learning_options
        learning.reconfigure(
            sub_batch=chosen.sub_batch or self.options.sub_batch, groups=1,
            refine_every=max(2, chosen.refine_every), eta_floor=chosen.eta_floor or _FOLLOWING_ETA,
            batch_statistics=self.options.batch_statistics is not False and not chosen.vectorize,
        )  # fmt: skip

    @property
    def refines_by_batch(self) -> bool:
        """Whether nothing that refines Q reads BatchNorm's running statistics."""
        uses_samples = self._learning_options.estimator != "probe"
        return self.learning is not None and self._by_batch and uses_samples

    def ignore_removed_rows(self, masks: Mapping[str, Tensor]) -> None:
        """Let rows that are removed as a whole have no curvature while Q is refined.

        Args:
            masks: What is removed, by parameter; True = kept.
        """
        if self.learning is not None:
            self.learning.ignore_removed_rows(masks)

    def _problem(self, masks: Mapping[str, Tensor] | None, only: Collection[str] | None) -> EstimationProblem:
        options = self.options
        if self.gamma is not None and options.gamma is None:  # γ stays what it was chosen to be
            options = replace(options, gamma=self.gamma)
        return make_problem(
            self.model, self.loader, self.likelihood, options=options, forward=self.forward,
            generator=self.generator, layers=self._layers, only=only, masks=masks,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return γ, the generator's state, and a learned Q with its learning.

        A Q that is not learned is not saved. Where it is current, γ and the generator are those from before
        its estimate: the next `update` estimates the same Q again.
        """
        learning = None
        if self.learning is not None:
            learning = {"inverse": self.learning.inverse.state_dict(), "state": self.learning.state_dict()}
        is_current = self.is_current
        state = {"gamma": self.gamma, "generator": self.generator.get_state()}
        if is_current and learning is None:
            state.update(self._before_estimate)
        return {**state, "learning": learning, "is_current": is_current}

    def load_state_dict(self, state: Mapping[str, Any], masks: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, after the model got back its weights.

        Args:
            state: The saved state.
            masks: What is removed already, by parameter; True = kept.
        """
        state = copy.deepcopy(dict(state))  # learning goes on, and must not change what was loaded
        self.gamma = state["gamma"]
        self.learning = self.inverse = self._estimated_at = None
        if state["learning"] is not None:
            self.learning = self.new_learning(masks, learn=False)
            self.inverse = self.learning.inverse
            self.inverse.load_state_dict(state["learning"]["inverse"])
            self.learning.load_state_dict(state["learning"]["state"])
            self._estimated_at = fingerprint(self.model.parameters()) if state["is_current"] else None
        self.generator.set_state(state["generator"])
