"""The estimation figure: Q learned from minibatches against the true inverse, full (A) and structured (B–D).

Paper: fig. estimation; n = 100, random basis, eigenvalues e^{−i/30}, γ = 0.01, 20 seeds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reproduction.figures.estimation.arms import (
    AIMED,
    BASELINE,
    FULL,
    ISOTROPIC,
    NAME,
    OURS,
    OURS_AIMED,
    PANELS,
    PAPER,
    PAPER_BEST,
)
from reproduction.figures.estimation.figure import draw as _draw
from reproduction.figures.estimation.learning import averages, baseline, full, structured, tune
from reproduction.figures.estimation.limits import KINDS, limits
from reproduction.harness import Progress, Results, Unit, mean, mean_sem, run_figure, spaced


def run(out: Path, *, smoke: bool = False, progress: Progress = print) -> Results:
    """Panel A: Riemannian distance of a full Q. Panels B–D: error of Q u for three structures."""
    settings: dict[str, Any] = {
        "n": 20 if smoke else 100,
        "decay length": 30,
        "gamma": 0.01,
        "batch": 20 if smoke else 100,
        "seeds": 2 if smoke else 20,
        "full steps": 12 if smoke else 1000,
        "structured steps": 12 if smoke else 1000,
        "natural steps": 4 if smoke else 100,  # of "ours", before the aimed probes
        "block size": 4 if smoke else 20,
        "kronecker": [4, 5] if smoke else [5, 20],
        "rates": {
            PAPER: [0.1] if smoke else [0.03, 0.1, 0.2],
            PAPER_BEST: [0.003] if smoke else [0.001, 0.003, 0.01],
            ISOTROPIC: [0.03] if smoke else [0.03, 0.1, 0.3],
            AIMED: [0.03] if smoke else [0.03, 0.1, 0.3],
            OURS_AIMED: [0.01] if smoke else [0.003, 0.01, 0.03],
        },
        "version": 1,
    }
    units: list[Unit] = []
    for arm in FULL:
        if arm in settings["rates"] and len(settings["rates"][arm]) > 1:
            units.append(Unit(f"tune A: {arm}", tune(settings, "full", arm), cost=15))
        units.append(Unit(f"A: {arm}", full(settings, arm), cost=15 if arm in (PAPER, PAPER_BEST) else 35))
    units.append(Unit("A: average of inverses", averages(settings, invert_each=True), cost=25))
    units.append(Unit("A: inverse of the average", averages(settings, invert_each=False), cost=5))
    for structure in PANELS:
        for arm in (ISOTROPIC, AIMED, OURS, OURS_AIMED):
            if arm != OURS:
                units.append(Unit(f"tune {structure}: {arm}", tune(settings, structure, arm), cost=8))
            units.append(Unit(f"{structure}: {arm}", structured(settings, structure, arm), cost=7))
        units.append(Unit(f"{structure}: {BASELINE}", baseline(settings, structure), cost=8))
        units.append(Unit(f"{structure}: limits", limits(settings, structure), cost=8))
    return run_figure(
        out / f"{NAME}.json",
        settings,
        units,
        summary=lambda results: _summary(settings, results),
        draw=lambda record: {"": _draw(settings, record["units"])},
        smoke=smoke,
        progress=progress,
    )


def _summary(settings: dict[str, Any], results: Results) -> Results:
    at = spaced(settings["full steps"], 14)
    wanted = {t: i for i, t in enumerate(at)}
    summary: Results = {
        "A": {
            key.removeprefix("A: "): {
                f"distance after {t}": mean_sem(row[i] for row in unit["distance"])
                for t, i in wanted.items()
                if i in (len(at) - 1, len(at) - 3, len(at) - 5)
            }
            for key, unit in results.items()
            if key.startswith("A: ")
        }
    }
    for structure in PANELS:
        panel: Results = {}
        for arm in (BASELINE, ISOTROPIC, OURS, AIMED, OURS_AIMED):
            unit = results[f"{structure}: {arm}"]
            panel[arm] = {name: mean_sem(row[-1] for row in unit[name]) for name in KINDS}
            if "from approximate-then-invert" in unit:
                panel[arm]["from approximate-then-invert"] = mean_sem(unit["from approximate-then-invert"])
        for name, unit in results[f"{structure}: limits"].items():
            panel[f"limit: {name}"] = {kind: mean_sem(row[-1] for row in rows) for kind, rows in unit.items()}
        for arm in (ISOTROPIC, OURS, AIMED, OURS_AIMED):
            panel[arm]["aimed error / baseline"] = mean(
                row[-1] / base[-1]
                for row, base in zip(
                    results[f"{structure}: {arm}"]["aimed error"],
                    results[f"{structure}: {BASELINE}"]["aimed error"],
                    strict=True,
                )
            )
        summary[structure] = panel
    return summary
