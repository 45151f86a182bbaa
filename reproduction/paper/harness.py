"""What the experiments share: units of work that are kept and resumed, statistics, pictures."""

from __future__ import annotations

import io
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fishleg.formats.checkpoint import write_atomically, write_json
from reproduction.paper.jobs import Claims

Progress = Callable[[str], None]
Results = dict[str, Any]


@dataclass(frozen=True)
class Unit:
    """One piece of work; `cost` is relative, 0 nothing.

    `compute` sees the results of the units that it needs: by default all before it, which rules out that
    several processes share the work.
    """

    key: str
    compute: Callable[[Results], Any]
    cost: float = 1.0
    needs: tuple[str, ...] | None = None


def run_units(
    path: Path,
    settings: Mapping[str, Any],
    units: Sequence[Unit],
    progress: Progress,
    *,
    needs: Callable[[], Any] | None = None,
) -> Results:
    """The result of every unit, each written to `path` as soon as it is there; those found there are kept.

    Results of other settings are moved aside. `needs` is called first if there is anything to do: it fails,
    say for want of data, before anything is written. Other processes may do the same at the same time: each
    unit is done by one of them.
    """
    settings = as_json(settings)
    kept = _read(path, settings)
    done: Results = {unit.key: kept[unit.key] for unit in units if unit.key in kept}
    if needs is not None and len(done) < len(units):
        needs()
    path.parent.mkdir(parents=True, exist_ok=True)
    if done:
        progress(f"{len(done)} of {len(units)} parts are there already")
    total, spent = sum(unit.cost for unit in units if unit.key not in done), 0.0
    with Claims(path) as claims:
        with claims.writing():
            if path.exists() and not _read(path, settings):
                _put_aside(path, progress)
        while pending := [unit for unit in units if unit.key not in done]:
            start = time.perf_counter()
            unit = _claim(claims, pending, done, units)
            found = _read(path, settings)
            if others := unit.key in found:
                done[unit.key] = found[unit.key]
            else:
                done[unit.key] = plain(unit.compute(done))
                with claims.writing():  # units of other arms or seeds stay, and those of other processes
                    write_json(path, {"settings": settings, "units": {**_read(path, settings), **done}})
            claims.release(unit.key)
            seconds = time.perf_counter() - start
            spent += seconds if unit.cost else 0.0
            if others:
                continue
            left = sum(unit.cost for unit in units if unit.key not in _read(path, settings))
            told = left > 1e-9 and total > left
            remaining = f", about {duration(spent / (total - left) * left)} left" if told else ""
            place = units.index(unit) + 1
            progress(f"[{place}/{len(units)}] {unit.key}: {duration(seconds)}{remaining}")
    return {unit.key: done[unit.key] for unit in units}


def missing(path: Path, settings: Mapping[str, Any], units: Sequence[Unit]) -> list[str]:
    """The units that have no result yet."""
    kept = _read(path, as_json(settings))
    return [unit.key for unit in units if unit.key not in kept]


def _claim(claims: Claims, pending: Sequence[Unit], done: Results, units: Sequence[Unit]) -> Unit:
    """A unit that can be done now and that no other process is at; else the first that one is done with."""
    keys = [unit.key for unit in units]

    def ready(unit: Unit) -> bool:
        needed = keys[: keys.index(unit.key)] if unit.needs is None else unit.needs
        return all(key in done for key in needed)

    candidates = [unit for unit in pending if ready(unit)]
    while True:
        for unit in candidates:
            if claims.take(unit.key):
                return unit
        time.sleep(0.2)


def finish(path: Path, settings: Mapping[str, Any], units: Results, summary: Mapping[str, Any]) -> Results:
    """Write and return the whole record: settings, the result of every unit, and the summary of them."""
    settings = as_json(settings)
    record = {"settings": settings, "summary": plain(summary), "units": {**_read(path, settings), **units}}
    write_json(path, record)
    return record


def as_json(value: Any) -> Any:
    """The value as it is read back from a JSON file."""
    return json.loads(json.dumps(value))


def _read(path: Path, settings: Any) -> Results:
    try:
        record = json.loads(path.read_text("utf-8"))
        return dict(record["units"]) if record["settings"] == settings else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _put_aside(path: Path, progress: Progress) -> None:
    """Rename a file that cannot be added to; nothing that was put aside before is lost."""
    try:
        json.loads(path.read_text("utf-8"))
        why = "has other settings"
    except ValueError:
        why = "is not whole"
    names = (path.with_suffix(f".old{number}.json") for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    path.replace(aside)
    progress(f"{path.name} {why}: it is {aside.name} now")


def plain(value: Any) -> Any:
    """The value as JSON: six significant digits, None for what is not finite, strings as keys."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def duration(seconds: float) -> str:
    """Seconds for people: 12 s, 3 min."""
    return f"{seconds:.3g} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def mean(values: Iterable[float | None]) -> float:
    """The mean; infinite as soon as one value is missing, as it is after a divergence, or all are."""
    found = list(values)
    return statistics.fmean(v for v in found if v is not None) if found and None not in found else math.inf


def sem(values: Iterable[float | None]) -> float:
    """The standard error of the mean; 0 for a single value."""
    found = [v for v in values if v is not None]
    return statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0


def mean_sem(values: Iterable[float | None]) -> dict[str, float]:
    """Both, for a summary."""
    found = list(values)
    return {"mean": mean(found), "sem": sem(found)}


def columns(rows: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
    """Rows of seeds as columns of checkpoints."""
    return [list(column) for column in zip(*rows, strict=True)]


def spaced(last: int, count: int) -> list[int]:
    """About `count` whole numbers from 1 to `last`, evenly spaced on a logarithmic scale."""
    return sorted({round(last ** (i / (count - 1))) for i in range(count)})


def steps_to(goal: float, gaps: Sequence[float | None], at: Sequence[int] | None = None) -> float:
    """The first step from which on the gap is no larger; `at` says after which steps it was measured."""
    places = list(at or range(1, len(gaps) + 1))
    found = math.inf
    for t, gap in zip(reversed(places), reversed(gaps), strict=True):
        if gap is None or not gap <= goal:
            break
        found = float(t)
    return found


def need_matplotlib() -> None:
    """Complain before the work rather than after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("the paper's figures need matplotlib: pip install 'fishleg[plot]'") from None


def save_picture(figure: Any, path: Path, *, smoke: bool) -> None:
    """A PNG, whole or not at all; a coarse one for a smoke run."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=40 if smoke else 110)
    write_atomically(path, buffer.getvalue())


def band(
    axis: Any, x: Sequence[float], rows: Sequence[Sequence[float | None]], label: str | None, **style: Any
) -> None:
    """The mean over seeds with a band of one standard error either way; stops where a seed diverged."""
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
