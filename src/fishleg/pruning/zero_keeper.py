"""The zeros of a model that is pruned and trained in turns: those of the masks, and those found before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from fishleg.optim.fishleg import FishLeg
from fishleg.pruning.keep_zeros import check_optimizers_cover, zero_removed
from fishleg.pruning.masks import pruned_masks
from fishleg.pruning.patterns import Masks
from fishleg.pruning.weights import PrunableWeights
from fishleg.runtime.models import abbreviate
from fishleg.runtime.process_group import get_logger

logger = get_logger(__name__)


class ZeroKeeper:
    """Keeps removed weights exactly zero while an optimizer trains the others.

    The zeros that an earlier pruning has left are remembered when this object is made, before training
    could fill them.

    Args:
        weights: The weights that are pruned now.

    Attributes:
        elsewhere: Masks of parameters that are sparse and are not pruned now.
        found: Masks of the prunable weights, valid until the first pruning step.
    """

    def __init__(self, weights: PrunableWeights) -> None:
        self.model, self.weights = weights.model, weights
        own = {part for name in weights.names for part in weights.layers[name].names}
        masks = pruned_masks(self.model, weights.names)
        self.elsewhere: Masks = {name: mask for name, mask in masks.items() if name not in own}
        self.found: Masks = {name: mask for name, mask in masks.items() if name in own}
        trained = [name for name in self.elsewhere if self.model.get_parameter(name).requires_grad]
        if trained:
            logger.warning(
                "the zeros of %s are taken for pruned and will be kept, although these are not pruned now",
                abbreviate(trained),
            )

    def check_covered(self, optimizers: Sequence[Optimizer], masks: Iterable[str]) -> None:
        """Raise where some of the masked parameters are trained by none of the optimizers.

        Args:
            optimizers: All optimizers of the model.
            masks: Names of the parameters that have masks.
        """
        check_optimizers_cover(optimizers, self.model, [*self.weights.names, *self.elsewhere, *masks])

    def enforce(self, optimizer: Optimizer, masks: Mapping[str, Tensor]) -> None:
        """Set removed weights, and an optimizer's state for them, to exactly zero.

        FishLeg keeps to the masks from then on. Its Q goes on learning the Fisher matrix of all weights: its
        structure fits that one much better than the masked one, and the joint compensation takes care of
        what is removed.

        Args:
            optimizer: The optimizer that trains the model.
            masks: The masks of all pruning steps so far; True = kept.
        """
        every = {**self.elsewhere, **({} if masks else self.found), **masks}
        if not every:
            return
        if isinstance(optimizer, FishLeg):
            optimizer.set_masks(every, restrict=False)
        else:
            zero_removed(optimizer, self.model, every)
