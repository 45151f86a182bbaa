"""Every option of the library and the command line, declared once; needs no torch."""

from __future__ import annotations

from fishleg.options.declaration import OptionError, nearest, option
from fishleg.options.fine_tuning import FineTuningOptions
from fishleg.options.pruning import AuxiliaryOptions, PruningOptions
from fishleg.options.run import DataOptions, ModelOptions, RunOptions, ScheduleOptions

__all__ = [
    "AuxiliaryOptions",
    "DataOptions",
    "FineTuningOptions",
    "ModelOptions",
    "OptionError",
    "PruningOptions",
    "RunOptions",
    "ScheduleOptions",
    "nearest",
    "option",
]
