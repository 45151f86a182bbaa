"""What Q does to the weights: masks from its scores, mask search, removal with compensation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fishleg.curvature.layers import Layer
from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.options import PruningOptions
from fishleg.pruning.admm import admm_masks
from fishleg.pruning.compensation import Compensation, compensate
from fishleg.pruning.mask_search import search_masks, swap_curvature, swap_scores
from fishleg.pruning.patterns import Masks
from fishleg.pruning.saliency import group_saliency, row_saliency, saliency
from fishleg.pruning.weights import PrunableWeights
from fishleg.runtime.process_group import get_logger
from fishleg.runtime.tensors import first_non_finite

logger = get_logger(__name__)

# Conjugate gradients within a round of the mask search. On ResNet20, at 50 to 95 %, so few end at a loss
# increase that is up to 4 % below that of 50, in a third of the time.
_ROUND_ITERATIONS = 8


class Pruner:
    """Chooses and removes weights of a model by a Q that it is given.

    Args:
        weights: The weights that may be removed.
        options: Compensation, mask search and floor.
    """

    def __init__(self, weights: PrunableWeights, options: PruningOptions) -> None:
        self.weights, self.options = weights, options

    def select(
        self,
        q: InverseFisher,
        sparsity: float,
        removed: Mapping[str, Tensor],
        only: Sequence[str] | None = None,
    ) -> Masks:
        """Return masks of the given sparsity, by the scores of Q.

        Args:
            q: The inverse Fisher.
            sparsity: The fraction of the weights that is removed afterwards.
            removed: Masks of earlier steps; what they remove stays removed.
            only: Some of the weights, which the sparsity then refers to; default: all.

        Returns:
            Masks by weight name; True = kept.

        Raises:
            ValueError: A score is not finite, or pattern and floor do not allow the sparsity.
        """
        names = self.weights.names if only is None else only
        with torch.no_grad():
            scores = {name: self._score(self.weights.layers[name], q, removed.get(name)) for name in names}
        masks = self.weights.pattern.select(scores, sparsity, self.options.floor * (1 - sparsity))
        return {name: self.weights.expand(name, mask) for name, mask in masks.items()}

    def _score(self, layer: Layer, q: InverseFisher, old: Tensor | None) -> Tensor:
        """Return scores in the shape that the pattern selects on; −inf for what is removed already.

        Raises:
            ValueError: A score is not finite.
        """
        operator, name, pattern = q.unmasked(layer.name), layer.weight, self.weights.pattern
        packed = self._packed(layer, q)
        if pattern.whole_rows:
            scores = row_saliency(packed, operator)
            gone = None if old is None else ~old.flatten(1).any(1)
        elif pattern.group_size:
            index = torch.arange(packed.numel(), device=packed.device).view(packed.shape)
            scores = group_saliency(packed, operator, self.weights.grouped(layer.unpack(index)[name]))
            gone = None if old is None else ~self.weights.grouped(old).any(1)
        else:
            scores = layer.unpack(saliency(packed, operator))[name]
            gone = None if old is None else ~old
        if not bool(torch.isfinite(scores).all()):
            raise ValueError(f"non-finite saliency in {name!r}")
        scores = _raise_padding(layer, scores)
        return scores if gone is None else scores.masked_fill(gone, -torch.inf)

    def _packed(self, layer: Layer, q: InverseFisher) -> Tensor:
        """Return the layer's parameters as one matrix, in the dtype of its Q."""
        w = layer.pack({part: self.weights.weight(part).detach() for part in layer.names})
        return w.to(q.reference(layer.name).dtype)

    @property
    def searches_masks(self) -> bool:
        """Whether masks are improved by a search after the scores have chosen them."""
        pattern = self.weights.pattern
        single = not (pattern.group_size or pattern.whole_rows)  # weights are scored one by one
        return bool(self.options.search_rounds) and single

    @torch.no_grad()
    def search(self, q: InverseFisher, masks: Masks, removed: Mapping[str, Tensor]) -> Masks:
        """Return masks with as many kept weights, better chosen: their joint loss increase under Q is lower.

        The scores that chose the masks treat each weight alone: of two weights that can replace each other
        both have low scores, and both are removed. Here all are scored again at the compensated solution, and
        kept weights change places with removed ones that are worth more, for as long as that helps. No weight
        that is zero already comes back, whatever made it zero.

        Args:
            q: The inverse Fisher.
            masks: Masks that the scores have chosen.
            removed: Masks of earlier steps.

        Returns:
            Masks with the same number of kept weights.
        """
        if not self.searches_masks:
            return masks
        if any(q.mask(self.weights.layers[name].name) is not None for name in masks):
            return masks  # a restricted Q knows nothing of what is removed
        if not self.weights.pattern.within_layers and self.options.mask_search_across_layers:
            return self._search(q, masks, removed, self.options.floor)
        return {name: self._search(q, {name: mask}, removed, 0.0)[name] for name, mask in masks.items()}

    def _search(self, q: InverseFisher, masks: Masks, old: Mapping[str, Tensor], floor: float) -> Masks:
        """Return better masks of these weights, with the same number of kept weights in total."""
        layers = self.weights.layers
        zeros = {name: self.weights.weight(name) == 0 for name in masks}
        total, left = sum(mask.numel() for mask in masks.values()), sum(int(m.sum()) for m in masks.values())
        if sum(int(zero.sum()) for zero in zeros.values()) > total - left:
            return masks  # there are more zeros than removed weights, and no zero may come back
        kept = left / total
        operators = {name: q.operator(layers[name].name) for name in masks}
        gone = {name: zeros[name] | ~old[name] if name in old else zeros[name] for name in masks}

        def choose(scores: Mapping[str, Tensor]) -> Masks:
            return self.weights.pattern.select(scores, 1 - kept, floor * kept)

        def as_scores(name: str, packed: Tensor) -> Tensor:
            """Return packed values as scores of a weight; those of removed weights are −inf."""
            layer = layers[name]
            return _raise_padding(layer, layer.unpack(packed)[name]).masked_fill(gone[name], -torch.inf)

        if self.options.mask_search_kind == "admm":
            weights = {name: self._packed(layers[name], q) for name in masks}
            found = admm_masks(
                weights, operators, masks,
                lambda values: choose({name: as_scores(name, value) for name, value in values.items()}),
                lambda name, mask: self._removed(q, name, mask),
            )  # fmt: skip
            return self._better(q, masks, found)
        curvatures = {name: swap_curvature(operator) for name, operator in operators.items()}

        def judge(trial: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
            """Return the predicted loss increase of masks, and the score of each weight given the masks."""
            predicted, scores = 0.0, {}
            for name, mask in trial.items():
                w, removed = self._packed(layers[name], q), self._removed(q, name, mask)
                result = compensate(w, operators[name], removed, iterations=_ROUND_ITERATIONS, settle=False)
                predicted += result.predicted
                scores[name] = as_scores(name, swap_scores(w, curvatures[name], removed, result))
            return predicted, scores

        return search_masks(masks, judge, choose, self.options.search_rounds)

    def _better(self, q: InverseFisher, masks: Masks, found: Masks) -> Masks:
        """Return the masks with the lower predicted loss increase."""
        before, after = (sum(self.predict(q, trial).values()) for trial in (masks, found))
        logger.info("mask search by ADMM: predicted loss increase %.4g, was %.4g", after, before)
        return found if after < before else masks

    @torch.no_grad()
    def remove(self, q: InverseFisher, masks: Mapping[str, Tensor]) -> float:
        """Delete and compensate in every layer.

        A Q of all weights is asked about everything that is removed, now or before. A Q that was restricted
        to the kept weights knows nothing of the rest and is asked about what goes now.

        Args:
            q: The inverse Fisher.
            masks: Masks by weight name; True = kept.

        Returns:
            The predicted loss increase.

        Raises:
            ValueError: The compensated weights are not finite; nothing was changed.
        """
        predicted = 0.0
        new: dict[str, Tensor] = {}
        for name, mask in masks.items():
            self._warn_about_unseen_rows(q, name, mask)
            layer, w, result = self._compensated(q, name, mask)
            predicted += result.predicted
            for part, value in layer.unpack(w + result.delta).items():
                new[part] = value.to(self.weights.weight(part).dtype)
        if (bad := first_non_finite(new)) is not None:
            raise ValueError(
                f"the compensation of {bad!r} is not finite; nothing was changed. More damping may help "
                "(relative_damping), or a model in float32"
            )
        for part, value in new.items():
            self.weights.weight(part).copy_(value)
        return predicted

    def _compensated(self, q: InverseFisher, name: str, mask: Tensor) -> tuple[Layer, Tensor, Compensation]:
        layer = self.weights.layers[name]
        w, removed = self._packed(layer, q), self._removed(q, name, mask)
        result = compensate(w, q.operator(layer.name), removed, self.options.compensation)
        fixed, unseen = layer.padding_rows(w.device), q.unseen(layer.name)
        if unseen is not None:
            fixed = unseen.unsqueeze(1) if fixed is None else fixed | unseen.unsqueeze(1)
        if fixed is not None:  # such rows have no curvature: only the noise of Q would move them
            result = replace(result, delta=result.delta.masked_fill(fixed & ~removed, 0))
        return layer, w, result

    def _warn_about_unseen_rows(self, q: InverseFisher, name: str, mask: Tensor) -> None:
        """Warn when rows of an embedding go because the samples lack them, the first time that they do."""
        rows = q.unseen(self.weights.layers[name].name)
        weight = self.weights.weight(name)
        if rows is None or bool((weight[rows] == 0).any()) or bool(mask[rows].all()):
            return
        logger.warning(
            "%d of the %d rows of %s never occurred in the samples: curvature is zero there, so that their "
            "weights look free (%.0f %% of them go now, and %.0f %% of the others), and they are not "
            "compensated. Where these words matter, take data or samples that have them, or exclude %s",
            int(rows.sum()), len(rows), name,
            100 * float((~mask[rows]).float().mean()), 100 * float((~mask[~rows]).float().mean()), name,
        )  # fmt: skip

    def _removed(self, q: InverseFisher, name: str, mask: Tensor) -> Tensor:
        """Return what a mask removes from the layer, packed; for a restricted Q, what it removes now."""
        layer, weight = self.weights.layers[name], self.weights.weight
        keep = {part: torch.ones_like(weight(part), dtype=torch.bool) for part in layer.names}
        keep.update(self.weights.vector_masks({name: mask}))
        keep[name] = mask
        removed, kept_before = ~layer.pack(keep), q.mask(layer.name)
        return removed if kept_before is None else removed & kept_before

    @torch.no_grad()
    def predict(self, q: InverseFisher, masks: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the loss increase that Q predicts for these masks; nothing is changed.

        Args:
            q: The inverse Fisher.
            masks: Masks by weight name; True = kept.

        Returns:
            The loss increase by weight.
        """
        return {name: self._compensated(q, name, mask)[2].predicted for name, mask in masks.items()}


def _raise_padding(layer: Layer, scores: Tensor) -> Tensor:
    """Return scores in which the padding row of an embedding, if it is not zero, has the highest ones.

    Padding has no gradient and looks free; the outputs depend on it all the same.
    """
    padding = layer.padding_rows(scores.device)
    if padding is None:
        return scores
    rows = scores.reshape(layer.shape[0], -1)
    return rows.masked_fill(padding & (rows > 0), float(rows.max())).view(scores.shape)
