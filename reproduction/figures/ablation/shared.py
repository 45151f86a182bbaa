"""Names that the panels share."""

from __future__ import annotations

from fishleg.inverse.operators import Operator

# the factors that the figure on initialisation compares, each with the start that suits it
FACTORS = {"triangular": "I/γ", "square": "I n/Tr(F_γ)"}
SCHEDULES = ("constant", "decayed")
OBERT, OBERT_MORE = "oBERT, 512 gradients", "oBERT, as many gradients as FLS"
FLS, OURS, UNTRAINED = "FLS, paper", "FLS, ours", "Q = I/γ, not trained"
FLS_NEAR = "FLS, paper, rate by the distance to full"  # this choice prefers a Q that stays near I/γ
FLS_80 = "FLS, paper, at 80 % sparsity"  # only timed
BLOCK_ARMS = (OBERT, OBERT_MORE, FLS, FLS_NEAR, OURS, UNTRAINED)
LOOK = 2  # distances are computed at every second stage: they cost more than the stages
Qs = list[Operator]
