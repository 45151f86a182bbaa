"""Shared by all: the unit runner, result files, statistics, pictures, tables."""

from pathlib import Path

from reproduction.harness.locks import UnitLocks
from reproduction.harness.markdown import Cell, cell, fill, markdown
from reproduction.harness.pictures import band, need_matplotlib, save_picture
from reproduction.harness.processes import limit_threads, run_measured, run_workers
from reproduction.harness.result_files import RecordFile, Results, RowsFile
from reproduction.harness.statistics import (
    columns,
    duration,
    mean,
    mean_sem,
    plain,
    rank_correlation,
    sem,
    spaced,
    steps_to,
)
from reproduction.harness.units import (
    Progress,
    Unit,
    missing,
    run_benchmark,
    run_figure,
    run_units,
)

RESULTS = Path(__file__).parent.parent / "results"

__all__ = [
    "RESULTS",
    "Cell",
    "Progress",
    "RecordFile",
    "Results",
    "RowsFile",
    "Unit",
    "UnitLocks",
    "band",
    "cell",
    "columns",
    "duration",
    "fill",
    "limit_threads",
    "markdown",
    "mean",
    "mean_sem",
    "missing",
    "need_matplotlib",
    "plain",
    "rank_correlation",
    "run_benchmark",
    "run_figure",
    "run_measured",
    "run_units",
    "run_workers",
    "save_picture",
    "sem",
    "spaced",
    "steps_to",
]
