"""Names of the panels and of the arms, which are also keys of the results."""

from __future__ import annotations

NAME = "estimation"
PANELS = ("diagonal", "block", "kronecker")
PAPER = "paper, triangular from I/γ"
PAPER_BEST = "paper, square from I n/Tr(F_γ)"
FULL = (PAPER, PAPER_BEST, "ours")
ISOTROPIC, AIMED = "paper, isotropic u", "paper, u ~ N(0, F⁻¹)"
OURS, OURS_AIMED = "ours, isotropic", "ours, then u ~ N(0, F⁻¹)"
BASELINE = "approximate, average, invert"
