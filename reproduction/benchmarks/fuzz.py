"""Fuzzing of all files that are read: recipes, checkpoints, packed and shrunk models, state dicts.

Ten minutes for each of the five targets, one process with one thread each. With the package `atheris`
(pip install atheris) the inputs are guided by the coverage of fishleg's own code; without it they are random.
A stopped command goes on where it stopped: the inputs that reached new code are kept in the work directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fishleg
from fishleg.formats.results import write_json
from reproduction.harness.processes import limit_threads

NAMES = ("recipe", "checkpoint", "packed", "shrunk", "state_dict")
HANG, MEMORY = 5.0, 2**30  # more seconds or bytes than these are a finding
STATUS, LOG = "status.json", "atheris.log"
INSTRUMENTED = ["fishleg", "yaml", "tomllib", "torch._weights_only_unpickler"]


class Trial:
    """Tries inputs of one target, and collects findings.

    Args:
        name: The target.
        work: Where findings and the status are written to; None: nowhere.
        status: The status of an earlier part of the same trial.
    """

    def __init__(self, name: str, work: Path | None = None, status: dict[str, Any] | None = None) -> None:
        from reproduction.benchmarks.fuzz_targets import TARGETS

        self.name, self.work, self.target = name, work, TARGETS[name]
        status = status or {}
        self.inputs: int = status.get("inputs", 0)
        self.accepted: int = status.get("accepted", 0)
        self.before: float = status.get("seconds", 0.0)
        self.findings: dict[str, str] = status.get("findings", {})
        self.began = time.monotonic()
        self._written = self.began
        shared = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None)
        self._peak = _peak_memory()

    @property
    def seconds(self) -> float:
        """Seconds of this part."""
        return time.monotonic() - self.began

    def status(self) -> dict[str, Any]:
        """The result so far."""
        return {
            "target": self.name, "inputs": self.inputs, "accepted": self.accepted,
            "seconds": round(self.before + self.seconds, 1), "findings": self.findings,
        }  # fmt: skip

    def run(self, data: bytes) -> None:
        """Read one input and judge what happened."""
        started = time.monotonic()
        self.inputs += 1
        try:
            self.target.check(data, Path(self._folder.name))
            self.accepted += 1
        except ValueError as error:
            if "\n" in str(error) or not str(error):
                self._found(data, error, "the message does not have one line")
        except Exception as error:
            self._found(data, error)
        seconds, peak = time.monotonic() - started, _peak_memory()
        if seconds > HANG:
            self._found(data, TimeoutError(f"it took {seconds:.0f} s"))
        if peak - self._peak > MEMORY:
            self._found(data, MemoryError(f"it took {peak - self._peak:,} bytes"))
        self._peak = max(self._peak, peak)
        if time.monotonic() - self._written > 2:
            self.write()

    def _found(self, data: bytes, error: Exception, what: str = "") -> None:
        """Note a finding; those at the same place of the code count once."""
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/fishleg/" in f.filename]
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "nowhere"
        key = f"{type(error).__name__} at {place}{': ' if what else ''}{what}"
        if key in self.findings:
            return
        self.findings[key] = str(error)[:300]
        if self.work is not None:
            kept = self.work / "findings" / hashlib.sha256(data).hexdigest()[:16]
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(data)
            self.write()

    def write(self) -> None:
        """Write the status."""
        self._written = time.monotonic()
        if self.work is not None:
            write_json(self.work / STATUS, self.status())

    def close(self) -> None:
        """Write the status and delete temporary files."""
        self.write()
        self._folder.cleanup()


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fuzz_randomly(trial: Trial, *, seconds: float, inputs: int | None = None, seed: int = 0) -> Trial:
    """Try random mutations of the valid files, without coverage."""
    source = random.Random(seed)
    corpus = trial.target.seeds()
    for data in corpus:
        trial.run(data)
    while trial.seconds < seconds and (inputs is None or trial.inputs < inputs):
        data = source.choice(corpus)
        for _ in range(source.choice((1, 1, 1, 2, 4))):
            data = trial.target.mutate(data, source)
        accepted = trial.accepted
        trial.run(data)
        if trial.accepted > accepted and len(corpus) < 500:
            corpus.append(data)
    return trial


def fuzz_with_coverage(atheris: Any, trial: Trial, seconds: float, corpus: Path) -> None:
    """Let atheris choose the inputs; ends the process."""

    def mutate(data: bytes, largest: int, seed: int) -> bytes:
        if seed % 3 == 0:
            return bytes(atheris.Mutate(data, largest))
        changed = trial.target.mutate(bytes(data), random.Random(seed))
        return changed if len(changed) <= largest else bytes(atheris.Mutate(data, largest))

    def try_one(data: bytes) -> None:
        trial.run(bytes(data))
        if trial.seconds > seconds:
            trial.close()
            sys.stdout.flush()
            os._exit(0)  # the fuzzer itself has no other end that keeps its results

    limits = ["-rss_limit_mb=2048", "-timeout=30", "-max_len=65536", "-len_control=0"]
    arguments = [f"-artifact_prefix={corpus.parent}/fatal-", "-print_final_stats=1", *limits, str(corpus)]
    atheris.Setup([sys.argv[0], *arguments], try_one, custom_mutator=mutate)
    atheris.Fuzz()


@contextlib.contextmanager
def instrumented() -> Iterator[Any]:
    """The package atheris, which instruments what is imported inside the block; None if it is missing."""
    try:
        import atheris
    except ImportError:
        yield None
        return
    with atheris.instrument_imports(include=INSTRUMENTED):
        yield atheris


def run_target(name: str, seconds: float, work: Path) -> None:
    """Fuzz one target in this process."""
    with instrumented() as atheris:
        import torch

        from reproduction.benchmarks.fuzz_targets import TARGETS

    torch.set_num_threads(1)
    logging.getLogger("fishleg").setLevel(logging.ERROR)  # warnings of skipped checkpoints, thousands of them
    corpus = work / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for data in TARGETS[name].seeds():
        (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    trial = Trial(name, work, _read(work / STATUS))
    if atheris is not None:
        fuzz_with_coverage(atheris, trial, seconds, corpus)
    fuzz_randomly(trial, seconds=seconds, seed=trial.inputs).close()


def main(
    out: Path,
    *,
    seconds: float = 600,
    only: Sequence[str] = (),
    work: Path = Path("fuzz-out"),
    again: bool = False,
    progress: Callable[[str], None] = print,
) -> bool:
    """Fuzz the targets one after the other; whether nothing was found."""
    path = out / "fuzz.json"
    rows = {row["target"]: row for row in ([] if again else _read(path) or [])}
    for name in only or NAMES:
        folder = work / name
        if again:
            shutil.rmtree(folder, ignore_errors=True)
        done = (_read(folder / STATUS) or rows.get(name, {})).get("seconds", 0.0)
        if done < seconds:
            progress(f"{name}: {seconds - done:.0f} s")
            rows[name] = _in_process(name, seconds - done, folder)
            rows = {each: rows[each] for each in NAMES if each in rows}
            out.mkdir(parents=True, exist_ok=True)
            write_json(path, list(rows.values()))
        progress(json.dumps(rows[name]))
    return not any(rows[name]["findings"] for name in only or NAMES)


def _in_process(name: str, seconds: float, folder: Path) -> dict[str, Any]:
    """The result of a target, fuzzed in a process of its own with one thread."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "reproduction.benchmarks.fuzz", name, str(seconds), str(folder)]
    with open(folder / LOG, "wb") as log:
        code = subprocess.run(
            command, env=limit_threads(1), stdout=log, stderr=log, cwd=Path(__file__).parents[2]
        ).returncode  # fmt: skip
    lines = (folder / LOG).read_text(errors="replace")
    row: dict[str, Any] = _read(folder / STATUS) or {"target": name, "findings": {}}
    if code:
        row["findings"][f"the process ended with {code}"] = " ".join(lines.splitlines()[-3:])[:300]
    covered = re.findall(r"cov: (\d+) ft: (\d+)", lines)
    row |= {"version": fishleg.__version__, "guided": bool(covered)}
    row |= {"edges": int(covered[-1][0]), "features": int(covered[-1][1])} if covered else {}
    return row


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    run_target(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
