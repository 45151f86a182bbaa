"""Which BatchNorms a pruning step has affected: only their statistics are refreshed.

How they are refreshed is in `fishleg.runtime.batchnorm`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fishleg.inverse.estimators.problem import LOADER
from fishleg.runtime.batches import Forward
from fishleg.runtime.batchnorm import batchnorm_input_moments, refresh_batchnorm
from fishleg.runtime.process_group import broadcast_from_first

Moments = Mapping[_BatchNorm, list[Tensor]]


class BatchNormRefresh:
    """Refreshes the statistics of norms that a pruning step has affected.

    The statistics of the other norms are still valid. They came from more data than a refresh reads.

    Args:
        model: The model.
        loader: Calibration batches.
        forward: How the model is called on a batch.
        batches: How many batches a refresh takes; 0: there is none.
    """

    def __init__(self, model: nn.Module, loader: Iterable[Any], forward: Forward, batches: int) -> None:
        self.model, self.loader, self.forward, self.batches = model, loader, forward, batches

    def moments(self, batch: Any | None) -> Moments:
        """Return the moments of what each norm gets on a batch, to tell later which inputs have changed.

        Args:
            batch: A batch on the model's device, or None.

        Returns:
            The moments by norm; empty without a batch or where nothing is refreshed.
        """
        if not self.batches or batch is None:
            return {}
        return batchnorm_input_moments(self.model, batch, self.forward)

    def refresh(self, before: Moments, batch: Any | None) -> None:
        """Refresh the norms whose inputs differ from before; all of them where that is not known.

        Args:
            before: What `moments` returned before the weights changed.
            batch: The same batch.
        """
        changed = self._changed(before, batch)
        refresh_batchnorm(self.model, self.loader, self.batches, self.forward, changed, LOADER)

    def _changed(self, before: Moments, batch: Any | None) -> list[_BatchNorm] | None:
        if not before:
            return None
        now = self.moments(batch)
        same = [  # a norm that was not called on this batch may be called on others
            bool(old) and len(old) == len(now[norm]) and all(map(torch.equal, old, now[norm]))
            for norm, old in before.items()
        ]
        flags = torch.tensor(same, device=next(self.model.parameters()).device)
        broadcast_from_first(self.model, [flags])  # a SyncBatchNorm waits for all processes
        return [norm for norm, flag in zip(before, flags.tolist(), strict=True) if not flag]
