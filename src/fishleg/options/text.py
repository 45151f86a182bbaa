"""Text from files and errors, made safe for a terminal. This module does not import torch."""

from __future__ import annotations

import re

# C0 and C1 control characters and DEL, bidirectional overrides and isolates, lone surrogates
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_BREAKS = re.compile("[\t\n\u2028\u2029]")


def printable(text: str, *, one_line: bool = False) -> str:
    r"""Replace characters that could control the terminal by their escaped form.

    These are control characters except newline and tab, marks that reverse the direction of the text, and
    lone surrogates, which cannot be printed at all.

    Args:
        text: Any text, for instance the name of a tensor in a file.
        one_line: Whether to replace newlines and tabs too.

    Returns:
        The text without such characters.

    Example:
        >>> print(printable("\x1b[2Jweight"))
        \x1b[2Jweight
    """
    text = _UNSAFE.sub(_escaped, text)
    return _BREAKS.sub(_escaped, text) if one_line else text


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
