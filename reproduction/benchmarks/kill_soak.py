"""Runs that are killed with SIGKILL many times: each must end with the same bits as an undisturbed run.

A few minutes. Five kinds of runs, those of the test of resuming: staged, gradual with FishLeg, gradual with
distilled SGD, a baseline, and a search for a budget.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from killing import MODES, in_child, kill_in_call, kill_often, model_bytes, recipe_for, warm_up, work

import fishleg
from fishleg.formats.results import write_json


def main(out: Path, kills: int = 200) -> bool:
    """Whether every killed run ended with the right bits."""
    warm_up()
    rows = []
    for mode in MODES:
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder)
            started = time.monotonic()
            assert in_child(lambda: work(recipe_for(mode, "undisturbed"), base)) == 0  # noqa: B023
            seconds = time.monotonic() - started
            expected = model_bytes(base / "undisturbed")
            share = -(-kills // len(MODES))
            finished = kill_often(recipe_for(mode, "run"), base, share, seconds, random.Random(mode))
            same = sum(model_bytes(directory) == expected for directory in finished)
            in_writes = writes(mode, base, expected)
            rows.append({"run": mode, "kills": share, "runs": len(finished), "identical": same, **in_writes})
            print(rows[-1], flush=True)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "kill_soak.json", {"version": fishleg.__version__, "rows": rows})
    return all(r["identical"] == r["runs"] and r["write_identical"] == r["write_runs"] for r in rows)


def writes(mode: str, base: Path, expected: bytes) -> dict[str, int]:
    """The same with kills inside fsync, half of the file written, and inside rename."""
    runs = same = kills = 0
    for call in ("fsync", "replace"):
        for at in (3, 6, 8, 11):
            name = f"{call}-{at}"
            recipe = recipe_for(mode, name)

            def deadly(call: str = call, at: int = at, recipe: object = recipe) -> None:
                kill_in_call(os, call, at, half_written=True)
                work(recipe, base)  # type: ignore[arg-type]

            kills += in_child(deadly) == -9
            assert in_child(lambda recipe=recipe: work(recipe, base)) == 0
            runs, same = runs + 1, same + (model_bytes(base / name) == expected)
    return {"write_kills": kills, "write_runs": runs, "write_identical": same}
