"""The weights that are pruned: which, how many, and how sparsity is counted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.curvature.layers import Layer, find_layers
from fishleg.options import PruningOptions
from fishleg.pruning.model_graph import following_norms, output_layers
from fishleg.pruning.patterns import Masks, Pattern
from fishleg.pruning.prunable import (
    ZERO_EVERYWHERE,
    choose_prunable,
    prunable_table,
    warn_about_zero_matrices,
    warn_if_mostly_left_out,
)
from fishleg.runtime.batches import Forward


class PrunableWeights:
    """The weights of a model that a pattern may prune, in the shapes that the pattern selects on.

    Args:
        model: The model.
        loader: Calibration batches; the first one tells which layers make the outputs, for whole rows.
        pattern: What is removed together.
        options: `include` and `exclude`.
        forward: How the model is called on a batch.

    Attributes:
        names: The names of the weights that are pruned.
        all_layers: Every layer of the model, as Q has one block for each.
        layers: The layer of every weight matrix of the model, by the name of the weight.
        reasons: For every parameter, None if it is pruned, else why not.
        norms: By weight, the BatchNorm parameters that go with a removed row.

    Raises:
        ValueError: No weight is prunable; the message lists the reason for each parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        pattern: Pattern,
        options: PruningOptions,
        forward: Forward,
    ) -> None:
        self.model, self.pattern = model, pattern
        self.all_layers = find_layers(model)
        self.layers: dict[str, Layer] = {layer.weight: layer for layer in self.all_layers if layer.is_matrix}
        rows = pattern.whole_rows
        outputs = output_layers(model, self.layers, loader, forward) if rows else set()
        self.reasons = choose_prunable(model, self.layers, pattern, options, outputs=outputs)
        self.names = [name for name, reason in self.reasons.items() if reason is None]
        if not self.names:
            raise ValueError(f"nothing to prune:\n{self.table()}")
        warn_about_zero_matrices(self.reasons)
        warn_if_mostly_left_out(model, self.reasons)
        found = [*self.names, *self.zero_matrices]
        self.norms = following_norms(model, found, loader, forward) if rows else {}

    @property
    def zero_matrices(self) -> list[str]:
        """The weights that are left out because they are, or were in the beginning, zero everywhere."""
        return [name for name, reason in self.reasons.items() if reason == ZERO_EVERYWHERE]

    def restore_zero_matrices(self, zero: Collection[str], masked: Collection[str]) -> None:
        """Leave out the same zero matrices as when a saved state was made.

        Args:
            zero: The weights that were zero everywhere when pruning began.
            masked: The weights that have masks. One of them that is zero everywhere was pruned.
        """
        for name, reason in self.reasons.items():
            if reason == ZERO_EVERYWHERE and name in masked:
                self.reasons[name] = None
            elif reason is None and name in zero and name not in masked:
                self.reasons[name] = ZERO_EVERYWHERE
        self.names = [name for name, reason in self.reasons.items() if reason is None]

    def table(self) -> str:
        """Return a line for each parameter: its size, sparsity, and whether it is pruned or why not."""
        return prunable_table(self.model, self.reasons)

    def weight(self, name: str) -> nn.Parameter:
        """Return a parameter of the model.

        Args:
            name: The name of the parameter.

        Returns:
            The parameter.
        """
        return self.model.get_parameter(name)

    @property
    def unit(self) -> str:
        """What sparsity counts: `rows` or `weights`."""
        return "rows" if self.pattern.whole_rows else "weights"

    @property
    def count(self) -> int:
        """How many weights, or rows, can be removed."""
        return sum(self._counted(self.weight(name)).numel() for name in self.names)

    def sparsity(self, masks: Mapping[str, Tensor]) -> float:
        """Return the fraction of the prunable weights (of the rows, for whole rows) that masks remove.

        Args:
            masks: Masks by parameter name; True = kept.

        Returns:
            A number in [0, 1).
        """
        kept = [self._counted(masks[name]) for name in self.names if name in masks]
        return sum(int((~mask).sum()) for mask in kept) / self.count

    @property
    def share_of_zeros(self) -> float:
        """The fraction of the prunable weights (of the rows) that is zero now, whatever made it so."""
        zero = [self.weight(name) == 0 for name in self.names]
        if self.pattern.whole_rows:
            zero = [z.flatten(1).all(1) for z in zero]
        return sum(int(z.sum()) for z in zero) / self.count

    def rounds_to(self, sparsity: float, masks: Mapping[str, Tensor]) -> bool:
        """Tell whether a sparsity asks for as many weights as masks remove already.

        Args:
            sparsity: The sparsity that is asked for.
            masks: Masks by parameter name; True = kept.

        Returns:
            True where the rounded counts are equal. With few weights two stages may be alike.
        """
        return round(sparsity * self.count) == round(self.sparsity(masks) * self.count)

    def _counted(self, tensor: Tensor) -> Tensor:
        return tensor.flatten(1)[:, 0] if self.pattern.whole_rows else tensor

    def score_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the scores that the pattern selects on.

        Args:
            name: The name of a weight.

        Returns:
            One score for each weight, group or row.
        """
        weight = self.weight(name)
        if self.pattern.whole_rows:
            return (len(weight),)
        return (weight.numel() // self.pattern.group_size,) if self.pattern.group_size else weight.shape

    def grouped(self, tensor: Tensor) -> Tensor:
        """Return the entries of a weight by group: neighbouring inputs at each kernel position, as in N:M.

        Args:
            tensor: Of the shape of a weight, [n_out, n_in, *kernel].

        Returns:
            [groups, group size].
        """
        assert self.pattern.group_size is not None
        groups: Tensor = tensor.unflatten(1, (-1, self.pattern.group_size))
        return groups.movedim(2, -1).flatten(0, -2)

    def expand(self, name: str, mask: Tensor) -> Tensor:
        """Return the mask on a weight that a mask on its scores means.

        Args:
            name: The name of the weight.
            mask: Of the shape `score_shape(name)`.

        Returns:
            A mask of the shape of the weight.
        """
        weight = self.weight(name)
        if self.pattern.whole_rows:
            return mask.view(-1, *[1] * (weight.dim() - 1)).expand_as(weight).clone()
        if size := self.pattern.group_size:
            positions = weight.shape[0], weight.shape[1] // size, *weight.shape[2:]
            return mask.view(positions).repeat_interleave(size, dim=1)
        return mask

    def magnitudes(self) -> dict[str, Tensor]:
        """Return the largest |w| of each weight, group or row, in the shapes that the pattern selects on."""
        scores = {name: self.weight(name).detach().abs().nan_to_num(1.0) for name in self.names}
        if self.pattern.whole_rows:
            return {name: s.flatten(1).amax(1) for name, s in scores.items()}
        if self.pattern.group_size:
            return {name: self.grouped(s).amax(1) for name, s in scores.items()}
        return scores

    def vector_masks(
        self, masks: Mapping[str, Tensor], norms: Mapping[str, Iterable[str]] | None = None
    ) -> Masks:
        """Return the masks of the vectors that go with removed rows.

        Args:
            masks: Masks of weights; True = kept.
            norms: By weight, the BatchNorm parameters that follow it.

        Returns:
            Masks of biases and norm parameters; empty unless the pattern removes whole rows.
        """
        found: Masks = {}
        for name, mask in masks.items() if self.pattern.whole_rows else ():
            bias = self.layers[name].bias
            vectors = [*([bias] if bias else []), *(norms or {}).get(name, ())]
            found.update(dict.fromkeys(vectors, mask.flatten(1).any(1)))
        return found

    def check_reachable(self, sparsity: float, floor: float, only: Iterable[str] | None = None) -> None:
        """Raise where pattern and floor do not allow a sparsity, before any long work.

        Args:
            sparsity: The sparsity, of these weights.
            floor: The share of the mean density that each weight keeps at least.
            only: Some of the weights; default: all.

        Raises:
            ValueError: The sparsity cannot be reached.
        """
        names = self.names if only is None else only
        scores = {name: torch.zeros(self.score_shape(name)) for name in names}
        self.pattern.select(scores, sparsity, floor * (1 - sparsity))
