"""Pictures: matplotlib's presence, files, and curves with error bands."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fishleg.formats.files import write_atomically
from reproduction.harness.statistics import columns, mean, sem


def need_matplotlib() -> None:
    """Raise before the work if the picture could not be drawn after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'fishleg[plot]'") from None


def save_picture(figure: Any, path: Path, *, dpi: int = 130) -> None:
    """Write a PNG, whole or not at all."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())


def band(
    axis: Any, x: Sequence[float], rows: Sequence[Sequence[float | None]], label: str | None, **style: Any
) -> None:
    """Draw the mean over seeds with a band of one standard error. It stops where a seed diverged."""
    points = [
        (at, mean(column), sem(column))
        for at, column in zip(x, columns(rows), strict=True)
        if None not in column
    ]
    if not points:
        return
    at, middle, error = zip(*points, strict=True)
    (line,) = axis.plot(at, middle, label=label, **style)
    low = [m - e for m, e in zip(middle, error, strict=True)]
    high = [m + e for m, e in zip(middle, error, strict=True)]
    axis.fill_between(at, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
