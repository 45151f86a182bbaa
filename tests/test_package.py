"""The package as a whole: what its import brings in, and its examples."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fishleg

ROOT = Path(__file__).parents[1]


EXAMPLES = {path.stem: path for path in (ROOT / "examples").glob("*.py") if path.stem != "digits"}


NUMBER = r"([\d.]+)"


def imported_by(code: str) -> set[str]:
    """The top-level modules that some code imports, in a process of its own."""
    code = f"import sys\n{code}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return set(run.stdout.splitlines()[-1].split())


HEAVY = {"torch", "numpy", "matplotlib", "safetensors", "curvlinops", "hypothesis", "yaml", "wandb"}
HELP = """
from fishleg.cli.commands import main
try:
    main(["prune", "--help"])
except SystemExit as end:
    assert end.code == 0
"""


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import fishleg", HEAVY | {"click", "rich"}),
        ("import fishleg.options", HEAVY | {"click", "rich"}),
        ("import fishleg; fishleg.PruningOptions()", HEAVY | {"click", "rich"}),
        (HELP, HEAVY),
        ("import fishleg; fishleg.prune", HEAVY - {"torch", "numpy"} | {"click", "rich"}),
    ],
    ids=["package", "options", "an option", "help", "prune"],
)
def test_imports_are_light(code: str, forbidden: set[str]) -> None:
    found = imported_by(code)
    assert "fishleg" in found
    assert found & forbidden == set()


def test_every_public_name_exists_and_is_listed() -> None:
    assert sorted(fishleg.__all__) == fishleg.__all__
    assert set(fishleg.__all__) <= set(dir(fishleg))
    for name in fishleg.__all__:
        assert getattr(fishleg, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'pruen'"):
        fishleg.pruen  # noqa: B018


def close(text: str, pattern: str, most: float) -> bool:
    """Two accuracies are printed, and the second is at most so many points below the first."""
    dense, sparse = re.search(pattern, text, re.DOTALL).groups()  # type: ignore[union-attr]
    return float(dense) > 95 and float(dense) - float(sparse) <= most


CHECKS: dict[str, Callable[[str], bool]] = {
    "one_call": lambda text: close(text, rf"dense {NUMBER} %, with 90.0% zeros {NUMBER} %", 4),
    "own_training_loop": lambda text: (
        close(text, rf"dense {NUMBER} %.*steps more {NUMBER} %", 6) and text.count("pruned to") == 6
    ),
    "gradual_without_labels": lambda text: close(text, rf"dense {NUMBER} %, 95 % .* gone {NUMBER} %", 6),
    "two_four": lambda text: close(text, rf"dense {NUMBER} %, 2:4 {NUMBER} %", 3),
    "transformer": lambda text: close(text, rf"dense {NUMBER} %, 80 % .* gone {NUMBER} %", 5),
    "regression_from_dictionaries": lambda text: float(text.split()[-1]) < 0.03,
    "train_with_fishleg": lambda text: float(text.split()[-1]) < float(text.splitlines()[0].split()[-1]),
    "smaller_and_faster": lambda text: (
        close(text, rf"dense {NUMBER} %, small {NUMBER} %", 6)
        and float(re.search(rf"{NUMBER}% of the parameters", text)[1]) < 35  # type: ignore[index]
    ),
    "look_at_q": lambda text: "converged: True" in text,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "error::UserWarning"}
    command = [sys.executable, str(EXAMPLES[name])]
    run = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
    )
    assert run.returncode == 0, run.stderr
    assert CHECKS[name](run.stdout), run.stdout
