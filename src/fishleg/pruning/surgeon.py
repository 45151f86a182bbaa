"""The surgeon: Algorithm 1 of the paper, gradual and in training-free stages.

estimate Q → score → select → compensate → refresh normalisation statistics → (fine-tune, refine Q) → again.
The model is changed in place and stays the user's own class; masks live beside it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from fishleg.curvature.layers import find_layers
from fishleg.curvature.likelihoods import Likelihood, as_likelihood
from fishleg.inverse.auxiliary import Auxiliary, AuxiliaryStats
from fishleg.inverse.estimators import estimate
from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.inverse.learned import learner
from fishleg.inverse.options import DAMPING, MASK_SEARCH_DAMPING, ROW_DAMPING, AuxiliaryOptions
from fishleg.pruning import diagnostics, model_graph, prunable
from fishleg.pruning.masks import SPARSE, apply_masks, pruned_masks
from fishleg.pruning.options import PruningOptions
from fishleg.pruning.output_change import OutputChange
from fishleg.pruning.patterns import Masks, as_pattern
from fishleg.pruning.pruner import Pruner
from fishleg.pruning.schedules import as_sparsity, check_sparsities
from fishleg.runtime.batches import Forward, default_forward
from fishleg.runtime.batchnorm import batch_statistics_mode, batchnorm_input_moments, refresh_batchnorm
from fishleg.runtime.loaders import check_loader, cycle, sub_batches
from fishleg.runtime.models import abbreviate
from fishleg.runtime.modes import gradients_enabled
from fishleg.runtime.process_group import broadcast_from_first, warn_if_not_shared

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PruneStep:
    """What one pruning step did: asked and reached sparsity, predicted and measured loss increase."""

    target: float
    sparsity: float
    removed: int
    predicted: float  # Σ over layers of the quadratic model's loss increase (KL to the model before)
    measured: float | None  # that KL on a few batches, after the refresh of BatchNorm
    gamma: float
    per_layer: dict[str, float] = field(default_factory=dict)  # sparsity by weight


class Surgeon:
    """Prunes a model in place; call `prune(sparsity)` as often as the schedule has steps.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> surgeon = Surgeon(model, [torch.randn(64, 8) for _ in range(4)], exclude=["2.weight"])
    >>> round(surgeon.prune(0.5).sparsity, 2)
    0.5
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        likelihood: Likelihood | str = "categorical",
        *,
        options: PruningOptions | None = None,
        forward: Forward = default_forward,
        generator: torch.Generator | None = None,
        **overrides: Any,
    ) -> None:
        """`overrides` are fields of PruningOptions, for short: Surgeon(model, loader, pattern="2:4")."""
        if options is not None and overrides:
            raise ValueError(f"pass either options or keywords, got both ({', '.join(overrides)})")
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        lazy = [name for name, p in model.named_parameters() if isinstance(p, UninitializedParameter)]
        if lazy:
            raise ValueError(
                f"{lazy[0]} has no shape yet: call the model once on a batch, or load its weights"
            )
        check_loader(loader)
        warn_if_not_shared(model)
        self.options = options or PruningOptions(**overrides)
        self.model, self.loader, self.forward = model, loader, forward
        self.likelihood = as_likelihood(likelihood)
        self.pattern = as_pattern(self.options.pattern)
        self.generator = generator or torch.Generator().manual_seed(0)
        self.inverse: InverseFisher | None = None
        self.learning: Auxiliary | None = None  # what goes on refining the inverse, where it is learned
        self.gamma = self.options.gamma
        self.trains = False  # whether the model is trained between prunings
        self.layers = {layer.weight: layer for layer in find_layers(model) if layer.is_matrix}
        rows = self.pattern.whole_rows
        outputs = model_graph.output_layers(model, self.layers, loader, forward) if rows else set()
        self.reasons = prunable.choose(model, self.layers, self.pattern, self.options, outputs=outputs)
        self.prunable = [name for name, reason in self.reasons.items() if reason is None]
        if not self.prunable:
            raise ValueError(f"nothing to prune:\n{self.table()}")
        prunable.warn_if_mostly_left_out(model, self.reasons)
        self.norms = model_graph.following_norms(model, self.prunable, loader, forward) if rows else {}
        self.masks: Masks = {}
        self.elsewhere: Masks = {}  # zeros of what is not pruned, for training to keep
        self.found: Masks = {}  # and those of what is, until the first pruning
        self.history: list[PruneStep] = []
        self.on_q: Callable[[AuxiliaryStats], None] | None = None  # sees every step of Q's learning
        measured = self.options.measure_batches
        self.output_change = OutputChange(model, loader, self.likelihood, forward, measured)

    def table(self) -> str:
        """For each parameter: its size, sparsity, and whether it is pruned or why not."""
        return prunable.table(self.model, self.reasons)

    @property
    def pruner(self) -> Pruner:
        """What does the cutting, for the options as they are now."""
        return Pruner(self.model, self.layers, self.pattern, self.options)

    @property
    def sparsity(self) -> float:
        """The fraction of prunable weights (of rows, where whole rows go) that is removed."""
        kept = [self.pruner.counted(self.masks[name]) for name in self.prunable if name in self.masks]
        return sum(int((~mask).sum()) for mask in kept) / self._count

    @property
    def share_of_zeros(self) -> float:
        """The same fraction of what is zero by now, whoever has done it."""
        weights = [self.pruner.weight(name) == 0 for name in self.prunable]
        rows = self.pattern.whole_rows
        return sum(int((w.flatten(1).all(1) if rows else w).sum()) for w in weights) / self._count

    def note_zeros(self) -> None:
        """Remember the zeros that an earlier pruning has left, before training could fill them."""
        own = {part for name in self.prunable for part in self.layers[name].names}
        masks = pruned_masks(self.model, self.prunable)
        self.elsewhere = {name: mask for name, mask in masks.items() if name not in own}
        self.found = {name: mask for name, mask in masks.items() if name in own}
        held = [name for name in self.elsewhere if self.model.get_parameter(name).requires_grad]
        if held:
            logger.warning(
                "the zeros of %s are taken for pruned and will be kept, although these are not pruned now",
                abbreviate(held),
            )

    def check_removes(self, sparsity: float) -> None:
        """An error where all that it asks for is zero already: compensation would only fill the others."""
        present = self.share_of_zeros
        if present <= SPARSE:
            return
        scores = {name: self.model.get_parameter(name).detach().abs() for name in self.prunable}
        scores = {name: s.nan_to_num(1.0) for name, s in scores.items()}  # what is NaN is told elsewhere
        if self.pattern.whole_rows:
            scores = {name: s.flatten(1).amax(1) for name, s in scores.items()}
        elif self.pattern.group_size:
            scores = {name: self.pruner.grouped(s).amax(1) for name, s in scores.items()}
        masks = self.pattern.select(scores, sparsity)
        if any(bool(scores[name][~mask].any()) for name, mask in masks.items()):
            return
        same = round(sparsity * self._count) == round(present * self._count)
        raise ValueError(
            f"a sparsity of {sparsity:g} (pattern {self.options.pattern}) removes nothing: {present:.4f} of "
            f"the prunable {'rows' if self.pattern.whole_rows else 'weights'} are zero already"
            f"{', as many, to within a rounding' if same else ''}; ask for more, or only train (keep_zeros)"
        )

    def check_targets(self, sparsities: Sequence[float]) -> list[float]:
        """A schedule as a list; an error where it does not rise, or pattern and floor forbid its end."""
        targets = check_sparsities(list(sparsities))
        if targets[-1] > self.pattern.limit:
            raise ValueError(
                f"the pattern allows a sparsity of {self.pattern.limit} at most, got {targets[-1]}"
            )
        if not self.history:  # any scores will do to see whether it can be done
            scores = {name: torch.zeros(self.pruner.score_shape(name)) for name in self.prunable}
            self.pattern.select(scores, targets[-1], self.options.floor * (1 - targets[-1]))
        return targets

    def _rounds_to(self, sparsity: float) -> bool:
        """Whether it asks for as many weights (rows) as are removed: of few, two stages may be alike."""
        return round(sparsity * self._count) == round(self.sparsity * self._count)

    @property
    def _count(self) -> int:
        """Weights, or rows, that can be removed."""
        pruner = self.pruner
        return sum(pruner.counted(pruner.weight(name)).numel() for name in self.prunable)

    @gradients_enabled()
    def estimate(self) -> InverseFisher:
        """Estimate Q afresh at the model as it is now."""
        o = self.options
        if o.method == "fishleg":
            self.learning = self.new_learner()
            self.inverse, gamma = self.learning.inverse, self.learning.gamma
        else:
            with batch_statistics_mode(self.model) if o.batch_statistics else nullcontext():
                self.inverse, gamma = estimate(
                    o.method, self.model, self.loader, self.likelihood, empirical=o.empirical,
                    only=set(self.prunable),
                    batch_statistics=bool(o.batch_statistics), **self._estimation(),
                )  # fmt: skip
            broadcast_from_first(self.model, [*self.inverse.parameters(), *self.inverse.buffers()])
        if self.gamma is None and o.method != "magnitude":  # which has none: Q = I
            self.gamma = gamma
        return self.inverse

    @gradients_enabled()
    def new_learner(self, *, untaught: bool = False) -> Auxiliary:
        """A Q learned at the model as it is now, and what can go on refining it."""
        with batch_statistics_mode(self.model):
            return learner(
                self.model, self.loader, self.likelihood, callback=self.on_q, untaught=untaught,
                batch_statistics=self._learns_by_batch, **self._estimation(),
            )  # fmt: skip

    @property
    def _learns_by_batch(self) -> bool:
        """Whether a learned Q is that of the network with BatchNorm by the batch.

        After a pruning the statistics of BatchNorm are renewed, and that undoes part of its harm: a filter
        that has become shorter, for one, or a mean that has moved. With running statistics F charges
        for that, too; by the batch it does not.
        """
        given = self.options.batch_statistics
        return bool(self.options.batchnorm_batches) if given is None else given

    @property
    def _refines_by_batch(self) -> bool:
        """Whether nothing that refines Q between two cuts reads BatchNorm's running statistics."""
        chosen = self.options.auxiliary or AuxiliaryOptions()
        return self._learns_by_batch and not chosen.vectorize and chosen.estimator != "probe"

    @property
    def _relative_damping(self) -> float:
        """As asked for, or else what suits.

        Exchanges are guided by all that Q knows, and damping blurs it; single scores are better with more.
        So is a Q that follows a model in training: it is noisier than one that has it at rest. To remove a
        whole row is a large step, of which a quadratic model knows little.
        """
        if self.options.relative_damping is not None:
            return self.options.relative_damping
        if self.pattern.whole_rows:
            return ROW_DAMPING
        return MASK_SEARCH_DAMPING if self.pruner.exchanges and not self.trains else DAMPING

    def _estimation(self) -> dict[str, Any]:
        o = self.options
        return {
            "gamma": self.gamma, "relative_damping": self._relative_damping, "samples": o.samples,
            "sub_batch": o.sub_batch, "structure": o.structure, "block_size": o.block_size,
            "options": o.auxiliary, "scale": o.scale,
            "forward": self.forward, "generator": self.generator, "masks": self.masks,
        }  # fmt: skip

    @gradients_enabled()
    def refine(self, steps: int | None = None) -> InverseFisher:
        """Go on learning the same Q at the model as it is now; methods that do not learn estimate afresh.

        By default with half of the samples of an estimate.
        """
        if self.learning is None:
            return self.estimate()
        chosen = self.options.auxiliary or AuxiliaryOptions(groups=4)
        groups, refine_every = chosen.groups, chosen.refine_every
        steps = max(self.options.samples // (2 * groups), 1) if steps is None else steps
        self.learning.reconfigure(
            sub_batch=None, groups=groups, refine_every=refine_every, eta_floor=0.05,
            batch_statistics=self._learns_by_batch and not chosen.vectorize,
        )  # fmt: skip
        batches = sub_batches(self.loader, groups * self.options.sub_batch)
        with batch_statistics_mode(self.model):
            for _, batch in zip(range(steps), batches, strict=False):
                stats = self.learning.try_step(batch)
                if stats is not None and self.on_q is not None:
                    self.on_q(stats)
        return self.learning.inverse

    @gradients_enabled()
    def prune(
        self, sparsity: float, *, inverse: InverseFisher | None = None, cuts: int = 1, refine: int = 24
    ) -> PruneStep:
        """Prune to the given total sparsity with a fresh Q, or with the one that is passed.

        In more than one cut each leaves the same share of what the last one left, and Q is refined in between
        (`refine` auxiliary steps): a quadratic model holds better over a small change. A Q that is not
        learned would have to be estimated anew each time; with it there is one cut.
        """
        sparsity = as_sparsity(sparsity)
        rises = not self.history or sparsity > self.history[-1].target
        if sparsity <= self.sparsity and not (rises and self._rounds_to(sparsity)):
            raise ValueError(f"sparsity {sparsity} is not above the present {self.sparsity:.4f}")
        self.check_targets([sparsity])
        if cuts < 1 or refine < 1:
            raise ValueError(f"cuts and refine must be >= 1, got {cuts} and {refine}")
        before, old = self.output_change.outputs(), self.masks
        if not self.history:
            # an empty loader is an error, before anything is changed
            batches = self.output_change.batches or [next(cycle(self.loader))]
            diagnostics.warn_about_outputs(before, batches, self.likelihood)
            if self.options.method != "magnitude":
                diagnostics.check_batches(self.model, batches[0], self.likelihood, self.forward, self.options)
                diagnostics.warn_about_unused_weights(
                    self.model, self.prunable, batches, self.forward, self.options.sub_batch
                )
        zeros = {name: self.pruner.weight(name) == 0 for name in self.prunable}
        for name, zero in zeros.items():
            if (held := self.layers[name].padding_rows(zero.device)) is not None:
                zero &= ~held  # padding is zero for good
        inputs = self._norm_inputs()
        q = inverse or self.estimate()
        cuts = cuts if self.learning is not None else 1
        if cuts > 1:
            self.select(q, sparsity)  # what cannot be done is told before the first cut
        kept, predicted, unrenewed = 1 - self.sparsity, 0.0, None
        for left in reversed(range(cuts)):
            target = sparsity if not left else 1 - kept * ((1 - sparsity) / kept) ** (1 - left / cuts)
            new = self.exchange(q, self.select(q, target))
            predicted += self.pruner.remove(q, new)
            vectors = self.pruner.vector_masks(new, self.norms)
            apply_masks(self.model, vectors)
            self.masks = {**self.masks, **new, **vectors}
            if self.options.batchnorm_batches and not (left and self._refines_by_batch):
                unrenewed = None if left else self.output_change.moved(before)
                count, moved = self.options.batchnorm_batches, self._moved_norms(inputs)
                refresh_batchnorm(self.model, self.loader, count, self.forward, moved)
            broadcast_from_first(self.model, [*self.masks.values(), *self.model.state_dict().values()])
            if self.learning is not None:
                self.learning.ignore_removed_rows(self.masks)
            if left:
                q = self.refine(refine)
        step = PruneStep(
            target=sparsity,
            sparsity=self.sparsity,
            removed=sum(int((old[n] & ~m if n in old else ~m).sum()) for n, m in new.items()),
            predicted=predicted,
            measured=self.output_change.moved(before),
            gamma=self.gamma or 0.0,
            per_layer={name: float((~self.masks[name]).float().mean()) for name in self.prunable},
        )
        if (
            not diagnostics.warn_about_batchnorm_refresh(unrenewed, step.measured)
            and self.options.method != "magnitude"
        ):
            diagnostics.warn_about_prediction(step.sparsity, step.predicted, step.measured)
        loose = sum(int((zero & self.masks[name]).sum()) for name, zero in zeros.items())
        diagnostics.warn_about_loose_zeros(loose, step.sparsity, str(self.options.pattern))
        self.history.append(step)
        return step

    def _norm_inputs(self) -> dict[_BatchNorm, list[Tensor]]:
        """What BatchNorms get on a batch that is kept for measuring; nothing where there is none."""
        if not self.options.batchnorm_batches or not self.output_change.batches:
            return {}
        return batchnorm_input_moments(self.model, self.output_change.batches[0], self.forward)

    def _moved_norms(self, before: Mapping[_BatchNorm, list[Tensor]]) -> list[_BatchNorm] | None:
        """Those that get something else than before; None, which is all of them, where nobody can tell.

        The statistics of the others still hold, and the loader's first batches know them less well.
        """
        if not before:
            return None
        now = self._norm_inputs()
        same = [  # one that was not called, on this batch, may be on others
            bool(old) and len(old) == len(now[norm]) and all(map(torch.equal, old, now[norm]))
            for norm, old in before.items()
        ]
        flags = torch.tensor(same, device=next(self.model.parameters()).device)
        broadcast_from_first(self.model, [flags])  # a SyncBatchNorm waits for all processes
        return [norm for norm, flag in zip(before, flags.tolist(), strict=True) if not flag]

    def select(self, q: InverseFisher, sparsity: float, *, only: Sequence[str] | None = None) -> Masks:
        """Masks of the given sparsity from the scores of Q; removed weights stay removed.

        `only` restricts the choice, and what the sparsity refers to, to some of the weights.
        """
        return self.pruner.select(q, sparsity, only or self.prunable, self.masks)

    def exchange(self, q: InverseFisher, masks: Masks) -> Masks:
        """As many weights, better chosen: their joint loss increase, as Q predicts it, is lower."""
        return self.pruner.exchange(q, masks, self.masks)

    def predict(self, q: InverseFisher, masks: Mapping[str, Tensor]) -> dict[str, float]:
        """The loss increase that Q expects of these masks, by weight; nothing is changed."""
        return self.pruner.predict(q, masks)

    def staged(
        self, sparsities: Sequence[float], callback: Callable[[PruneStep], None] | None = None
    ) -> list[PruneStep]:
        """Training-free pruning in stages: look again, prune and compensate at each sparsity.

        A learned Q is refined from stage to stage with half of the samples, which is better than to start
        over with all of them; the other methods estimate theirs afresh.
        """
        steps: list[PruneStep] = []
        for sparsity in self.check_targets(sparsities):
            known = self.learning is not None and bool(self.history)
            inverse = self.refine() if known else None
            steps.append(self.prune(sparsity, inverse=inverse))
            if callback is not None:
                callback(steps[-1])
        return steps

    @property
    def _pattern_name(self) -> str:
        """What tells one pattern from another."""
        return repr(self.pattern) if is_dataclass(self.pattern) else type(self.pattern).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Masks, γ, history, generator, Q with its learning; the weights are the model's own state."""
        learning = None
        if self.learning is not None:
            learning = {"inverse": self.learning.inverse.state_dict(), "state": self.learning.state_dict()}
        state = {
            "pattern": self._pattern_name,
            "masks": dict(self.masks),
            "gamma": self.gamma,
            "generator": self.generator.get_state(),
            "history": [asdict(step) for step in self.history],
            "learning": learning,
        }
        return copy.deepcopy(state)  # Q goes on learning, and the state is that of now

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, bit for bit."""
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
        device = next(self.model.parameters()).device
        self.masks = {name: mask.to(device) for name, mask in state["masks"].items()}
        self.gamma = state["gamma"]
        self.history = [PruneStep(**step) for step in state["history"]]
        self.learning = self.inverse = None
        if state["learning"] is not None:
            self.learning = self.new_learner(untaught=True)
            self.inverse = self.learning.inverse
            self.inverse.load_state_dict(state["learning"]["inverse"])
            self.learning.load_state_dict(state["learning"]["state"])
        self.generator.set_state(state["generator"])
