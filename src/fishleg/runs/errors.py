"""What the tool raises when the user, the data or the machine is at fault: one clear message each."""

from __future__ import annotations


class ToolError(ValueError):
    """An error that is shown as one message without a traceback."""


class Interrupted(ToolError):
    """The run was stopped from outside and can be resumed."""
