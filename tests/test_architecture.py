"""Imports point one way, core modules need torch alone, and importing fishleg stays light."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fishleg

ROOT = Path(fishleg.__file__).parent
# Each room may import from those further up; rooms on one line do not know each other.
ROOMS: tuple[set[str], ...] = (
    {"operators", "likelihoods", "layers", "batches", "distributed", "tracing"},
    {"streams", "channels"},
    {"fisher"},
    {"inverse", "kfac", "warmstart"},
    {"auxiliary"},
    {"optimizer"},
    {"patterns", "masking", "yardstick"},
    {"obs", "exchange", "baselines", "cutting"},
    {"options"},
    {"prunable", "scalpel", "looks"},
    {"surgeon", "tuning"},
    {"attachment"},
    {"loop"},
    {"api"},
)
# Edges may use the public names, every room, and edges further up; no room uses them.
EDGES = {
    "workloads": 0,  # data and models
    "toml": 0,
    "checkpoint": 0,
    "report": 0,
    "tool": 1,
    "demo": 1,
    "paper": 1,
    "cli": 2,
    "__main__": 3,
}
PARTS_OF_OPERATORS = ({"base"}, {"factors"}, {"simple", "kronecker", "lowrank", "masked"})
RANK = {room: i for i, rooms in enumerate(ROOMS) for room in rooms}
RANK_IN_OPERATORS = {part: i for i, parts in enumerate(PARTS_OF_OPERATORS) for part in parts}
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module imported anywhere in a file, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide where a name comes from"
            names = [alias.name for alias in node.names] if node.module == "fishleg" else [""]
            yield from (f"{node.module}.{name}".rstrip(".") for name in names)


def violations(path: Path, source: str) -> list[str]:
    room, found = room_of(path), []
    for module in imports(ast.parse(source)):
        package, _, rest = module.partition(".")
        target, _, part = rest.partition(".")
        if package != "fishleg":
            if room not in EDGES and package != "torch" and package not in sys.stdlib_module_names:
                found.append(f"{path} imports {module}: core modules need torch alone")
        elif room == "__init__":
            if target in EDGES:
                found.append(f"{path} imports the edge {target}")
        elif target == room:
            if room == "operators" and path.stem != "__init__":
                own, other = RANK_IN_OPERATORS[path.stem], RANK_IN_OPERATORS[part]
                if other >= own:
                    found.append(f"{path} imports {module}, which is not above it")
        elif room in EDGES:
            if EDGES.get(target, -1) >= EDGES[room]:
                found.append(f"{path} imports the edge {target}")
        elif target not in RANK or RANK[target] >= RANK[room]:
            found.append(f"{path} imports {module}, which is not above it")
    return found


def test_every_module_has_a_room() -> None:
    unknown = {room_of(path) for path in FILES} - set(RANK) - set(EDGES) - {"__init__", "__main__"}
    assert not unknown, f"add {sorted(unknown)} to ROOMS or EDGES here and to docs/architecture.md"
    unknown = {path.stem for path in FILES if path.parts[0] == "operators"} - set(RANK_IN_OPERATORS)
    assert unknown == {"__init__"}, f"add {sorted(unknown)} to PARTS_OF_OPERATORS"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_point_one_way(path: Path) -> None:
    assert violations(path, (ROOT / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("path", "source", "allowed"),
    [
        ("fisher.py", "from fishleg.likelihoods import Likelihood", True),
        ("fisher.py", "from fishleg.inverse import InverseFisher", False),
        ("fisher.py", "def f():\n    import fishleg.inverse", False),
        ("layers.py", "from fishleg.batches import batch_size", False),
        ("inverse.py", "from fishleg import InverseFisher", False),
        ("inverse.py", "from fishleg import layers", True),
        ("surgeon.py", "from fishleg.cli import main", False),
        ("cli.py", "import matplotlib\nfrom fishleg.surgeon import Surgeon", True),
        ("cli.py", "from fishleg.tool.run import start", True),
        ("report/charts.py", "from fishleg.tool.run import start", False),
        ("demo.py", "from fishleg.tool.run import start", False),
        ("demo.py", "from fishleg import InverseFisher", True),
        ("operators/kronecker.py", "from fishleg.operators.factors import Factor", True),
        ("operators/factors.py", "from fishleg.operators.kronecker import Kronecker", False),
        ("operators/base.py", "from fishleg.layers import Layer", False),
        ("obs.py", "import numpy", False),
        ("__init__.py", "from fishleg.demo import main", False),
    ],
)
def test_the_rule_itself(path: str, source: str, allowed: bool) -> None:
    assert (violations(Path(path), source) == []) is allowed


def test_import_fishleg_is_light() -> None:
    code = "import sys, fishleg; print(sorted({'matplotlib', 'curvlinops'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
