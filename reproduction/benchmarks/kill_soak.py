"""Kill runs with SIGKILL a hundred times and more; each must end with the bits of an undisturbed one.

`python benchmarks/kill_soak.py [KILLS]` (default 120; some minutes). Five kinds of run, those of
tests/test_resume.py: staged, gradual with FishLeg, with distilled SGD, a baseline, and a search.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from killing import in_child, kill_in_call, kill_often, warm_up, work
from test_resume import MODES, model_bytes, recipe_for

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 120
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
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "kill_soak.json").write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(r["identical"] < r["runs"] or r["write_identical"] < r["write_runs"] for r in rows))


def writes(mode: str, base: Path, expected: bytes) -> dict[str, int]:
    """The same with kills inside fsync, half of the file written, and inside rename."""
    runs = same = kills = 0
    for call in ("fsync", "replace"):
        for at in (3, 6, 8, 11):
            recipe = recipe_for(mode, f"{call}-{at}")

            def deadly(call: str = call, at: int = at, recipe: object = recipe) -> None:
                kill_in_call(os, call, at, half_written=True)
                work(recipe, base)  # type: ignore[arg-type]

            kills += in_child(deadly) == -9
            assert in_child(lambda recipe=recipe: work(recipe, base)) == 0
            runs, same = runs + 1, same + (model_bytes(base / recipe.out) == expected)
    return {"write_kills": kills, "write_runs": runs, "write_identical": same}


if __name__ == "__main__":
    sys.exit(main())
