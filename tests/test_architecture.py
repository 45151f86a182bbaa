"""Rooms have ranks and doors, imports point one way, and core rooms need torch alone."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fishleg

ROOT = Path(fishleg.__file__).parent
# A room may import from rooms of lower ranks; rooms of one rank do not know each other.
RANKS: tuple[set[str], ...] = (
    {"options", "runtime", "report"},
    {"curvature", "formats", "shrinking", "workloads"},
    {"inverse"},
    {"optim"},
    {"pruning"},
    {"runs"},
    {"cli"},
)
RANK = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}
# Packages beside the standard library that a room may import. Those that are not listed need torch alone.
PACKAGES = {
    "options": set(),
    "report": set(),
    "formats": {"torch", "safetensors", "tomli", "onnxruntime"},
    "runs": {"torch", "safetensors", "yaml", "matplotlib", "wandb"},
    "cli": {"torch", "click", "rich", "matplotlib"},
}
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def module_of(path: Path) -> str:
    """The dotted name of a file of the package."""
    parts = ["fishleg", *path.with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module or name that a file imports, also inside functions, except for type checkers only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = [ast.Pass()]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide where a name comes from"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(path: Path, source: str) -> list[str]:
    room = path.parts[0].removesuffix(".py")
    found = []
    for name in imports(ast.parse(source)):
        package, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if package != "fishleg":
            allowed = PACKAGES.get(room, {"torch"})
            if package not in allowed and package not in sys.stdlib_module_names:
                found.append(f"{path} imports {package}, which {room} may not")
        elif room in ("__init__", "__main__") or target in (room, "__version__", ""):
            continue
        elif target not in RANK:
            found.append(f"{path} imports {name} from the package's front door")
        elif RANK[target] >= RANK[room]:
            found.append(f"{path} imports {name}, whose rank is not lower")
    return found


def test_every_file_has_a_room() -> None:
    rooms = {path.parts[0] for path in FILES if len(path.parts) > 1}
    assert rooms == set(RANK)
    assert {path.name for path in FILES if len(path.parts) == 1} == {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("room", sorted(RANK))
def test_every_room_has_a_door(room: str) -> None:
    door = ast.parse((ROOT / room / "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(door)
    exports = [node for node in door.body if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node)]
    assert exports, f"{room}/__init__.py names nothing in __all__"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_point_one_way(path: Path) -> None:
    assert violations(path, (ROOT / path).read_text(encoding="utf-8")) == []


def test_no_module_imports_itself_through_others() -> None:
    modules = {module_of(path): path for path in FILES}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        found = set()
        for name in imports(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            home = name if name in modules else name.rpartition(".")[0]
            if home in modules and home not in (module, "fishleg"):
                found.add(home)
        graph[module] = found
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"cycle: {' -> '.join([*path[path.index(module) :], module])}"
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize(
    ("path", "source", "allowed"),
    [
        ("curvature/samples.py", "from fishleg.runtime.batches import batch_size", True),
        ("curvature/samples.py", "from fishleg.inverse import InverseFisher", False),
        ("curvature/samples.py", "def f():\n    import fishleg.inverse", False),
        ("curvature/layers.py", "from fishleg.shrinking import shrink", False),
        ("inverse/inverse_updater.py", "from fishleg import InverseFisher", False),
        ("pruning/surgeon.py", "from fishleg.cli.commands import main", False),
        ("pruning/surgeon.py", "import numpy", False),
        ("options/names.py", "import torch", False),
        ("cli/demo.py", "import matplotlib\nfrom fishleg.pruning import Surgeon", True),
        ("report/charts.py", "from fishleg.runs.launch import start", False),
        ("runs/run.py", "from fishleg.cli.display import make_display", False),
    ],
)
def test_the_rule_itself(path: str, source: str, allowed: bool) -> None:
    assert (violations(Path(path), source) == []) is allowed


def test_no_file_speaks_of_the_old_names() -> None:
    """Metaphors that were replaced by literal names do not come back."""
    banned = ("scalpel", "yardstick", "ledger", "exchange(", "trained_outside")
    found = [
        f"{path}: {word}"
        for path in FILES
        for word in banned
        if word in (ROOT / path).read_text(encoding="utf-8").lower()
    ]
    assert found == []
