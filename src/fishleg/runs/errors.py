"""Errors of a run that the user can correct; the command line shows their message only."""

from __future__ import annotations


class ToolError(ValueError):
    """An error that the user can correct. The command line shows it without a traceback."""


class Interrupted(ToolError):
    """The run was stopped by a signal. It can be resumed."""
