"""Reading TOML with every supported version of Python. This module does not import torch."""

from __future__ import annotations

import sys
from typing import Any


def read_toml(text: str) -> dict[str, Any]:
    """Parse a TOML document. Invalid syntax raises a ValueError.

    Args:
        text: The document.

    Returns:
        Its values.

    Example:
        >>> read_toml('pattern = "rows"')
        {'pattern': 'rows'}
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    values: dict[str, Any] = tomllib.loads(text)
    return values
