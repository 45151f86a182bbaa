"""Check the wheel in a directory: its files, its metadata, and that it works in an empty environment.

The wheel goes, with the project's constraints, into a new virtual environment in a temporary directory and is
imported from an empty working directory, so nothing of the checkout can help it.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMOKE = """
import importlib.metadata, importlib.resources, pathlib, sys
import fishleg

assert pathlib.Path(fishleg.__file__).is_relative_to(sys.prefix), f"imported from {fishleg.__file__}"
assert importlib.resources.files("fishleg").joinpath("py.typed").is_file(), "py.typed is missing"
for name in getattr(fishleg, "__all__", ()):
    getattr(fishleg, name)
print("fishleg", importlib.metadata.version("fishleg"), "imports from the wheel")
"""


def check_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = next(name.split("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    inside = {name for name in names if not name.startswith(f"{info}/")}
    source = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "fishleg").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    if inside != source:
        sys.exit(f"wheel lacks {sorted(source - inside)}, and should not have {sorted(inside - source)}")
    core = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    if [line[:5] for line in core] != ["torch"]:
        sys.exit(f"torch must be the only core dependency, got {core}")
    print(f"{wheel.name}: {len(inside)} package files, core dependencies {core}", flush=True)


def check_install(wheel: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    constraints = ROOT / "constraints.txt"
    torch = next(line for line in constraints.read_text().splitlines() if line.startswith("torch=="))
    with tempfile.TemporaryDirectory(prefix="fishleg-wheel-") as scratch:
        empty = Path(scratch, "empty")
        empty.mkdir()
        python = str(Path(scratch, "venv", "bin", "python"))
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "-c", str(constraints)]
        for command in (
            [sys.executable, "-m", "venv", str(Path(scratch, "venv"))],
            [*pip, torch],
            [*pip, str(wheel)],
            [python, "-c", SMOKE],
        ):
            subprocess.run(command, cwd=empty, env=environment, check=True, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    (built,) = Path(sys.argv[1]).resolve().glob("fishleg-*.whl")
    check_contents(built)
    check_install(built)
