"""The table of what a run promises: how each promise is tested, and how often it was tried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from reproduction.harness import markdown


def promises(results: Path) -> str:
    """The table, as Markdown; a benchmark that was never run to its end is told as such."""
    kills, faults, fuzz, wrong = (
        _read(results / f"{name}.json") for name in ("kill_soak", "fault_soak", "fuzz", "wrong_inputs")
    )
    hostile = "A damaged or hostile file is refused"
    told = "Wrong input is told in one line, within 5 s, and nothing is written"
    rows = [
        ["A killed run ends with the same files, byte for byte", "`bench kill-soak`", _kills(kills)],
        ["A file system that fails is told, and loses nothing", "`bench fault-soak`", _faults(faults)],
        [
            "No code runs from data files, and none from elsewhere without `--trust`",
            "`make test`",
            "the cases of `tests/runs/test_existing_run.py` and `test_weights.py`",
        ],
        *([f"{hostile}: {row['target']}", "`bench fuzz`", _fuzz(row)] for row in fuzz or ()),
        [told, "`bench wrong-inputs`", _wrong(wrong)],
    ]
    head = ["promise", "command (`bench`: of `python -m reproduction`)", "how often tried, with what result"]
    return markdown(head, rows)


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def _kills(found: Any) -> str:
    if found is None:
        return "not yet"
    rows = found["rows"]
    total, writes = sum(r["kills"] for r in rows), sum(r["write_kills"] for r in rows)
    runs = sum(r["runs"] + r["write_runs"] for r in rows)
    same = sum(r["identical"] + r["write_identical"] for r in rows)
    how = f"{total} kills at random moments and {writes} in the middle of a write"
    return f"{how}; {same} of {runs} runs identical"


def _faults(found: Any) -> str:
    if found is None:
        return "not yet"
    kinds = sorted(
        {"really full" if row["where"] == "really full" else row["fault"] for row in found["rows"]}
    )
    return f"{found['faults']} faults ({', '.join(kinds)}); {found['failures']} not told or something lost"


def _fuzz(row: Any) -> str:
    how = f"coverage-guided, {row['edges']} edges" if row["guided"] else "random"
    tried = f"{row['inputs']:,} inputs in {row['seconds'] / 60:.0f} minutes, {how}"
    return f"{tried}; {len(row['findings'])} findings"


def _wrong(found: Any) -> str:
    if found is None:
        return "not yet"
    return (
        f"{found['inputs']} inputs, each in a process of its own; {len(found['wrong'])} wrong; median "
        f"{found['median seconds']} s, longest {found['longest seconds']} s"
    )
