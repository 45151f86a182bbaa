"""How large FishLeg's steps may be while a pruned model regains its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fishleg.options import FineTuningOptions

_NOISE = 0.4  # ν below
_HOPE = 0.1  # of the loss that the given model had, training is expected to undercut so much
_WINDOW = 10  # training losses that are averaged


class Pace:
    """The trust region and the damping of FishLeg's steps, from the loss L that can be regained.

    A step −ηQg has the signal gᵀQg ≈ 2L, and noise 2ν that does not depend on the loss. Its expected gain
    2ηL − η²(L+ν) is largest at η = L/(L+ν), where the step's KL is L²/(L+ν): a bound that did not fall like
    that would wreck a model that is nearly as good as it can be. Such a model needs more damping, too: most
    of what Q would enlarge is noise then. How good the model can be is known from the given model: L is the
    loss above that model's, plus a tenth of what that one had left. Where the given model's own loss is
    larger than 1, as for targets of a large scale, it is the unit of all these: the noise is of its size.
    The constants were found by trial on ResNet20 and ResNet18.

    Args:
        options: `max_kl`, `step_damping` and `regain`.
        given: The loss of the given model, above the least possible.

    Attributes:
        recent: The last losses, above the least possible.
    """

    def __init__(self, options: FineTuningOptions, given: float) -> None:
        self.options, self.given = options, given
        self.recent: list[float] = []

    def update(self, loss: float, *, knows_floor: bool) -> tuple[float, float]:
        """Note a training loss and return the next step's bounds.

        Args:
            loss: The loss above the least possible.
            knows_floor: Whether the least possible loss is known; without it nobody knows how low it can get.

        Returns:
            The KL bound, and the damping in multiples of γ.
        """
        assert self.options.max_kl is not None
        self.recent = [*self.recent[1 - _WINDOW :], loss]
        left = self.given if knows_floor else 1.0
        unit = max(1.0, self.given)
        L = max(sum(self.recent) / len(self.recent) - self.given, 0.0) + _HOPE * left
        L = min(1.0, max(L / unit, self.options.regain, 1e-3))
        kl = self.options.max_kl * unit * (1 + _NOISE) * L**2 / (L + _NOISE)
        return kl, self.options.step_damping / max(L, 0.1)

    def state_dict(self) -> dict[str, Any]:
        """Return the last losses and the loss of the given model."""
        return {"recent": list(self.recent), "given": self.given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: The saved state.
        """
        self.recent, self.given = list(state["recent"]), state["given"]
