"""TOML for every supported Python, without waiting for torch."""

from __future__ import annotations

import sys
from typing import Any


def read_toml(text: str) -> dict[str, Any]:
    """What the text says; a ValueError tells what is wrong with it."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    values: dict[str, Any] = tomllib.loads(text)
    return values
