"""What Q does to the weights: masks from its scores, exchanges, removal with compensation."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fishleg.curvature.layers import Layer
from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.pruning.compensation import Compensation, compensate, swap_curvature, swap_scores
from fishleg.pruning.mask_search import exchange
from fishleg.pruning.options import PruningOptions
from fishleg.pruning.patterns import Masks, Pattern
from fishleg.pruning.saliency import group_saliency, row_saliency, saliency
from fishleg.runtime.tensors import first_non_finite

logger = logging.getLogger(__name__)
# Conjugate gradients within a round of exchanges. On ResNet20, at 50 to 95 %, so few end at a loss increase
# that is up to 4 % below that of 50, in a third of the time.
_ROUND_ITERATIONS = 8


class Pruner:
    """Chooses and removes weights of a model by a Q that it is given; what was removed before, it is told."""

    def __init__(
        self, model: nn.Module, layers: Mapping[str, Layer], pattern: Pattern, options: PruningOptions
    ) -> None:
        """`layers` by the names of their weights."""
        self.model, self.layers, self.pattern, self.options = model, layers, pattern, options

    def score_shape(self, name: str) -> tuple[int, ...]:
        """The shape that the pattern selects on."""
        weight = self.weight(name)
        if self.pattern.whole_rows:
            return (len(weight),)
        return (weight.numel() // self.pattern.group_size,) if self.pattern.group_size else weight.shape

    def counted(self, tensor: Tensor) -> Tensor:
        """What sparsity counts: the entries of a weight, or one of each row."""
        return tensor.flatten(1)[:, 0] if self.pattern.whole_rows else tensor

    def select(
        self, q: InverseFisher, sparsity: float, names: Sequence[str], old: Mapping[str, Tensor]
    ) -> Masks:
        """Masks of the named weights, of the given sparsity, by the scores of Q; `old` stays removed."""
        with torch.no_grad():
            scores = {name: self._score(self.layers[name], q, old.get(name)) for name in names}
        masks = self.pattern.select(scores, sparsity, self.options.floor * (1 - sparsity))
        return {name: self._expand(name, mask) for name, mask in masks.items()}

    def _score(self, layer: Layer, q: InverseFisher, old: Tensor | None) -> Tensor:
        """Scores in the shape that the pattern selects on; −inf for what is removed already."""
        operator, name = q.unmasked(layer.name), layer.weight
        packed = self._packed(layer, q)
        if self.pattern.whole_rows:
            scores = row_saliency(packed, operator)
            gone = None if old is None else ~old.flatten(1).any(1)
        elif self.pattern.group_size:
            index = torch.arange(packed.numel(), device=packed.device).view(packed.shape)
            scores = group_saliency(packed, operator, self.grouped(layer.unpack(index)[name]))
            gone = None if old is None else ~self.grouped(old).any(1)
        else:
            scores = layer.unpack(saliency(packed, operator))[name]
            gone = None if old is None else ~old
        if not bool(torch.isfinite(scores).all()):
            raise ValueError(f"non-finite saliency in {name!r}")
        scores = _padding_last(layer, scores)
        return scores if gone is None else scores.masked_fill(gone, -torch.inf)

    def _packed(self, layer: Layer, q: InverseFisher) -> Tensor:
        """The layer's parameters as one matrix, in the dtype of its Q."""
        w = layer.pack({part: self.weight(part).detach() for part in layer.names})
        return w.to(q.reference(layer.name).dtype)

    def _expand(self, name: str, mask: Tensor) -> Tensor:
        """A mask on scores → a mask on the weight."""
        weight = self.weight(name)
        if self.pattern.whole_rows:
            return mask.view(-1, *[1] * (weight.dim() - 1)).expand_as(weight).clone()
        if size := self.pattern.group_size:
            positions = weight.shape[0], weight.shape[1] // size, *weight.shape[2:]
            return mask.view(positions).repeat_interleave(size, dim=1)
        return mask

    def grouped(self, tensor: Tensor) -> Tensor:
        """A weight's entries [count, size]: neighbouring inputs, for each kernel position, as in N:M."""
        assert self.pattern.group_size is not None
        groups: Tensor = tensor.unflatten(1, (-1, self.pattern.group_size))
        return groups.movedim(2, -1).flatten(0, -2)

    @property
    def exchanges(self) -> bool:
        o, pattern = self.options, self.pattern
        alone = not (pattern.group_size or pattern.whole_rows)  # weights are scored one by one
        return bool(o.exchanges) and o.method == "fishleg" and o.compensation == "joint" and alone

    @torch.no_grad()
    def exchange(self, q: InverseFisher, masks: Masks, old: Mapping[str, Tensor]) -> Masks:
        """As many weights, better chosen: their joint loss increase, as Q predicts it, is lower.

        The scores that chose these masks know nothing of each other: of two weights that can stand in for one
        another both look cheap, and both go. Here all are scored again at the compensated solution, and
        kept weights change places with removed ones that are worth more, for as long as that helps.
        No weight that is zero already comes back, whether an earlier step removed it or somebody else.
        """
        o, pattern = self.options, self.pattern
        if not self.exchanges:
            return masks
        if any(q.mask(self.layers[name].name) is not None for name in masks):
            return masks  # a restricted Q knows nothing of what is removed
        if not pattern.within_layers and o.mask_search_across_layers:
            return self._exchange(q, masks, old, o.floor)
        return {name: self._exchange(q, {name: mask}, old, 0.0)[name] for name, mask in masks.items()}

    def _exchange(self, q: InverseFisher, masks: Masks, old: Mapping[str, Tensor], floor: float) -> Masks:
        """Exchanges among these weights, whose number stays what it is."""
        zeros = {name: self.weight(name) == 0 for name in masks}
        total, left = sum(mask.numel() for mask in masks.values()), sum(int(m.sum()) for m in masks.values())
        if sum(int(zero.sum()) for zero in zeros.values()) > total - left:
            return masks  # more zeros than places for them, and none may come back
        kept = left / total
        operators = {name: q.operator(self.layers[name].name) for name in masks}
        curvatures = {name: swap_curvature(operator) for name, operator in operators.items()}

        def judge(trial: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
            """The predicted loss increase of masks, and what each weight is worth beside the others."""
            predicted, scores = 0.0, {}
            for name, mask in trial.items():
                layer, removed = self.layers[name], self._removed(q, name, mask)
                w = self._packed(layer, q)
                result = compensate(w, operators[name], removed, iterations=_ROUND_ITERATIONS, settle=False)
                predicted += result.predicted
                values = layer.unpack(swap_scores(w, curvatures[name], removed, result))[name]
                values = _padding_last(layer, values)
                gone = zeros[name] | ~old[name] if name in old else zeros[name]
                scores[name] = values.masked_fill(gone, -torch.inf)
            return predicted, scores

        def choose(scores: Mapping[str, Tensor]) -> Masks:
            return self.pattern.select(scores, 1 - kept, floor * kept)

        return exchange(masks, judge, choose, self.options.exchanges)

    @torch.no_grad()
    def remove(self, q: InverseFisher, masks: Mapping[str, Tensor]) -> float:
        """Delete and compensate in every layer; returns the predicted loss increase.

        A Q of all weights is asked about everything that is removed, now or before. A Q that was restricted
        to the kept weights knows nothing of the rest and is asked about what goes now.
        """
        predicted = 0.0
        new: dict[str, Tensor] = {}
        for name, mask in masks.items():
            self._tell_of_unseen(q, name, mask)
            layer, w, result = self._compensated(q, name, mask)
            predicted += result.predicted
            for part, value in layer.unpack(w + result.delta).items():
                new[part] = value.to(self.weight(part).dtype)
        if (bad := first_non_finite(new)) is not None:
            raise ValueError(
                f"the compensation of {bad!r} is not finite; nothing was changed. More damping may help "
                "(relative_damping), or a model in float32"
            )
        for part, value in new.items():
            self.weight(part).copy_(value)
        return predicted

    def _compensated(self, q: InverseFisher, name: str, mask: Tensor) -> tuple[Layer, Tensor, Compensation]:
        layer = self.layers[name]
        w, removed = self._packed(layer, q), self._removed(q, name, mask)
        result = compensate(w, q.operator(layer.name), removed, self.options.compensation)
        still, unseen = layer.padding_rows(w.device), q.unseen(layer.name)
        if unseen is not None:
            still = unseen.unsqueeze(1) if still is None else still | unseen.unsqueeze(1)
        if still is not None:  # such rows have no curvature: what moves them is Q's noise
            result = replace(result, delta=result.delta.masked_fill(still & ~removed, 0))
        return layer, w, result

    def _tell_of_unseen(self, q: InverseFisher, name: str, mask: Tensor) -> None:
        """Say so when words go because the data lack them, the first time that any of their weights does."""
        rows = q.unseen(self.layers[name].name)
        if rows is None or bool((self.weight(name)[rows] == 0).any()) or bool(mask[rows].all()):
            return
        logger.warning(
            "%d of the %d rows of %s never occurred in the samples: curvature is zero there, so that their "
            "weights look free (%.0f %% of them go now, and %.0f %% of the others), and they are not "
            "compensated. Where these words matter, take data or samples that have them, or exclude %s",
            int(rows.sum()), len(rows), name,
            100 * float((~mask[rows]).float().mean()), 100 * float((~mask[~rows]).float().mean()), name,
        )  # fmt: skip

    def _removed(self, q: InverseFisher, name: str, mask: Tensor) -> Tensor:
        """What a mask removes of the weight's layer, packed; of a restricted Q, what goes now."""
        layer = self.layers[name]
        keep = {part: torch.ones_like(self.weight(part), dtype=torch.bool) for part in layer.names}
        keep.update(self.vector_masks({name: mask}))
        keep[name] = mask
        removed, kept_before = ~layer.pack(keep), q.mask(layer.name)
        return removed if kept_before is None else removed & kept_before

    @torch.no_grad()
    def predict(self, q: InverseFisher, masks: Mapping[str, Tensor]) -> dict[str, float]:
        """The loss increase that Q expects of these masks, by weight; nothing is changed."""
        return {name: self._compensated(q, name, mask)[2].predicted for name, mask in masks.items()}

    def vector_masks(
        self, masks: Mapping[str, Tensor], norms: Mapping[str, Sequence[str]] | None = None
    ) -> Masks:
        """A removed row takes its bias along, and its place in the vectors of the norm that follows."""
        found: Masks = {}
        for name, mask in masks.items() if self.pattern.whole_rows else ():
            bias = self.layers[name].bias
            vectors = [*([bias] if bias else []), *(norms or {}).get(name, ())]
            found.update(dict.fromkeys(vectors, mask.flatten(1).any(1)))
        return found

    def weight(self, name: str) -> Tensor:
        return self.model.get_parameter(name)


def _padding_last(layer: Layer, scores: Tensor) -> Tensor:
    """Scores with those of an embedding's padding, where it is not zero, raised to the highest.

    It has no gradient, and looks free; the outputs depend on it all the same.
    """
    still = layer.padding_rows(scores.device)
    if still is None:
        return scores
    rows = scores.reshape(layer.shape[0], -1)
    return rows.masked_fill(still & (rows > 0), float(rows.max())).view(scores.shape)
