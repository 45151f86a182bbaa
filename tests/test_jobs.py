"""Several processes at one experiment: each unit is done once, whatever becomes of the others."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from fishleg.cli.commands import main
from reproduction.paper import jobs
from reproduction.paper.harness import Unit, missing, run_units
from reproduction.paper.jobs import Claims, run_workers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="nothing is locked there")

HOLD = """
import sys, time
from pathlib import Path
from fishleg.paper.jobs import Claims
claims = Claims(Path(sys.argv[1]))
print(claims.take("a"), flush=True)
time.sleep(60)
"""
SHARE = """
import sys, time
from pathlib import Path
from fishleg.paper.harness import Unit, run_units
path, log = Path(sys.argv[1]), Path(sys.argv[2])

def unit(key, needs):
    def compute(done):
        assert all(need in done for need in needs)
        with log.open("a") as file:
            file.write(f"{key} {sys.argv[3]}\\n")
        time.sleep(0.3)
        return key
    return Unit(key, compute, needs=needs)

keys = [f"arm {i}" for i in range(6)]
units = [unit("dense", ()), *(unit(key, ("dense",)) for key in keys)]
results = run_units(path, {"a": 1}, units, lambda line: None)
assert results == {key: key for key in ["dense", *keys]}
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_claim_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    holder = start(HOLD, path)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "True\n"
        with Claims(path) as claims, Claims(tmp_path / "y.json") as others:
            assert not claims.take("a")
            assert claims.take("b")
            assert others.take("a")
            holder.kill()
            assert claims.take("a", wait=True)
    finally:
        holder.kill()
        holder.communicate()
    assert list(tmp_path.iterdir()) == []


def test_two_processes_share_the_units_and_do_each_once(tmp_path: Path) -> None:
    path, log = tmp_path / "x.json", tmp_path / "log"
    workers = [start(SHARE, path, log, name) for name in "AB"]
    for worker in workers:
        worker.communicate()
        assert worker.returncode == 0
    done = [line.rsplit(" ", 1) for line in log.read_text().splitlines()]
    assert sorted(key for key, _ in done) == sorted(["dense", *(f"arm {i}" for i in range(6))])
    assert len(json.loads(path.read_text())["units"]) == 7


def test_a_unit_that_another_process_was_at_is_done_if_it_died(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    holder = start(HOLD, path)
    assert holder.stdout is not None
    holder.stdout.readline()
    order: list[str] = []
    units = [Unit(key, lambda _, key=key: order.append(key), needs=()) for key in "ab"]
    units[1] = Unit("b", lambda _: (order.append("b"), holder.kill(), holder.communicate())[0], needs=())
    run_units(path, {}, units, lambda _: None)
    assert order == ["b", "a"]  # "a" was taken, so "b" came first; then "a" was free
    assert missing(path, {}, [*units, Unit("c", lambda _: None)]) == ["c"]


def test_the_time_left_counts_what_others_have_done(tmp_path: Path) -> None:
    path, told = tmp_path / "x.json", []

    def half_done(_: object) -> None:
        """Meanwhile another process finishes one of the two that are left."""
        path.write_text(json.dumps({"settings": {}, "units": {"b": 1}}))
        time.sleep(0.2)

    units = [Unit("a", half_done, needs=()), *(Unit(key, lambda _: None, needs=()) for key in "bc")]
    run_units(path, {}, units, told.append)
    taken, left = (float(found) for found in re.findall(r"([\d.]+) s", told[0]))
    assert left == pytest.approx(taken / 2, rel=0.01)  # so much for two of three, one is left
    assert len(told) == 2


def test_a_worker_that_fails_is_told() -> None:
    assert run_workers(["no-such-command"], 2) == 2
    assert run_workers(["--version"], 1) == 0


def test_an_interruption_ends_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Worker(subprocess.Popen[bytes]):
        waits = 0

        def __init__(self, command: list[str], **options: object) -> None:
            super().__init__([sys.executable, "-c", "import time; time.sleep(60)"])
            started.append(self)

        def wait(self, timeout: float | None = None) -> int:
            self.waits += 1
            if self.waits == 1 and self is started[0]:
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(jobs.subprocess, "Popen", Worker)
    with pytest.raises(KeyboardInterrupt):
        run_workers([], 2)
    assert [worker.returncode for worker in started] == [-15, -15]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_reproduce_with_jobs(tmp_path: Path) -> None:
    """Both workers, and the command itself, arrive at the whole record; the dense model was trained once."""
    options = ["reproduce", "semi_structured", "--smoke", "--out", str(tmp_path), "--jobs", "2"]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "semi_structured-smoke.json").read_text())
    assert set(record["summary"]["after"]) == {"magnitude + SGD", "OBS + SGD", "FLS + FishLeg"}
    assert "4 of 4 parts are there already" in result.output
    ends = sorted(path.suffix for path in tmp_path.iterdir())
    assert ends == [".json", ".png", ".pt"]
