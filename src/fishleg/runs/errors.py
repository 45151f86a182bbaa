"""What the tool raises when the user, the data or the machine is at fault: one clear message each."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ToolError(ValueError):
    """An error that is shown as one message without a traceback."""


class Interrupted(ToolError):
    """The run was stopped from outside and can be resumed."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?`, or nothing where no known word is near."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""
