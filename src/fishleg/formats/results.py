"""Results as JSON and as pictures, and whether a file of that name is one's own. Does not import torch."""

from __future__ import annotations

import io
import json
import math
import os
import re
from pathlib import Path
from typing import Any

from fishleg.formats.files import write_atomically


def to_json(value: Any, *, indent: int | None = 1) -> str:
    """Return a value as JSON. NaN and infinities, which JSON does not have, become null.

    >>> to_json({"loss": float("nan"), "steps": [1, 2]}, indent=None)
    '{"loss": null, "steps": [1, 2]}'

    Args:
        value: A value that JSON can represent.
        indent: The indentation; None: everything on one line.

    Returns:
        The text; lists of plain values stand on one line.
    """
    text = json.dumps(_finite(value), indent=indent, allow_nan=False)
    # JSON strings hold no raw line break, so this changes only the layout.
    return re.sub(r"\[\n[^\[\]{}]*\n *\]", lambda found: re.sub(r"\n *", " ", found[0]), text)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def write_json(path: Path, value: Any, *, new: bool = False) -> None:
    """Write a JSON file completely or not at all.

    Args:
        path: The file.
        value: A value that JSON can represent.
        new: Whether the file must not exist yet.
    """
    write_atomically(path, f"{to_json(value)}\n".encode(), new=new)


def write_figure(path: Path, figure: Any, *, new: bool = False) -> None:
    """Write a picture completely or not at all.

    Args:
        path: The file; its ending gives the format.
        figure: A figure of matplotlib.
        new: Whether the file must not exist yet.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix[1:].lower(), dpi=130)
    write_atomically(path, buffer.getvalue(), new=new)


def foreign_file(results: Path, maker: str, *others: Path) -> Path | None:
    """Find a file that a command would replace and that is not from an earlier call of it.

    Args:
        results: The JSON file in which the command names itself under "made_by".
        maker: That name.
        others: Files that it writes beside it.

    Returns:
        The first such file; None if all may be written.
    """
    try:
        content = json.loads(results.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        content = None
    if isinstance(content, dict) and content.get("made_by") == maker:
        return None
    return next((path for path in (results, *others) if os.path.lexists(path)), None)
