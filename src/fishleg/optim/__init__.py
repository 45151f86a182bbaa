"""FishLeg: a torch optimizer that preconditions gradients with a learned inverse Fisher matrix."""

from __future__ import annotations

from fishleg.optim.fishleg import ONLINE, FishLeg

__all__ = ["ONLINE", "FishLeg"]
