"""Runs whose file system is full, read-only, broken, slow, linked or removed underneath.

A fault must be told in one line without a traceback, must not touch a file of the user's, and must lose
nothing: on a sound file system the run goes on to the same bits as an undisturbed one. Where the machine
allows it (Linux, root), small file systems in memory that are really full or read-only are tried as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from faults import FAULTS, Action, Ended, command, fail_in_call, finish, linking
from killing import model_bytes, recipe_for, warm_up

import fishleg
from fishleg.formats.results import write_json
from fishleg.runs.directory import (
    CHECKPOINTS,
    DENSE,
    FILES,
    LOG,
    LOG_TABLE,
    MODEL,
    PACKED,
    RECIPE,
    REPORT,
    RUN,
)

MODES = ("staged", "fishleg")
MOMENTS = {"fsync": (1, 2, 4, 7, 11, 15), "open": (3, 6, 9, 14), "replace": (1, 3, 6)}
MIDWAY = (RUN, LOG, LOG_TABLE, MODEL, PACKED, REPORT, RECIPE, DENSE)
PRECIOUS = "precious"
KIBIBYTES = (8, 24, 40, 64, 96, 128, 192, 256)  # of the small file systems


def main(out: Path) -> bool:
    """Whether nothing was lost, wrong or unclear."""
    warm_up()
    rows: list[dict[str, Any]] = []
    for mode in MODES:
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder)
            assert command(recipe_for(mode, "undisturbed"), base).code == 0
            expected = model_bytes(base / "undisturbed")
            for fault, where, ended, same in _faults(mode, base, expected):
                rows.append(
                    {"run": mode, "fault": fault, "where": where, "exit": ended.code, "told": ended.told,
                     "identical": same}
                )  # fmt: skip
                print(rows[-1], ended.output.strip().splitlines()[-1:], flush=True)
    failures = [row for row in rows if not (row["told"] and row["identical"])]
    summary = {"version": fishleg.__version__, "faults": len(rows), "failures": len(failures)}
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "fault_soak.json", {**summary, "rows": rows})
    print(summary)
    return not failures


def _faults(mode: str, base: Path, expected: bytes) -> Iterator[tuple[str, str, Ended, bool]]:
    yield from _injected(mode, base, expected)
    yield from _links(mode, base, expected)
    if mode == MODES[0]:
        yield from _occupied(mode, base, expected)
        yield from _small_file_systems(mode, expected)


def _injected(mode: str, base: Path, expected: bytes) -> Iterator[tuple[str, str, Ended, bool]]:
    """Calls of the operating system that fail, once or from then on."""
    for fault in ("full", "read-only", "broken", "removed", "slow"):
        for call, places in MOMENTS.items():
            if fault in ("removed", "slow") and call != "fsync":
                continue
            for at in places[:: 1 if fault == "full" else 2]:
                for_good = fault in ("full", "slow")
                ended, same = _one(
                    mode, base, f"{fault}-{call}-{at}", expected, call, at, FAULTS[fault], for_good
                )
                yield fault, f"{call} {at}", ended, same


def _links(mode: str, base: Path, expected: bytes) -> Iterator[tuple[str, str, Ended, bool]]:
    """Links to a file of the user's that appear while the run goes on."""
    theirs = base / "theirs"
    theirs.write_text(PRECIOUS)
    for name in MIDWAY:
        ended, same = _one(mode, base, f"link-{name}", expected, "fsync", 6, linking(name, theirs), False)
        yield "symlinked", name, ended, same and theirs.read_text() == PRECIOUS


def _one(
    mode: str, base: Path, out: str, expected: bytes, call: str, at: int, action: Action, for_good: bool
) -> tuple[Ended, bool]:
    recipe, directory = recipe_for(mode, out), base / out
    ended = command(recipe, base, lambda: fail_in_call(call, at, action, directory, for_good=for_good))
    for link in [path for path in (directory / name for name in FILES) if path.is_symlink()]:
        link.unlink()  # by the user, as the message asks
    return ended, finish(recipe, base).code == 0 and model_bytes(directory) == expected


def _occupied(mode: str, base: Path, expected: bytes) -> Iterator[tuple[str, str, Ended, bool]]:
    """A directory that holds a file of the user's under each name of a run, before it starts."""
    for name in FILES:
        out = f"occupied-{name}"
        recipe, directory = recipe_for(mode, out), base / out
        directory.mkdir()
        theirs = directory / name
        if name == CHECKPOINTS:
            theirs.mkdir()
            theirs /= "000123.ckpt"
        theirs.write_text(PRECIOUS)
        ended = command(recipe, base)
        kept = ended.code == 1 and theirs.read_text() == PRECIOUS
        for path in sorted(directory.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        yield "occupied", name, ended, kept and finish(recipe, base).code == 0 and _same(directory, expected)


def _same(directory: Path, expected: bytes) -> bool:
    return model_bytes(directory) == expected


def _small_file_systems(mode: str, expected: bytes) -> Iterator[tuple[str, str, Ended, bool]]:
    for size in KIBIBYTES:
        with tempfile.TemporaryDirectory() as mounted:
            if not _mount(mounted, f"size={size}k"):
                print("small file systems cannot be mounted here")
                return
            try:
                base, recipe = Path(mounted), recipe_for(mode, "run")
                ended = command(recipe, base)
                _mount(mounted, "remount,size=64m")
                yield (
                    f"{size} KiB",
                    "really full",
                    ended,
                    finish(recipe, base).code == 0 and _same(base / "run", expected),
                )
            finally:
                subprocess.run(["umount", mounted], check=True)
    with tempfile.TemporaryDirectory() as mounted:
        _mount(mounted, "size=64m")
        try:
            base, recipe = Path(mounted), recipe_for(mode, "run")
            (base / "recipe.toml").write_text(recipe.to_toml())
            _mount(mounted, "remount,ro")
            ended = command(recipe, base, write_recipe=False)
            _mount(mounted, "remount,rw")
            yield (
                "read-only",
                "really",
                ended,
                finish(recipe, base).code == 0 and _same(base / "run", expected),
            )
        finally:
            subprocess.run(["umount", mounted], check=True)


def _mount(path: str, options: str) -> bool:
    if os.name != "posix" or os.geteuid() != 0:
        return False
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], check=False)
    return done.returncode == 0
