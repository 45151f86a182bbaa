"""How to train after each pruning step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fishleg.options.declaration import OptionError, check_fields, option
from fishleg.options.names import LEARNING_RATE_SCHEDULES, OPTIMIZERS


@dataclass(frozen=True, kw_only=True)
class FineTuningOptions:
    """How to train after each pruning step."""

    optimizer: str = option("fishleg", "Optimizer; sgd has momentum, adam is AdamW.", choices=OPTIMIZERS)
    epochs: float = option(1.0, "Epochs of training after each pruning step.", rule="> 0")
    steps: int | None = option(
        None, "Training steps after each pruning step, instead of epochs.", rule=">= 1"
    )
    lr: float | None = option(None, "Learning rate; default: 0.1 fishleg, 0.02 sgd, 0.001 adam.", rule="> 0")
    lr_schedule: str = option(
        "cosine",
        "cosine: the rate falls to zero after each pruning step; constant: it does not.",
        choices=LEARNING_RATE_SCHEDULES,
    )
    momentum: float = option(0.9, "Momentum of sgd and fishleg.", rule="[0, 1)")
    weight_decay: float = option(0.0, "Weight decay.", rule=">= 0")
    max_kl: float | None = option(
        0.012,
        "Largest predicted KL divergence of a FishLeg step while a loss of 1 can be regained; smaller when "
        "less can be. none: no bound.",
        rule="> 0",
    )
    step_damping: float = option(
        10.0,
        "FishLeg's damping in multiples of γ; it rises as the loss that can be regained falls.",
        rule=">= 1",
    )
    regain: float = option(
        0.0,
        "Lower limit of the loss that training is assumed to regain; larger values give larger steps.",
        rule="[0, 1)",
        share=True,
    )
    update_every: int = option(10, "Training steps per auxiliary step of Q.", rule=">= 1")
    distill: bool = option(False, "Train towards the dense model's outputs; needs no labels.")
    temperature: float = option(2.0, "Temperature of the distillation, for logits.", rule="> 0")

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def learning_rate(self) -> float:
        """The learning rate that was given, or else the optimizer's default."""
        return self.lr or OPTIMIZERS[self.optimizer]

    @property
    def paced(self) -> bool:
        """Whether the size of FishLeg's steps follows the loss."""
        return self.optimizer == "fishleg" and self.max_kl is not None

    def steps_for(self, loader: Any) -> int:
        """Return the number of training steps after each pruning step.

        Args:
            loader: The training loader; it needs a length unless `steps` is given.

        Returns:
            `steps`, or `epochs` times the length of the loader, at least 1.

        Raises:
            OptionError: The loader has no length and `steps` is not given.
        """
        if self.steps is not None:
            return self.steps
        try:
            return max(1, round(self.epochs * len(loader)))
        except TypeError:
            raise OptionError("epochs needs a loader that has a length; give steps instead") from None
