"""The surgeon: one pruning step, and the masks that all steps have made.

Bring Q up to date → score → select → search masks → remove and compensate → refresh BatchNorm.
The model is changed in place and stays the user's own class; masks live beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from fishleg.curvature.likelihoods import Likelihood, as_likelihood
from fishleg.inverse.auxiliary import AuxiliaryStats
from fishleg.inverse.estimators import find_method
from fishleg.inverse.estimators.problem import LOADER
from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.inverse.inverse_updater import InverseUpdater
from fishleg.options import PruningOptions
from fishleg.options.declaration import check_options
from fishleg.options.pruning import DAMPING, MASK_SEARCH_DAMPING, ROW_DAMPING
from fishleg.pruning import diagnostics
from fishleg.pruning.accumulated_change import AccumulatedChange, TotalChange
from fishleg.pruning.affected_norms import BatchNormRefresh
from fishleg.pruning.constant_data import warn_about_constant_data
from fishleg.pruning.events import PruneStep
from fishleg.pruning.masks import SPARSE, apply_masks
from fishleg.pruning.output_change import OutputChange
from fishleg.pruning.patterns import Masks, as_pattern
from fishleg.pruning.pruner import Pruner
from fishleg.pruning.schedules import as_sparsity, check_sparsities
from fishleg.pruning.weights import PrunableWeights
from fishleg.runtime.batches import Forward, default_forward
from fishleg.runtime.loaders import check_loader, cycle
from fishleg.runtime.modes import gradients_enabled
from fishleg.runtime.process_group import broadcast_from_first, check_not_sharded, warn_if_not_shared

REFINE_STEPS = 24  # auxiliary steps before a pruning step of a model that is trained


class Surgeon:
    """Prunes a model in place, one step at a time.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> batches = [torch.randn(64, 8) for _ in range(4)]
    >>> surgeon = Surgeon(model, batches, options=PruningOptions(exclude=["2.weight"]))
    >>> round(surgeon.prune(0.5).sparsity, 2)
    0.5

    Args:
        model: The model; it is changed in place.
        loader: Calibration batches; inputs suffice.
        likelihood: The distribution of the outputs, or its name.
        options: How to prune; default: `PruningOptions()`.
        forward: How the model is called on a batch.
        generator: The source of random numbers; default: seed 0.
        trained: Whether the model is trained between pruning steps. Q is noisier then and gets more damping.
        total_at_end: Whether someone calls `total_change` after the last step. Otherwise all steps together
            are judged after each step.
        on_auxiliary_step: Receives the statistics of every step of Q's learning.

    Attributes:
        weights: The weights that are pruned.
        curvature: Where Q comes from: `estimate`, `refine`, `update`.
        pruner: What Q does to the weights: `select`, `search`, `remove`, `predict`.
        masks: Masks of all steps so far, by parameter name; True = kept.
        history: What each step did.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        *,
        likelihood: Likelihood | str = "categorical",
        options: PruningOptions | None = None,
        forward: Forward = default_forward,
        generator: torch.Generator | None = None,
        trained: bool = False,
        total_at_end: bool = False,
        on_auxiliary_step: Callable[[AuxiliaryStats], None] | None = None,
    ) -> None:
        _check_model(model)
        check_not_sharded(model)
        check_loader(loader)
        check_options(options, PruningOptions, "options")
        warn_if_not_shared(model)
        self.model, self.loader, self.forward, self.trained = model, loader, forward, trained
        self.options = options or PruningOptions()
        self.likelihood = as_likelihood(likelihood)
        self.pattern = as_pattern(self.options.pattern)
        self.weights = PrunableWeights(model, loader, self.pattern, self.options, forward)
        self.pruner = Pruner(self.weights, self.options)
        self._check_method()
        self.curvature = InverseUpdater(
            model, loader, self.likelihood, replace(self.options, relative_damping=self._relative_damping()),
            only=set(self.weights.names), layers=self.weights.all_layers, forward=forward,
            generator=generator, on_step=on_auxiliary_step,
        )  # fmt: skip
        self.output_change = OutputChange(
            model, loader, self.likelihood, forward, self.options.measure_batches
        )
        self._batchnorm = BatchNormRefresh(model, loader, forward, self.options.batchnorm_batches)
        self._accumulated = AccumulatedChange(
            self.output_change, judged=self.predicts and not trained, at_end=total_at_end
        )
        self.masks: Masks = {}
        self.history: list[PruneStep] = []
        self._data_checked = False

    def _check_method(self) -> None:
        """Raise where a layer is beyond the method, before any work."""
        check = find_method(self.options.method).check
        if check is not None:
            check([self.weights.layers[name] for name in self.weights.names])

    def _relative_damping(self) -> float:
        """Return the relative damping of the options, or a default that suits pattern and mask search.

        A mask search works best with little damping, because it uses all of Q. Single scores need more, and
        so does a Q that follows a model in training, which is noisier. Whole rows need most: their removal
        is a large step, for which a quadratic model is least accurate.
        """
        if self.options.relative_damping is not None:
            return self.options.relative_damping
        if self.pattern.whole_rows:
            return ROW_DAMPING
        return MASK_SEARCH_DAMPING if self.pruner.searches_masks and not self.trained else DAMPING

    @property
    def predicts(self) -> bool:
        """Whether Q is a model of the loss. For magnitude pruning it is not: Q = I is in units of weights."""
        return find_method(self.options.method).predicts

    @property
    def sparsity(self) -> float:
        """The fraction of the prunable weights (of the rows, where whole rows go) that is removed."""
        return self.weights.sparsity(self.masks)

    @property
    def refine_steps(self) -> int | None:
        """Auxiliary steps that refine Q before a pruning step; None: half of the samples of an estimate."""
        if self.options.refine_steps is not None:
            return self.options.refine_steps
        return REFINE_STEPS if self.trained else None

    def table(self) -> str:
        """Return a line for each parameter: its size, sparsity, and whether it is pruned or why not."""
        return self.weights.table()

    def update_inverse(self) -> InverseFisher:
        """Bring Q up to date with the model: estimate, refine or reuse it.

        Returns:
            Q.
        """
        return self.curvature.update(self.masks, self.refine_steps)

    @gradients_enabled()
    def prune(
        self, sparsity: float, *, inverse: InverseFisher | None = None, cuts: int | None = None
    ) -> PruneStep:
        """Prune to the given total sparsity.

        Q is brought up to date first. In more than one cut each leaves the same share of what the last one
        left, and Q is updated in between: a quadratic model holds better over a small change.

        Args:
            sparsity: The fraction of the prunable weights that is removed afterwards.
            inverse: A Q of your own; default: the surgeon's, brought up to date.
            cuts: The number of cuts; default: as the options say, else 1.

        Returns:
            What the step did.

        Raises:
            ValueError: The sparsity is not above the present one, pattern and floor do not allow it, or the
                first batches do not suit the model.
        """
        sparsity = self.check_rises(sparsity)
        cuts = (self.options.cuts or 1) if cuts is None else cuts
        if cuts < 1:
            raise ValueError(f"cuts must be >= 1, got {cuts}")
        before = self.output_change.outputs()
        self._accumulated.before_step(before, len(self.history))
        self.check_data()
        zeros = {name: self._zeros(name) for name in self.weights.names}
        batch = next(iter(self.output_change.batches), None)
        moments = self._batchnorm.moments(batch)
        q = self.update_inverse() if inverse is None else inverse
        if cuts > 1:
            self.pruner.select(q, sparsity, self.masks)  # an impossible target raises before the first cut
        old, kept, predicted, unrefreshed = self.masks, 1 - self.sparsity, 0.0, None
        for left in reversed(range(cuts)):
            target = sparsity if not left else 1 - kept * ((1 - sparsity) / kept) ** (1 - left / cuts)
            predicted += self._cut(q, target)
            if self._batchnorm.batches and not (left and self.curvature.refines_by_batch):
                unrefreshed = None if left else self.output_change.divergence_from(before)
                self._batchnorm.refresh(moments, batch)
            broadcast_from_first(self.model, [*self.masks.values(), *self.model.state_dict().values()])
            self.curvature.ignore_removed_rows(self.masks)
            if left:
                q = self.update_inverse()
        step = self._describe(sparsity, old, predicted, self.output_change.divergence_from(before))
        self.history.append(step)
        self._warn(step, unrefreshed, zeros)
        return step

    def _cut(self, q: InverseFisher, sparsity: float) -> float:
        """Choose weights, remove them and compensate.

        Returns:
            The predicted loss increase.
        """
        chosen = self.pruner.search(q, self.pruner.select(q, sparsity, self.masks), self.masks)
        predicted = self.pruner.remove(q, chosen)
        vectors = self.weights.vector_masks(chosen, self.weights.norms)
        apply_masks(self.model, vectors)
        self.masks = {**self.masks, **chosen, **vectors}
        return predicted

    def _describe(
        self, target: float, old: Mapping[str, Tensor], predicted: float, measured: float | None
    ) -> PruneStep:
        new = {name: self.masks[name] for name in self.weights.names}
        return PruneStep(
            target=target,
            sparsity=self.sparsity,
            removed=sum(int((old[n] & ~m if n in old else ~m).sum()) for n, m in new.items()),
            predicted=predicted,
            measured=measured,
            gamma=self.curvature.gamma or 0.0,
            per_layer={name: float((~mask).float().mean()) for name, mask in new.items()},
        )

    def _warn(self, step: PruneStep, unrefreshed: float | None, zeros: Mapping[str, Tensor]) -> None:
        harmed = diagnostics.warn_about_batchnorm_refresh(unrefreshed, step.measured)
        if not harmed and self.predicts:
            diagnostics.warn_about_prediction(step.sparsity, step.predicted, step.measured)
        self._accumulated.after_step(self.history, step.sparsity, refresh_harmed=harmed)
        loose = sum(int((zero & self.masks[name]).sum()) for name, zero in zeros.items())
        diagnostics.warn_about_loose_zeros(loose, step.sparsity, str(self.options.pattern))

    def take_reference(self) -> None:
        """Take the outputs of the model as it is now, before the first step; `prune` does it by itself.

        After a restart call it while the model is still the dense one, before its state is loaded.
        """
        if not self.history:
            self._accumulated.start()

    def total_change(self) -> TotalChange:
        """Compare the outputs with those before the first step, and with the sum of the predictions.

        The verdict is logged once: after the first step at which it is clear, or here. A model that is
        trained between the steps (`trained=True`) has no total: training changes the outputs as well. There
        each step is judged by itself.

        Returns:
            What all steps did together.
        """
        total = self._accumulated.total(self.history, self.sparsity)
        self._accumulated.warn(total)
        return total

    def _zeros(self, name: str) -> Tensor:
        """Return where a weight is zero, except in padding rows, which always stay zero."""
        zero = self.weights.weight(name) == 0
        padding = self.weights.layers[name].padding_rows(zero.device)
        return zero if padding is None else zero & ~padding

    @gradients_enabled()
    def check_data(self) -> None:
        """Check the first batches and the outputs on them, once, before the first pruning step.

        Raises:
            ValueError: They do not suit the model or the likelihood.
        """
        if self._data_checked or self.history:
            return
        outputs = self.output_change.outputs()
        batches = self.output_change.batches or [next(cycle(self.loader, LOADER))]  # an empty loader raises
        diagnostics.warn_about_outputs(outputs, batches, self.likelihood)
        warn_about_constant_data(batches, outputs, self.forward)
        if self.predicts:
            diagnostics.check_batches(self.model, batches[0], self.likelihood, self.forward, self.options)
            diagnostics.warn_about_unused_weights(
                self.model, self.weights.names, batches, self.forward, self.options.sub_batch
            )
        self._data_checked = True

    def check_rises(self, sparsity: float) -> float:
        """Return a sparsity as a plain number, if the next step can reach it.

        Args:
            sparsity: The sparsity that is asked for.

        Returns:
            The same as a Python float.

        Raises:
            ValueError: It is not above the present sparsity, or pattern and floor do not allow it.
        """
        sparsity = as_sparsity(sparsity)
        rises = not self.history or sparsity > self.history[-1].target
        if sparsity <= self.sparsity and not (rises and self.weights.rounds_to(sparsity, self.masks)):
            raise ValueError(f"sparsity {sparsity} is not above the present {self.sparsity:.4f}")
        return self.check_targets([sparsity])[0]

    def check_targets(self, sparsities: Sequence[float]) -> list[float]:
        """Return a schedule as a list.

        Args:
            sparsities: The sparsity after each stage.

        Returns:
            The same as plain numbers.

        Raises:
            ValueError: The sparsities do not rise, or pattern and floor do not allow the last one.
        """
        targets = check_sparsities(list(sparsities))
        if targets[-1] > self.pattern.limit:
            raise ValueError(
                f"the pattern allows a sparsity of {self.pattern.limit} at most, got {targets[-1]}"
            )
        if not self.history:
            self.weights.check_reachable(targets[-1], self.options.floor)
        return targets

    def check_removes(self, sparsity: float) -> None:
        """Raise where everything that a sparsity asks for is zero already.

        Compensation would only fill the other weights then.

        Args:
            sparsity: The sparsity that is asked for.

        Raises:
            ValueError: Nothing would be removed.
        """
        present = self.weights.share_of_zeros
        if present <= SPARSE:
            return
        scores = self.weights.magnitudes()
        masks = self.pattern.select(scores, sparsity)
        if any(bool(scores[name][~mask].any()) for name, mask in masks.items()):
            return
        same = round(sparsity * self.weights.count) == round(present * self.weights.count)
        raise ValueError(
            f"a sparsity of {sparsity:g} (pattern {self.options.pattern}) removes nothing: {present:.4f} of "
            f"the prunable {self.weights.unit} are zero already"
            f"{', as many, to within a rounding' if same else ''}; ask for more, or only train (keep_zeros)"
        )

    @property
    def _pattern_name(self) -> str:
        """What distinguishes one pattern from another."""
        return repr(self.pattern) if is_dataclass(self.pattern) else type(self.pattern).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return masks, history and Q with its learning; the weights are the model's own state."""
        state = {
            "pattern": self._pattern_name,
            "masks": dict(self.masks),
            "zero_matrices": self.weights.zero_matrices,
            "history": [asdict(step) for step in self.history],
            "curvature": self.curvature.state_dict(),
            "accumulated": self._accumulated.state_dict(),
        }
        return copy.deepcopy(state)  # Q goes on learning, and the state is that of now

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, bit for bit, after the model got back its weights.

        Args:
            state: The saved state.

        Raises:
            ValueError: The state is that of another pattern or another model, or its masks are no masks.
        """
        if state["pattern"] != self._pattern_name:
            raise ValueError(f"the state is that of pattern {state['pattern']}, this is {self._pattern_name}")
        parameters = dict(self.model.named_parameters())
        for name, mask in state["masks"].items():
            if name not in parameters or parameters[name].shape != mask.shape:
                found = f"of shape {tuple(parameters[name].shape)}" if name in parameters else "missing"
                raise ValueError(
                    f"the state is that of another model: it masks {name!r} of shape {tuple(mask.shape)}, "
                    f"which is {found} here"
                )
            if mask.dtype != torch.bool:
                raise ValueError(f"the mask of {name!r} must hold booleans, got {mask.dtype}")
        device = next(self.model.parameters()).device
        self.masks = {name: mask.to(device) for name, mask in state["masks"].items()}
        self.history = [PruneStep(**step) for step in state["history"]]
        self.weights.restore_zero_matrices(state.get("zero_matrices", ()), self.masks)
        self.curvature.only = set(self.weights.names)
        self.curvature.load_state_dict(state["curvature"], self.masks)
        if "accumulated" in state:
            self._accumulated.load_state_dict(state["accumulated"])


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    lazy = [name for name, p in model.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise ValueError(f"{lazy[0]} has no shape yet: call the model once on a batch, or load its weights")
