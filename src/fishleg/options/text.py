"""Text from files and errors, made fit for a terminal. This module does not import torch."""

from __future__ import annotations

import re

# C0 and C1 control characters and DEL, bidirectional overrides and isolates, lone surrogates
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_TRACEBACK = "Traceback (most recent call last):"
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


def error_text(error: BaseException) -> str:
    r"""Return the whole message of an error, which may have several lines.

    >>> error_text(ValueError("a\nb"))
    'a\nb'

    Args:
        error: The error.

    Returns:
        Its message. If it holds a traceback, what follows it: the type and the message of that error.
    """
    text = str(error).strip()
    if _TRACEBACK not in text:
        return text
    lines = text.splitlines()
    frames = [i for i, line in enumerate(lines) if line.startswith('  File "')]
    start = 1 + (frames[-1] if frames else lines.index(_TRACEBACK))
    while start < len(lines) - 1 and lines[start].startswith("    "):  # the code, and marks below it
        start += 1
    return "\n".join(lines[start:])
