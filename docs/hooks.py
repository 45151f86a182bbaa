"""What mkdocs does beyond its configuration: files of the repository outside docs/.

Two kinds of files are added to the site while it is built:

- CONTRIBUTING.md and CHANGELOG.md of the repository;
- every other file of the repository that a page links to, such as a picture of a benchmark.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FROM_REPOSITORY = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
# a link or a picture whose target begins with ../ : [text](../x/y.png#z)
_OUTWARD = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)")
_COPIES = "repository"  # where copies of the repository's files are on the site


def on_files(files: Files, config: Any) -> Files:
    """Add the files from outside docs/."""
    for source, name in FROM_REPOSITORY.items():
        files.append(File.generated(config, name, content=_moved(ROOT / source)))
    wanted = set()
    for file in files.documentation_pages():
        text = file.content_string
        wanted.update(path for _, link in _OUTWARD.findall(text) if (path := _outside(file.src_uri, link)))
    for path in sorted(wanted - FROM_REPOSITORY.keys()):
        files.append(File.generated(config, f"{_COPIES}/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave docs/ to the copies on the site."""

    def replace(match: re.Match[str]) -> str:
        path = _outside(page.file.src_uri, match[2])
        if path is None:
            return match[0]
        target = FROM_REPOSITORY.get(path, f"{_COPIES}/{path}")
        return match[1] + posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")

    return _OUTWARD.sub(replace, markdown)


def _outside(page: str, link: str) -> str | None:
    """The path, from the repository's root, of a link that leaves docs/ and has a file at its end."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    inside = path.startswith("docs/") or path.startswith("..")
    return None if inside or not (ROOT / path).is_file() else path


def _moved(source: Path) -> str:
    """A page of the repository's root with its links as seen from docs/."""
    text = source.read_text(encoding="utf-8")
    link = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)\s]+)")
    return link.sub(lambda m: m[1] + (m[2][5:] if m[2].startswith("docs/") else f"../{m[2]}"), text)
