"""A griffe extension: doctests in docstrings become code blocks of the reference pages.

Markdown would take a line that begins with >>> for a quotation.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# from a line that begins with >>> to the next empty line
_DOCTEST = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


class DoctestBlocks(griffe.Extension):
    """Puts every doctest outside an `Examples` section into a fenced block."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = _DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
