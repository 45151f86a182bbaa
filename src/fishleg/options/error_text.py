"""The message of an error, without the traceback that a worker process of a DataLoader puts before it."""

from __future__ import annotations

_TRACEBACK = "Traceback (most recent call last):"


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
