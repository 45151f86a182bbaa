"""Which modules are in training mode while a pruned model is fine-tuned."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fishleg.runtime.batchnorm import refreshable_norms


class TrainingModes:
    """The modes in which a model's modules were found, and those for training.

    Args:
        model: The model; its present modes are remembered.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._found = {module: module.training for module in model.modules()}

    def restore(self) -> None:
        """Put every module back into the mode that it was found in."""
        for module, mode in self._found.items():
            module.training = mode

    def train(self) -> None:
        """Put the model into training mode.

        What was in evaluation mode within a model in training mode stays there. So do, in a model that was
        given in evaluation mode, BatchNorms whose parameters are frozen.
        """
        self.restore()
        frozen = {m for m in self._found if isinstance(m, _BatchNorm)} - set(refreshable_norms(self.model))
        for module, mode in self._found.items():
            found_so = mode or (not self._found[self.model] and module not in frozen)
            module.training = True if module is self.model else found_so
