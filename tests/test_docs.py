"""The documentation: its Python code runs, its links and pictures exist, the files that it names exist.

A page is run as a whole: its Python blocks share their names, in order, in an empty directory. A block that
cannot run offline has a line `<!-- no-test: reason -->` before it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
EXTENDING = [page for page in sorted((DOCS / "extending").glob("*.md")) if page.name != "index.md"]
BLOCK = re.compile(r"(<!-- no-test: [^>]+ -->\n+)?```python\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")
# pages that prune a real network
SLOW = {
    "README.md",
    "docs/index.md",
    "docs/tutorial.md",
    "docs/how-to/next-steps.md",
    "docs/how-to/resume.md",
    "docs/how-to/smaller-and-faster.md",
}
FROM_REPOSITORY = {"contributing.md": ROOT / "CONTRIBUTING.md", "changes.md": ROOT / "CHANGELOG.md"}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[str]:
    """The Python blocks of a page that are to be run."""
    return [code for untested, code in BLOCK.findall(page.read_text("utf-8")) if not untested]


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs.yml has them made."""
    slugify: Any = pytest.importorskip("pymdownx.slugs").slugify(case="lower")
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        anchor = base = slugify(re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading), "-")
        count = 0
        while anchor in found:
            count += 1
            anchor = f"{base}_{count}"
        found.add(anchor)
    return found


def pages_with_code() -> list[Any]:
    found = [page for page in PAGES if blocks(page) and page not in EXTENDING]
    return [
        pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] * (name_of(page) in SLOW))
        for page in found
    ]


@pytest.fixture
def float32() -> Iterator[None]:
    """Readers have torch's own default, not that of the tests."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("float32")
@pytest.mark.parametrize("page", pages_with_code())
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for code in blocks(page):
            exec(compile(code, name_of(page), "exec"), names)


@pytest.mark.slow
def test_extending_blocks_run(tmp_path: Path) -> None:
    """In a process of their own: what they register stays registered."""
    pages = [[name_of(page), *blocks(page)] for page in EXTENDING]
    assert all(len(page) > 1 for page in pages)
    program = f"for page, *parts in {pages!r}:\n    names = {{}}\n    for code in parts:\n"
    program += "        exec(compile(code, page, 'exec'), names)\n    print('ran', page)\n"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("ran ") == len(EXTENDING)


@pytest.mark.parametrize("page", EXTENDING, ids=name_of)
def test_extending_pages_are_short_and_say_where_the_code_goes(page: Path) -> None:
    text = page.read_text("utf-8")
    longest = max(len(code.strip().splitlines()) for code in blocks(page))
    assert longest <= 30, f"a block of {page.name} has {longest} lines"
    where = re.search(r"^\*\*Where:\*\*.*?^(?=\w|```)", text, re.DOTALL | re.MULTILINE)
    assert where is not None, f"{page.name} does not say where the code goes"
    named = re.findall(r"`(src/[^`]+)`", where[0])
    assert named, f"{page.name} names no file or directory"
    for path in named:
        assert (ROOT / path).exists(), f"{page.name} names {path}, which does not exist"
    overview = (DOCS / "extending" / "index.md").read_text("utf-8")
    assert any(f"`{path}`" in overview for path in named)
    assert f"({page.name})" in overview
    if page.name in ("likelihood.md", "operator.md", "pattern.md", "rival.md"):
        assert "src/fishleg/options/names.py" in named


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_pictures_exist(page: Path) -> None:
    for link in LINK.findall(without_code(page.read_text("utf-8"))):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() and target.parent == DOCS:
            target = FROM_REPOSITORY.get(target.name, target)
        assert target.exists(), f"{name_of(page)} links to {link}, which does not exist"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{name_of(page)} links to {link}: there is no such heading"


def test_files_named_in_code_exist() -> None:
    """`src/...`, `docs/...`, `tests/...` and files of the symbol table are files of the repository."""
    for page in PAGES:
        text = page.read_text("utf-8")
        for path in re.findall(r"`((?:src|docs|tests|examples|reproduction)/[\w./-]+\.\w+)`", text):
            assert (ROOT / path).exists(), f"{name_of(page)} names {path}, which does not exist"
    for page in (DOCS / "math.md", DOCS / "architecture.md"):
        for path in re.findall(r"`(\w+/[\w/]+\.py)`", page.read_text("utf-8")):
            found = (ROOT / path).exists() or (ROOT / "src" / "fishleg" / path).exists()
            assert found, f"{name_of(page)} names {path}, which does not exist"


def test_every_public_name_has_a_reference() -> None:
    import fishleg

    documented = {
        name
        for page in (DOCS / "reference").glob("*.md")
        for name in re.findall(r"^::: fishleg\.(?:[\w.]+\.)?(\w+)$", page.read_text("utf-8"), re.MULTILINE)
    }
    options = (DOCS / "reference" / "options.md").read_text("utf-8")
    missing = {
        name
        for name in fishleg.__all__
        if name not in documented and f"## {name}\n" not in options and not name.startswith("__")
    }
    assert missing == set()


def test_generated_pages_are_up_to_date() -> None:
    """In a process of its own, since tests register names. Line breaks depend on the version of click."""
    program = "import json, generate_reference; print(json.dumps(generate_reference.pages()))"
    ran = subprocess.run([sys.executable, "-c", program], cwd=DOCS, capture_output=True, check=True)
    pages = json.loads(ran.stdout)
    for name, text in pages.items():
        written = (DOCS / name).read_text("utf-8").split()
        assert written == text.split(), f"docs/{name} is out of date: run python docs/generate_reference.py"
    assert "| `relative_damping` |" in pages["reference/options.md"]
    for command in (
        "prune",
        "resume",
        "compare",
        "sensitivity",
        "inspect",
        "eval",
        "export",
        "bench",
        "demo",
        "doctor",
    ):
        assert f"## fishleg {command}\n" in pages["reference/cli.md"]
    assert "--mask-search-rounds" in pages["reference/cli.md"]


def test_navigation_lists_every_page() -> None:
    """As mkdocs would tell, without building the site."""
    navigation = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert navigation == pages | FROM_REPOSITORY.keys()


def test_citation_names_the_version() -> None:
    import fishleg

    assert f"\nversion: {fishleg.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
