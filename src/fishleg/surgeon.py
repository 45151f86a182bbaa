"""The surgeon: Algorithm 1 of the paper, gradual and in training-free stages.

estimate Q → score → select → compensate → refresh normalisation statistics → (fine-tune, refine Q) → again.
The model is changed in place and stays the user's own class; masks live beside it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.auxiliary import Auxiliary, AuxStats
from fishleg.baselines import DAMPING, EXCHANGE_DAMPING, METHODS, estimate, learner, sub_batches
from fishleg.batches import Forward, check_loader, cycle, default_forward
from fishleg.exchange import exchange
from fishleg.inverse import DEFAULT_STRUCTURE, InverseFisher, Structure
from fishleg.layers import Layer, find_layers
from fishleg.likelihoods import Likelihood, as_likelihood
from fishleg.masking import normalised_by_batch, refresh_batchnorm
from fishleg.obs import (
    COMPENSATIONS,
    Compensation,
    compensate,
    exchange_curvature,
    exchange_scores,
    group_saliency,
    row_saliency,
    saliency,
)
from fishleg.patterns import Masks, Pattern, as_pattern, check_sparsities
from fishleg.warmstart import AuxiliaryOptions
from fishleg.yardstick import Yardstick

logger = logging.getLogger(__name__)

# Conjugate gradients within a round of exchanges. On ResNet20, at 50 to 95 %, so few end at a loss increase
# that is up to 4 % below that of 50, in a third of the time.
_ROUND_ITERATIONS = 8


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


@dataclass(frozen=True, kw_only=True)
class SurgeonOptions:
    """How to prune. The defaults need no search."""

    method: str = "fishleg"
    pattern: Pattern | str = "global"
    compensation: str = "joint"
    include: Sequence[str] = ()  # regular expressions on parameter names; empty = every matrix
    exclude: Sequence[str] = ()
    exchanges: int = 12  # rounds that swap kept weights for removed ones worth more (FLS, joint); 0 = never
    exchange_across_layers: bool = True  # False: every layer keeps the number of weights that scores gave it
    floor: float = 0.2  # each weight keeps at least this share of the mean density: no layer is emptied
    gamma: float | None = None  # damping; None = relative_damping × mean diag(F)
    relative_damping: float | None = None  # None: 0.01 with exchanges in a model at rest, else 0.1
    samples: int = 256  # gradients per estimate of Q
    sub_batch: int = 16  # examples per gradient
    empirical: bool = False
    block_size: int = 50
    structure: Structure = DEFAULT_STRUCTURE
    scale: float | None = None  # Q₀ = scale · I; matters to the estimators `probe` and `trace` only
    batchnorm_batches: int = 20  # refresh of BatchNorm statistics after pruning; 0 = never
    # F of the network that normalises by the batch, as it does once that is done; None: so for a learned Q,
    # with the running statistics, as published, for the others
    batch_statistics: bool | None = None
    measure_batches: int = 2  # batches on which the loss increase of each step is measured; 0 = never
    auxiliary: AuxiliaryOptions | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        if self.compensation not in COMPENSATIONS:
            raise ValueError(
                f"compensation must be one of {', '.join(COMPENSATIONS)}, got {self.compensation!r}"
            )
        if not 0 <= self.floor < 1:
            raise ValueError(f"floor must be in [0, 1), got {self.floor}")
        if self.gamma is not None and not self.gamma > 0:
            raise ValueError(f"gamma must be > 0, got {self.gamma}")
        if self.relative_damping is not None and not self.relative_damping > 0:
            raise ValueError(f"relative_damping must be > 0, got {self.relative_damping}")
        for name in ("include", "exclude"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a list of regular expressions, got {getattr(self, name)!r}")
        for name in ("samples", "sub_batch", "block_size"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.empirical and self.method in ("fishleg", "magnitude"):
            raise ValueError(f"empirical=True is for the other methods, {self.method!r} has no use for it")
        if not self.exchanges >= 0 or self.exchanges != int(self.exchanges):
            raise ValueError(f"exchanges must be >= 0 and whole, got {self.exchanges}")
        if self.batchnorm_batches < 0:
            raise ValueError(f"batchnorm_batches must be >= 0, got {self.batchnorm_batches}")
        if self.batch_statistics and (self.method == "exact" or not self.batchnorm_batches):
            raise ValueError(
                "batch_statistics=True needs batchnorm_batches >= 1, and a method other than exact, "
                f"got {self.batchnorm_batches} and {self.method!r}"
            )
        if self.batch_statistics and self.auxiliary is not None and self.auxiliary.vectorize:
            raise ValueError("batch_statistics=True and AuxiliaryOptions(vectorize=True) exclude each other")
        if self.measure_batches < 0:
            raise ValueError(f"measure_batches must be >= 0, got {self.measure_batches}")
        as_pattern(self.pattern)


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
        options: SurgeonOptions | None = None,
        forward: Forward = default_forward,
        generator: torch.Generator | None = None,
        **overrides: Any,
    ) -> None:
        """`overrides` are fields of SurgeonOptions, for short: Surgeon(model, loader, pattern="2:4")."""
        if options is not None and overrides:
            raise ValueError(f"pass either options or keywords, got both ({', '.join(overrides)})")
        check_loader(loader)
        self.options = options or SurgeonOptions(**overrides)
        self.model, self.loader, self.forward = model, loader, forward
        self.likelihood = as_likelihood(likelihood)
        self.pattern = as_pattern(self.options.pattern)
        self.generator = generator or torch.Generator().manual_seed(0)
        self.inverse: InverseFisher | None = None
        self.learning: Auxiliary | None = None  # what goes on refining the inverse, where it is learned
        self.gamma = self.options.gamma
        self.trains = False  # whether the model is trained between prunings
        self.layers = {layer.weight: layer for layer in find_layers(model) if layer.is_matrix}
        self.reasons = self._choose()
        self.prunable = [name for name, reason in self.reasons.items() if reason is None]
        if not self.prunable:
            raise ValueError(f"nothing to prune:\n{self.table()}")
        self._tell_what_is_left_out()
        self.masks: Masks = {}
        self.history: list[PruneStep] = []
        self.on_q: Callable[[AuxStats], None] | None = None  # sees every step of Q's learning
        measured = self.options.measure_batches
        self.yardstick = Yardstick(model, loader, self.likelihood, forward, measured)

    def _choose(self) -> dict[str, str | None]:
        """For every parameter, None if it will be pruned, else why not."""
        reasons: dict[str, str | None] = {}
        parameters = dict(self.model.named_parameters())
        patterns = [*self.options.include, *self.options.exclude]
        for expression in patterns:
            if not any(re.search(expression, name) for name in parameters):
                raise ValueError(f"{expression!r} matches no parameter; there are {', '.join(parameters)}")
        last = list(self.layers)[-1] if self.layers else None
        for name, parameter in parameters.items():
            included = any(re.search(expression, name) for expression in self.options.include)
            if not parameter.requires_grad:
                reasons[name] = "frozen"
            elif name not in self.layers:
                reasons[name] = "not the weight of a linear layer or convolution"
            elif self.options.include and not included:
                reasons[name] = "not included"
            elif any(re.search(expression, name) for expression in self.options.exclude):
                reasons[name] = "excluded"
            elif self.pattern.whole_rows and name == last and not included:
                reasons[name] = "rows of the output layer are the model's outputs (include it to prune them)"
            else:
                reasons[name] = self.pattern.unsuitable(tuple(parameter.shape))
        return reasons

    def _tell_what_is_left_out(self) -> None:
        """Say so when most of the model cannot be pruned: the sparsity is that of the rest."""
        chosen = ("frozen", "excluded", "not included")  # that was the user's wish
        sizes = {name: self._weight(name).numel() for name, why in self.reasons.items() if why not in chosen}
        pruned, total = sum(sizes.get(name, 0) for name in self.prunable), sum(sizes.values())
        if pruned < total / 2:
            largest = sorted((name for name in sizes if self.reasons[name]), key=lambda name: -sizes[name])
            logger.warning(
                "only %.1f %% of the model's %d parameters can be pruned, and any sparsity is that of these; "
                "left out are %s%s (Surgeon.table() lists all)",
                100 * pruned / total, total,
                ", ".join(f"{name} ({self.reasons[name]})" for name in largest[:3]),
                f" and {len(largest) - 3} more" if len(largest) > 3 else "",
            )  # fmt: skip

    def table(self) -> str:
        """For each parameter: its size, sparsity, and whether it is pruned or why not."""
        rows = [f"{'parameter':<36} {'size':>10} {'zeros':>8}  pruned?"]
        for name, parameter in self.model.named_parameters():
            zeros = 1 - float((parameter != 0).float().mean()) if parameter.numel() else 0.0
            rows.append(f"{name:<36} {parameter.numel():>10,} {zeros:>8.1%}  {self.reasons[name] or 'yes'}")
        return "\n".join(rows)

    @property
    def sparsity(self) -> float:
        """The fraction of prunable weights (of rows, where whole rows go) that is removed."""
        total = sum(self._counted(self._weight(name)).numel() for name in self.prunable)
        kept = [self._counted(self.masks[name]) for name in self.prunable if name in self.masks]
        return sum(int((~mask).sum()) for mask in kept) / total

    def check_targets(self, sparsities: Sequence[float]) -> list[float]:
        """A schedule as a list; an error where it does not rise, or pattern and floor forbid its end."""
        targets = check_sparsities(list(sparsities))
        if targets[-1] > self.pattern.limit:
            raise ValueError(
                f"the pattern allows a sparsity of {self.pattern.limit} at most, got {targets[-1]}"
            )
        if not self.history:  # any scores will do to see whether it can be done
            scores = {name: torch.zeros(self._score_shape(name)) for name in self.prunable}
            self.pattern.select(scores, targets[-1], self.options.floor * (1 - targets[-1]))
        return targets

    def _score_shape(self, name: str) -> tuple[int, ...]:
        """The shape that the pattern selects on."""
        weight = self._weight(name)
        if self.pattern.whole_rows:
            return (len(weight),)
        return (weight.numel() // self.pattern.group_size,) if self.pattern.group_size else weight.shape

    def _rounds_to(self, sparsity: float) -> bool:
        """Whether it asks for as many weights (rows) as are removed: of few, two stages may be alike."""
        total = sum(self._counted(self._weight(name)).numel() for name in self.prunable)
        return round(sparsity * total) == round(self.sparsity * total)

    def _counted(self, tensor: Tensor) -> Tensor:
        """What sparsity counts: the entries of a weight, or one of each row."""
        return tensor.flatten(1)[:, 0] if self.pattern.whole_rows else tensor

    def estimate(self) -> InverseFisher:
        """Estimate Q afresh at the model as it is now."""
        o = self.options
        if o.method == "fishleg":
            self.learning = self.new_learner()
            self.inverse, gamma = self.learning.inverse, self.learning.gamma
        else:
            with normalised_by_batch(self.model) if o.batch_statistics else nullcontext():
                self.inverse, gamma = estimate(
                    o.method, self.model, self.loader, self.likelihood, empirical=o.empirical,
                    block_size=o.block_size, only=set(self.prunable),
                    batch_statistics=bool(o.batch_statistics), **self._estimation(),
                )  # fmt: skip
        if self.gamma is None and o.method != "magnitude":  # which has none: Q = I
            self.gamma = gamma
        return self.inverse

    def new_learner(self, *, untaught: bool = False) -> Auxiliary:
        """A Q learned at the model as it is now, and what can go on refining it."""
        with normalised_by_batch(self.model):
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
    def _relative_damping(self) -> float:
        """As asked for, or else what suits.

        Exchanges are guided by all that Q knows, and damping blurs it; single scores are better with more.
        So is a Q that follows a model in training: it is noisier than one that has it at rest.
        """
        if self.options.relative_damping is not None:
            return self.options.relative_damping
        return EXCHANGE_DAMPING if self._exchanges and not self.trains else DAMPING

    def _estimation(self) -> dict[str, Any]:
        o = self.options
        return {
            "gamma": self.gamma, "relative_damping": self._relative_damping, "samples": o.samples,
            "sub_batch": o.sub_batch, "structure": o.structure, "options": o.auxiliary, "scale": o.scale,
            "forward": self.forward, "generator": self.generator,
        }  # fmt: skip

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
        with normalised_by_batch(self.model):
            for _, batch in zip(range(steps), batches, strict=False):
                stats = self.learning.try_step(batch)
                if stats is not None and self.on_q is not None:
                    self.on_q(stats)
        return self.learning.inverse

    def prune(
        self, sparsity: float, *, inverse: InverseFisher | None = None, cuts: int = 1, refine: int = 24
    ) -> PruneStep:
        """Prune to the given total sparsity with a fresh Q, or with the one that is passed.

        In more than one cut each leaves the same share of what the last one left, and Q is refined in between
        (`refine` auxiliary steps): a quadratic model holds better over a small change. A Q that is not
        learned would have to be estimated anew each time; with it there is one cut.
        """
        if not 0 < sparsity < 1:
            raise ValueError(f"sparsity must be in (0, 1), got {sparsity}")
        rises = not self.history or sparsity > self.history[-1].target
        if sparsity <= self.sparsity and not (rises and self._rounds_to(sparsity)):
            raise ValueError(f"sparsity {sparsity} is not above the present {self.sparsity:.4f}")
        self.check_targets([sparsity])
        if cuts < 1 or refine < 1:
            raise ValueError(f"cuts and refine must be >= 1, got {cuts} and {refine}")
        if not self.history and not self.yardstick.count:
            next(cycle(self.loader))  # an empty loader is an error, before anything is changed
        before, old = self.yardstick.outputs(), self.masks
        zeros = {name: self._weight(name) == 0 for name in self.prunable}
        q = inverse or self.estimate()
        cuts = cuts if self.learning is not None else 1
        if cuts > 1:
            self.select(q, sparsity)  # what cannot be done is told before the first cut
        kept, predicted = 1 - self.sparsity, 0.0
        for left in reversed(range(cuts)):
            target = sparsity if not left else 1 - kept * ((1 - sparsity) / kept) ** (1 - left / cuts)
            new = self.exchange(q, self.select(q, target))
            predicted += self._operate(q, new)
            self.masks = {**new, **self._bias_masks(new)}
            if self.options.batchnorm_batches:
                refresh_batchnorm(self.model, self.loader, self.options.batchnorm_batches, self.forward)
            if left:
                q = self.refine(refine)
        step = PruneStep(
            target=sparsity,
            sparsity=self.sparsity,
            removed=sum(int((old[n] & ~m if n in old else ~m).sum()) for n, m in new.items()),
            predicted=predicted,
            measured=self.yardstick.moved(before),
            gamma=self.gamma or 0.0,
            per_layer={name: float((~self.masks[name]).float().mean()) for name in self.prunable},
        )
        self._compare(step)
        self._look_for_loose(zeros)
        self.history.append(step)
        return step

    def _compare(self, step: PruneStep) -> None:
        """Say so when the quadratic model was badly wrong: then more, smaller steps are due."""
        if self.options.method == "magnitude" or step.measured is None:
            return
        low, high = sorted((step.predicted, step.measured))
        if high > 0.05 and high > 5 * low:
            logger.warning(
                "at sparsity %.3f the loss increase was %.3g, and Q had predicted %.3g: the quadratic model "
                "does not hold over so large a step; use more stages, more samples or another damping",
                step.sparsity, step.measured, step.predicted,
            )  # fmt: skip

    def _look_for_loose(self, zeros: Mapping[str, Tensor]) -> None:
        """Say so when the model had zeros that the masks do not hold: compensation and training move them."""
        loose = sum(int((zero & self.masks[name]).sum()) for name, zero in zeros.items())
        if loose:
            logger.warning(
                "%d weights that were zero already are not among those removed at sparsity %.3f, pattern %s: "
                "compensation and training may fill them; prune further than the model is sparse",
                loose, self.sparsity, self.options.pattern,
            )  # fmt: skip

    def select(self, q: InverseFisher, sparsity: float, *, only: Sequence[str] | None = None) -> Masks:
        """Masks of the given sparsity from the scores of Q; removed weights stay removed.

        `only` restricts the choice, and what the sparsity refers to, to some of the weights.
        """
        with torch.no_grad():
            scores = {name: self._score(self.layers[name], q) for name in only or self.prunable}
        masks = self.pattern.select(scores, sparsity, self.options.floor * (1 - sparsity))
        return {name: self._expand(name, mask) for name, mask in masks.items()}

    def _score(self, layer: Layer, q: InverseFisher) -> Tensor:
        """Scores in the shape that the pattern selects on; −inf for what is removed already."""
        operator, name = q.unmasked(layer.name), layer.weight
        packed = self._packed(layer, q)
        old = self.masks.get(name)
        if self.pattern.whole_rows:
            scores = row_saliency(packed, operator)
            gone = None if old is None else ~old.flatten(1).any(1)
        elif self.pattern.group_size:
            n_out, n_in = self._weight(name).flatten(1).shape
            index = torch.arange(n_in, device=packed.device) + packed.shape[1] * torch.arange(
                n_out, device=packed.device
            ).unsqueeze(1)
            groups = index.view(-1, self.pattern.group_size)
            scores = group_saliency(packed, operator, groups)
            gone = None if old is None else ~old.view(-1, self.pattern.group_size).any(1)
        else:
            scores = layer.unpack(saliency(packed, operator))[name]
            gone = None if old is None else ~old
        if not bool(torch.isfinite(scores).all()):
            raise ValueError(f"non-finite saliency in {name!r}")
        return scores if gone is None else scores.masked_fill(gone, -torch.inf)

    def _packed(self, layer: Layer, q: InverseFisher) -> Tensor:
        """The layer's parameters as one matrix, in the dtype of its Q."""
        w = layer.pack({part: self._weight(part).detach() for part in layer.names})
        return w.to(q.reference(layer.name).dtype)

    def _expand(self, name: str, mask: Tensor) -> Tensor:
        """A mask on scores → a mask on the weight."""
        weight = self._weight(name)
        if self.pattern.whole_rows:
            return mask.view(-1, *[1] * (weight.dim() - 1)).expand_as(weight).clone()
        if self.pattern.group_size:
            return mask.unsqueeze(-1).expand(-1, self.pattern.group_size).reshape(weight.shape)
        return mask

    @property
    def _exchanges(self) -> bool:
        o, pattern = self.options, self.pattern
        alone = not (pattern.group_size or pattern.whole_rows)  # weights are scored one by one
        return bool(o.exchanges) and o.method == "fishleg" and o.compensation == "joint" and alone

    @torch.no_grad()
    def exchange(self, q: InverseFisher, masks: Masks) -> Masks:
        """As many weights, better chosen: their joint loss increase, as Q predicts it, is lower.

        The scores that chose these masks know nothing of each other: of two weights that can stand in for one
        another both look cheap, and both go. Here all are scored again at the compensated solution, and
        kept weights change places with removed ones that are worth more, for as long as that helps.
        No weight that is zero already comes back, whether an earlier step removed it or somebody else.
        """
        o, pattern = self.options, self.pattern
        if not self._exchanges:
            return masks
        if any(q.mask(self.layers[name].name) is not None for name in masks):
            return masks  # a restricted Q knows nothing of what is removed
        if not pattern.within_layers and o.exchange_across_layers:
            return self._exchange(q, masks, o.floor)
        return {name: self._exchange(q, {name: mask}, 0.0)[name] for name, mask in masks.items()}

    def _exchange(self, q: InverseFisher, masks: Masks, floor: float) -> Masks:
        """Exchanges among these weights, whose number stays what it is."""
        zeros = {name: self._weight(name) == 0 for name in masks}
        total, left = sum(mask.numel() for mask in masks.values()), sum(int(m.sum()) for m in masks.values())
        if sum(int(zero.sum()) for zero in zeros.values()) > total - left:
            return masks  # more zeros than places for them, and none may come back
        kept = left / total
        operators = {name: q.operator(self.layers[name].name) for name in masks}
        curvatures = {name: exchange_curvature(operator) for name, operator in operators.items()}

        def judge(trial: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
            """The predicted loss increase of masks, and what each weight is worth beside the others."""
            predicted, scores = 0.0, {}
            for name, mask in trial.items():
                layer, removed = self.layers[name], self._removed(q, name, mask)
                w = self._packed(layer, q)
                result = compensate(w, operators[name], removed, iterations=_ROUND_ITERATIONS)
                predicted += result.predicted
                values = layer.unpack(exchange_scores(w, curvatures[name], removed, result))[name]
                gone = zeros[name] | ~self.masks[name] if name in self.masks else zeros[name]
                scores[name] = values.masked_fill(gone, -torch.inf)
            return predicted, scores

        def choose(scores: Mapping[str, Tensor]) -> Masks:
            return self.pattern.select(scores, 1 - kept, floor * kept)

        return exchange(masks, judge, choose, self.options.exchanges)

    @torch.no_grad()
    def _operate(self, q: InverseFisher, masks: Mapping[str, Tensor]) -> float:
        """Delete and compensate in every layer; returns the predicted loss increase.

        A Q of all weights is asked about everything that is removed, now or before. A Q that was restricted
        to the kept weights knows nothing of the rest and is asked about what goes now.
        """
        predicted = 0.0
        for name, mask in masks.items():
            layer, w, result = self._compensated(q, name, mask)
            predicted += result.predicted
            for part, value in layer.unpack(w + result.delta).items():
                self._weight(part).copy_(value)
        return predicted

    def _compensated(self, q: InverseFisher, name: str, mask: Tensor) -> tuple[Layer, Tensor, Compensation]:
        layer = self.layers[name]
        w, removed = self._packed(layer, q), self._removed(q, name, mask)
        return layer, w, compensate(w, q.operator(layer.name), removed, self.options.compensation)

    def _removed(self, q: InverseFisher, name: str, mask: Tensor) -> Tensor:
        """What a mask removes of the weight's layer, packed; of a restricted Q, what goes now."""
        layer = self.layers[name]
        keep = {part: torch.ones_like(self._weight(part), dtype=torch.bool) for part in layer.names}
        keep.update(self._bias_masks({name: mask}))
        keep[name] = mask
        removed, kept_before = ~layer.pack(keep), q.mask(layer.name)
        return removed if kept_before is None else removed & kept_before

    @torch.no_grad()
    def predict(self, q: InverseFisher, masks: Mapping[str, Tensor]) -> dict[str, float]:
        """The loss increase that Q expects of these masks, by weight; nothing is changed."""
        return {name: self._compensated(q, name, mask)[2].predicted for name, mask in masks.items()}

    def _bias_masks(self, masks: Mapping[str, Tensor]) -> Masks:
        """A removed row takes its bias along."""
        if not self.pattern.whole_rows:
            return {}
        biases = {name: self.layers[name].bias for name in masks}
        return {bias: masks[name].flatten(1).any(1) for name, bias in biases.items() if bias}

    def _weight(self, name: str) -> Tensor:
        return self.model.get_parameter(name)

    def staged(
        self, sparsities: Sequence[float], callback: Callable[[PruneStep], None] | None = None
    ) -> list[PruneStep]:
        """Training-free pruning in stages: look again, prune and compensate at each sparsity.

        A learned Q is refined from stage to stage with half of the samples, which is better than to start
        over with all of them; the other methods estimate theirs afresh.
        """
        steps: list[PruneStep] = []
        for sparsity in self.check_targets(sparsities):
            inverse = self.refine() if self.learning is not None and steps else None
            steps.append(self.prune(sparsity, inverse=inverse))
            if callback is not None:
                callback(steps[-1])
        return steps

    def state_dict(self) -> dict[str, Any]:
        """Masks, γ, history, the generator and Q with its learning; the model's weights are its own state."""
        learning = None
        if self.learning is not None:
            learning = {"inverse": self.learning.inverse.state_dict(), "state": self.learning.state_dict()}
        return {
            "masks": dict(self.masks),
            "gamma": self.gamma,
            "generator": self.generator.get_state(),
            "history": [asdict(step) for step in self.history],
            "learning": learning,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, bit for bit."""
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


__all__ = ["PruneStep", "Surgeon", "SurgeonOptions"]
