"""Every wrong input of the tests in a real process: told within five seconds, nothing written."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "cli"))

from conftest import make_template  # of tests/cli
from test_errors import snapshot
from wrong_inputs import WRONG_INPUTS

import fishleg
from fishleg.formats.results import write_json

LIMIT = 5.0  # seconds, from the start of the process to its end


def main(out: Path) -> bool:
    """Whether every wrong input was refused as it should be."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder)
        make_template(template)
        before = snapshot(template)
        for line, fragment in WRONG_INPUTS:
            rows.append(_try(line, fragment, template, before))
            if not rows[-1]["right"]:
                print(rows[-1], flush=True)
    seconds = [row["seconds"] for row in rows]
    wrong = [row for row in rows if not row["right"]]
    summary = {
        "version": fishleg.__version__, "inputs": len(rows), "wrong": wrong,
        "median seconds": round(statistics.median(seconds), 2),
        "longest seconds": round(max(seconds), 2),
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "wrong_inputs.json", summary)
    print(summary)
    return not wrong


def _try(line: str, fragment: str, folder: Path, before: Any) -> dict[str, Any]:
    started = time.monotonic()
    arguments = [sys.executable, "-B", "-m", "fishleg", *line.split()]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    seconds = time.monotonic() - started
    told = [text for text in done.stderr.splitlines() if text.startswith(("error:", "Error:"))]
    faults = {
        "exit code": done.returncode in (1, 2),
        "message": fragment in done.stderr,
        "one error": len(told) == 1,
        "no traceback": "Traceback" not in done.stderr,
        "no output": done.stdout == "",
        "in time": seconds < LIMIT,
        "nothing written": snapshot(folder) == before,
    }
    wrong = [name for name, held in faults.items() if not held]
    return {"line": line, "seconds": seconds, "right": not wrong, "fails": wrong, "said": told[-1:]}
