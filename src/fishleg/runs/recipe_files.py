"""Parse a TOML, YAML or JSON file of limited size and depth. This file must stay light (no torch)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fishleg.formats.files import read_limited
from fishleg.formats.toml import read_toml

_LARGEST = 2**16  # bytes of a file; a recipe has a few thousand, and PyYAML reads 60 kB in a second
_DEEPEST = 8  # levels of the content; a recipe has three: sections, keys, lists
_LONGEST = 4096  # bits of a whole number; Python refuses to print much longer ones
# a dotted key of TOML with many parts, for which the parser needs time that grows with their square
_MANY_DOTS = re.compile(r"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){32}""")


def read_content(path: Path) -> Any:
    """Read a file of values by key.

    Args:
        path: The file: .toml, .yaml, .yml or .json.

    Returns:
        Its content.

    Raises:
        OSError: The file cannot be opened, is no regular file, or has more than 64 KiB.
        ValueError: Its content cannot be read, or is nested too deeply. The message has one line and does
            not name the file.
    """
    try:
        text = read_limited(path, _LARGEST).decode()
    except UnicodeDecodeError:
        raise ValueError("it is not a text file") from None
    try:
        content = _parse(path, text)
        _check_size(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception as error:  # the parsers have errors of many kinds
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None
    return content


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".toml":
        if _MANY_DOTS.search(text):
            raise RecursionError
        return read_toml(text)
    if path.suffix == ".json":
        return json.loads(text)
    if path.suffix in (".yaml", ".yml"):
        try:
            import yaml
        except ImportError:
            raise ValueError("a YAML recipe needs PyYAML: pip install pyyaml, or write TOML") from None
        return yaml.load(text, Loader=_without_aliases(yaml.SafeLoader))
    raise ValueError(f"a recipe must be a .toml, .yaml or .json file, got {path.name!r}")


def _without_aliases(loader: Any) -> Any:
    """Return a class of YAML loaders that refuse aliases: a few of them can stand for gigabytes."""

    def compose_node(self: Any, parent: Any, index: Any) -> Any:
        if type(self.peek_event()).__name__ == "AliasEvent":
            raise ValueError(f"aliases such as *{self.peek_event().anchor} are not allowed")
        return loader.compose_node(self, parent, index)

    return type("LoaderWithoutAliases", (loader,), {"compose_node": compose_node})


def _check_size(content: Any) -> None:
    """Check that parsed content can be shown in messages.

    Raises:
        ValueError: If it is nested too deeply, or has a number of thousands of digits.
    """
    level = [content]
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                inner += [*value.keys(), *value.values()]
            elif isinstance(value, (list, tuple, set)):
                inner += value
            elif isinstance(value, int) and value.bit_length() > _LONGEST:
                raise ValueError(f"it holds a whole number of {value.bit_length():,} bits")
        level = inner
    if level:
        raise ValueError("it is nested too deeply")
