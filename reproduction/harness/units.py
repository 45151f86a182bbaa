"""The unit runner: each piece of work keeps its result at once, so that a stopped run can go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproduction.harness.locks import UnitLocks
from reproduction.harness.pictures import need_matplotlib, save_picture
from reproduction.harness.processes import run_measured
from reproduction.harness.result_files import RecordFile, ResultFile, Results, RowsFile, describe, put_aside
from reproduction.harness.statistics import duration

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Unit:
    """One piece of work.

    `compute` receives the results of the units that this one needs. By default it needs all units before it;
    several processes can only share units whose `needs` are given. `cost` is relative to the other units, and
    serves to estimate the time left.
    """

    key: str
    compute: Callable[[Results], Any]
    cost: float = 1.0
    needs: tuple[str, ...] | None = None


def run_units(
    file: ResultFile,
    units: Sequence[Unit],
    progress: Progress,
    *,
    prepare: Callable[[], Any] | None = None,
) -> Results:
    """The result of every unit. Each is written to the file at once; results that are there are kept.

    A file with other settings is renamed, not overwritten. `prepare` is called first if there is anything to
    do: it raises, for instance if data are missing, before anything is written. Several processes may run the
    same units at the same time: each unit is done by one of them.
    """
    kept = file.read()
    done: Results = {unit.key: kept[unit.key] for unit in units if unit.key in kept}
    if prepare is not None and len(done) < len(units):
        prepare()
    file.path.parent.mkdir(parents=True, exist_ok=True)
    if done:
        progress(f"{len(done)} of {len(units)} parts are there already")
    total, spent = sum(unit.cost for unit in units if unit.key not in done), 0.0
    with UnitLocks(file.path) as locks:
        with locks.writing():
            if file.path.exists() and (fault := file.fault()):
                progress(f"{file.path.name} {fault}: it is {put_aside(file.path).name} now")
        while pending := [unit for unit in units if unit.key not in done]:
            start = time.perf_counter()
            unit = _take(locks, pending, done, units)
            found = file.read()
            if unit.key in found:  # another process was faster
                done[unit.key] = found[unit.key]
                locks.release(unit.key)
                continue
            result = unit.compute(done)
            with locks.writing():
                done[unit.key] = file.add(unit.key, result)
            locks.release(unit.key)
            seconds = time.perf_counter() - start
            spent += seconds if unit.cost else 0.0
            left = sum(other.cost for other in units if other.key not in file.read())
            known = left > 1e-9 and total > left
            remaining = f", about {duration(spent / (total - left) * left)} left" if known else ""
            place = units.index(unit) + 1
            progress(f"[{place}/{len(units)}] {unit.key}: {duration(seconds)}{remaining}")
    return {unit.key: done[unit.key] for unit in units}


def _take(locks: UnitLocks, pending: Sequence[Unit], done: Results, units: Sequence[Unit]) -> Unit:
    """Lock a unit that can be done now; waits while other processes hold all of them."""
    keys = [unit.key for unit in units]

    def ready(unit: Unit) -> bool:
        needed = keys[: keys.index(unit.key)] if unit.needs is None else unit.needs
        return all(key in done for key in needed)

    candidates = [unit for unit in pending if ready(unit)]
    while True:
        for unit in candidates:
            if locks.take(unit.key):
                return unit
        time.sleep(0.2)


def missing(file: ResultFile, units: Sequence[Unit]) -> list[str]:
    """The keys of the units that have no result yet."""
    kept = file.read()
    return [unit.key for unit in units if unit.key not in kept]


def run_figure(
    path: Path,
    settings: Mapping[str, Any],
    units: Sequence[Unit],
    *,
    summary: Callable[[Results], Results],
    draw: Callable[[Results], dict[str, Any]],
    smoke: bool = False,
    progress: Progress = print,
    prepare: Callable[[], Any] | None = None,
) -> Results:
    """Run the units of a figure, summarise them and draw them; returns the record that the file holds.

    `draw` receives the record and returns pictures by suffix: "-a" is written to NAME-a.png.
    """
    need_matplotlib()
    file = RecordFile(path, settings)
    results = run_units(file, units, progress, prepare=prepare)
    with UnitLocks(path) as locks, locks.writing():  # several processes may come here
        record = file.finish(summary(results))
        for suffix, picture in draw(record).items():
            save_picture(picture, path.with_name(f"{path.stem}{suffix}.png"), dpi=40 if smoke else 110)
    return record


def run_benchmark(
    path: Path,
    settings: Sequence[dict[str, Any]],
    run: Callable[..., dict[str, Any]],
    *arguments: Any,
    again: bool = False,
    progress: Progress = print,
) -> list[dict[str, Any]]:
    """The row of every unit of a benchmark, each made by `run(unit, *arguments)` in a process of its own.

    The process measures seconds, CPU seconds and peak memory of its unit. `again` makes all rows anew; the
    file with the old rows is renamed.
    """
    if again and path.exists():
        progress(f"{path.name} is {put_aside(path).name} now")

    def unit(fields: dict[str, Any]) -> Unit:
        return Unit(describe(fields), lambda _: run_measured(run, fields, *arguments), needs=())

    file = RowsFile(path, settings)
    return list(run_units(file, [unit(fields) for fields in settings], progress).values())
