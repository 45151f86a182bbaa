"""The auxiliary loss from vectors h with E[hhᵀ] = F, layer by layer, and the steps that it leads to.

The loss of a layer is ½‖Q(h+√γz)‖² − Tr(Q) with z standard normal. Adam minimises it, or natural steps on the
factors replace it, depending on the estimator and on the structure of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.inverse.warm_start import WarmStart
from fishleg.options import AuxiliaryOptions


@dataclass(frozen=True)
class SampledLosses:
    """The losses of one step, and what is still to be done in this step.

    Attributes:
        loss: The sum of the losses that Adam minimises, a scalar tensor; None where Adam has no layer.
        natural: The names of the layers that take a natural step.
        terms: Tr(QF_γQ) and Tr(Q) by layer, estimated in this step, [2].
    """

    loss: Tensor | None
    natural: list[str]
    terms: dict[str, Tensor]


class SampledEstimator:
    """The auxiliary loss of all layers from samples, the warm starts, and the latest terms of the gauge.

    Args:
        inverse: Q.
        options: The options of the learning.
    """

    def __init__(self, inverse: InverseFisher, options: AuxiliaryOptions) -> None:
        self.inverse, self.options = inverse, options
        self.warm_starts = {name: WarmStart(inverse.unmasked(name), options) for name in inverse.layers}
        self._terms: dict[str, Tensor] = {}  # by layer: Tr(QF_γQ) and Tr(Q), when last estimated

    @property
    def warm(self) -> bool:
        """Whether every layer has finished its warm start."""
        return all(warm_start.done for warm_start in self.warm_starts.values())

    def set_options(self, options: AuxiliaryOptions) -> None:
        """Continue with other options.

        Args:
            options: The options of the learning.
        """
        self.options = options
        for warm_start in self.warm_starts.values():
            warm_start.set_options(options)

    def losses(
        self,
        samples: Mapping[str, Tensor],
        gamma: float,
        step: int,
        draw_noise: Callable[[Tensor], Tensor],
    ) -> SampledLosses:
        """Compute the loss of every layer whose turn it is, without changing anything.

        Args:
            samples: Packed samples h by layer name, [groups, *layer.shape].
            gamma: The damping γ.
            step: The number of the step. With `refine_every` = k each layer has its turn in every k-th step.
            draw_noise: Draws standard normal numbers in the shape of its argument.

        Returns:
            The losses. Call `take_natural_steps` with them after the step of Adam.
        """
        adam_losses, natural, terms = list[Tensor](), list[str](), dict[str, Tensor]()
        for i, (name, H) in enumerate(samples.items()):
            uses_adam, averages = self._uses_adam(name), self.warm_starts[name].averages_eigenvalues
            in_turn = (step + i) % self.options.refine_every == 0 or name not in self._terms
            if uses_adam and averages and not in_turn:
                natural.append(name)
                continue
            z = draw_noise(H)  # also out of turn: the random numbers of a warm start do not depend on turns
            if (
                not uses_adam and not in_turn
            ):  # the loss would serve only the gauge, which keeps its last terms
                natural.append(name)
                continue
            with torch.set_grad_enabled(uses_adam):
                quadratic, trace = self.inverse.operator(name).loss_terms(H + gamma**0.5 * z)
                quadratic = quadratic / len(H)
            if uses_adam:
                adam_losses.append(0.5 * quadratic - trace)
            if not uses_adam or averages:
                natural.append(name)
            terms[name] = torch.stack([quadratic.detach(), trace.detach()]).double()
        loss = torch.stack(adam_losses).sum() if adam_losses else None
        return SampledLosses(loss, natural, terms)

    def take_natural_steps(self, losses: SampledLosses, samples: Mapping[str, Tensor], gamma: float) -> None:
        """Take the natural steps of one step, and keep its terms of the gauge.

        Args:
            losses: The losses of this step.
            samples: Packed samples h by layer name, [groups, *layer.shape].
            gamma: The damping γ.
        """
        for name in losses.natural:
            self.warm_starts[name].step(samples[name], gamma, self.inverse.mask(name))
        self._terms.update(losses.terms)

    def total_terms(self, names: Iterable[str]) -> tuple[float, float]:
        """Sum the latest terms of the gauge over layers.

        Args:
            names: The names of the layers.

        Returns:
            Tr(QF_γQ) and Tr(Q).
        """
        quadratic, trace = torch.stack([self._terms[name] for name in names]).sum(0).tolist()
        return quadratic, trace

    def _uses_adam(self, name: str) -> bool:
        warm_start = self.warm_starts[name]
        if self.options.estimator == "trace":
            return True
        if self.options.estimator == "natural":
            return not warm_start.operator.has_natural_step
        return warm_start.done and not warm_start.natural_only

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on, apart from Q and the options.

        Returns:
            The terms of the gauge and the states of the warm starts.
        """
        return {
            "terms": dict(self._terms),
            "warm": {name: warm_start.state_dict() for name, warm_start in self.warm_starts.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: The state.
        """
        self._terms = {
            name: term.to(self.inverse.reference(name).device) for name, term in state["terms"].items()
        }
        for name, warm_start in self.warm_starts.items():
            warm_start.load_state_dict(state["warm"][name])
