"""Several rows of a table from one estimate of Q: the dense model is pruned again and again with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from fishleg import InverseFisher, PruneStep, Surgeon


class OneEstimate:
    """The Q of a surgeon at its dense model, for prunings that start from that model.

    `prune` makes a new surgeon, whose options may differ in everything that does not concern Q.
    """

    def __init__(self, surgeon: Surgeon) -> None:
        self.surgeon = surgeon
        self.dense: dict[str, Tensor] = {k: v.clone() for k, v in surgeon.model.state_dict().items()}
        self.inverse: InverseFisher = surgeon.curvature.estimate()

    def prune(self, sparsity: float, **changes: Any) -> PruneStep:
        """Prune the dense model in one step, with changes of the options."""
        given = self.surgeon
        given.model.load_state_dict(self.dense)
        options = replace(given.options, **changes)
        surgeon = Surgeon(given.model, given.loader, likelihood=given.likelihood, options=options)
        return surgeon.prune(sparsity, inverse=self.inverse)
