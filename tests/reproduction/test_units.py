"""The unit runner: each unit is done once, its result is kept, and several processes can share the units."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from reproduction.command_line import main
from reproduction.harness import (
    RecordFile,
    RowsFile,
    Unit,
    UnitLocks,
    missing,
    processes,
    run_benchmark,
    run_units,
    run_workers,
)

needs_locks = pytest.mark.skipif(sys.platform == "win32", reason="nothing is locked there")


def test_units_are_kept_and_those_of_other_settings_are_not(tmp_path: Path) -> None:
    calls: list[str] = []

    def fail(_: dict) -> float:
        raise RuntimeError("the plug was pulled")

    def unit(key: str) -> Unit:
        return Unit(key, lambda done: calls.append(key) or len(done))

    path = tmp_path / "deep" / "x.json"
    with pytest.raises(RuntimeError):
        run_units(RecordFile(path, {"a": (1, 2)}), [unit("first"), Unit("second", fail)], calls.append)
    calls.clear()
    assert run_units(RecordFile(path, {"a": (1, 2)}), [unit("first"), unit("second")], lambda _: None) == {
        "first": 0,
        "second": 1,
    }
    assert calls == ["second"]
    said: list[str] = []
    run_units(RecordFile(path, {"a": (1, 3)}), [unit("first")], said.append)
    assert calls == ["second", "first"]
    assert "x.json has other settings: it is x.old1.json now" in said
    assert set(json.loads((path.parent / "x.old1.json").read_text())["units"]) == {"first", "second"}
    run_units(RecordFile(path, {"a": (1, 3)}), [unit("third")], said.append)
    assert calls.pop() == "third"
    assert set(json.loads(path.read_text())["units"]) == {"first", "third"}  # nothing is lost
    path.write_text("{ half a fi")
    run_units(RecordFile(path, {"a": (1, 3)}), [unit("first")], said.append)
    assert calls == ["second", "first", "first"]
    assert "x.json is not whole: it is x.old2.json now" in said  # and the first that was put aside is there
    assert set(json.loads((path.parent / "x.old1.json").read_text())["units"]) == {"first", "second"}


def test_the_time_left_is_estimated_from_finished_work(tmp_path: Path) -> None:
    said: list[str] = []
    units = [
        Unit("file", lambda _: time.sleep(0.4), 0),
        Unit("a", lambda _: time.sleep(0.05), 1),
        Unit("b", lambda _: None, 4),
    ]
    run_units(RecordFile(tmp_path / "x.json", {}), units, said.append)
    assert "left" not in said[0]  # what was there already says nothing about the rest
    assert 0.2 <= float(re.search(r"about (\S+) s left", said[1]).group(1)) < 1.2
    assert "left" not in said[2]


HOLD = """
import sys, time
from pathlib import Path
from reproduction.harness import UnitLocks
locks = UnitLocks(Path(sys.argv[1]))
print(locks.take("a"), flush=True)
time.sleep(60)
"""


SHARE = """
import sys, time
from pathlib import Path
from reproduction.harness import RecordFile, Unit, run_units
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
results = run_units(RecordFile(path, {"a": 1}), units, lambda line: None)
assert results == {key: key for key in ["dense", *keys]}
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@needs_locks
def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    holder = start(HOLD, path)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "True\n"
        with UnitLocks(path) as locks, UnitLocks(tmp_path / "y.json") as others:
            assert not locks.take("a")
            assert locks.take("b")
            assert others.take("a")
            holder.kill()
            assert locks.take("a", wait=True)
    finally:
        holder.kill()
        holder.communicate()
    assert list(tmp_path.iterdir()) == []


@needs_locks
def test_two_processes_share_the_units_and_do_each_once(tmp_path: Path) -> None:
    path, log = tmp_path / "x.json", tmp_path / "log"
    workers = [start(SHARE, path, log, name) for name in "AB"]
    for worker in workers:
        worker.communicate()
        assert worker.returncode == 0
    done = [line.rsplit(" ", 1) for line in log.read_text().splitlines()]
    assert sorted(key for key, _ in done) == sorted(["dense", *(f"arm {i}" for i in range(6))])
    assert len(json.loads(path.read_text())["units"]) == 7


@needs_locks
def test_a_unit_of_a_process_that_died_is_done_by_another(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    holder = start(HOLD, path)
    assert holder.stdout is not None
    holder.stdout.readline()
    order: list[str] = []
    units = [Unit(key, lambda _, key=key: order.append(key), needs=()) for key in "ab"]
    units[1] = Unit("b", lambda _: (order.append("b"), holder.kill(), holder.communicate())[0], needs=())
    run_units(RecordFile(path, {}), units, lambda _: None)
    assert order == ["b", "a"]  # "a" was taken, so "b" came first; then "a" was free
    assert missing(RecordFile(path, {}), [*units, Unit("c", lambda _: None)]) == ["c"]


def test_the_time_left_counts_what_others_have_done(tmp_path: Path) -> None:
    path, said = tmp_path / "x.json", []

    def half_done(_: object) -> None:
        """Meanwhile another process finishes one of the two that are left."""
        path.write_text(json.dumps({"settings": {}, "units": {"b": 1}}))
        time.sleep(0.2)

    units = [Unit("a", half_done, needs=()), *(Unit(key, lambda _: None, needs=()) for key in "bc")]
    run_units(RecordFile(path, {}), units, said.append)
    taken, left = (float(found) for found in re.findall(r"([\d.]+) s", said[0]))
    assert left == pytest.approx(taken / 2, rel=0.01)  # so much for two of three, one is left
    assert len(said) == 2


@needs_locks
def test_the_exit_code_of_a_failed_worker_is_returned() -> None:
    assert run_workers(["no-such-command"], 2) == 2
    assert run_workers(["--help"], 1) == 0


@needs_locks
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

    monkeypatch.setattr(processes.subprocess, "Popen", Worker)
    with pytest.raises(KeyboardInterrupt):
        run_workers([], 2)
    assert [worker.returncode for worker in started] == [-15, -15]


@needs_locks
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_figure_with_jobs(tmp_path: Path) -> None:
    """Both workers, and the command itself, write the whole record; the dense model is trained once."""
    options = ["figure", "semi_structured", "--smoke", "--out", str(tmp_path), "--jobs", "2"]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "semi_structured-smoke.json").read_text())
    assert set(record["summary"]["after"]) == {"magnitude + SGD", "OBS + SGD", "FLS + FishLeg"}
    assert "4 of 4 parts are there already" in result.output
    ends = sorted(path.suffix for path in tmp_path.iterdir())
    assert ends == [".json", ".png", ".pt"]


def measured(unit: dict[str, int], factor: int) -> dict[str, int]:
    return {"product": unit["seed"] * factor}


def failing(unit: dict[str, int]) -> dict[str, int]:
    raise SystemExit(3)


@pytest.mark.slow  # a process for each unit
def test_rows_of_a_benchmark_are_kept_and_measured(tmp_path: Path) -> None:
    path, said = tmp_path / "x.json", []
    path.write_text(json.dumps([{"seed": 1, "product": 10}, {"seed": 9, "product": 90}]))
    settings = [{"seed": 1}, {"seed": 2}]
    rows = run_benchmark(path, settings, measured, 10, progress=said.append)
    assert [row["product"] for row in rows] == [10, 20]
    assert rows[1]["code"].startswith("fishleg ")
    assert rows[1]["cpu_seconds"] <= rows[1]["seconds"] + 1
    assert rows[1]["peak_mib"] > 1
    assert [row["seed"] for row in json.loads(path.read_text())] == [1, 9, 2]  # no row is lost
    assert said[0] == "1 of 2 parts are there already"
    again = run_benchmark(path, [{"seed": 1}], measured, 3, again=True, progress=said.append)
    assert again[0]["product"] == 3
    assert len(json.loads((tmp_path / "x.old1.json").read_text())) == 3
    with pytest.raises(RuntimeError, match=r"failing ended with code 3"):
        run_benchmark(path, [{"seed": 7}], failing, progress=said.append)


def test_a_damaged_file_of_rows_is_renamed(tmp_path: Path) -> None:
    path, said = tmp_path / "x.json", []
    path.write_text("[ half a fi")
    file = RowsFile(path, [{"seed": 0}])
    run_units(file, [Unit("seed=0", lambda _: {"value": 1})], said.append)
    assert said[0] == "x.json is not whole: it is x.old1.json now"
    assert file.read()["seed=0"]["value"] == 1


def test_every_unit_of_a_record_has_its_code_version(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "x.json", {"n": 3})
    (tmp_path / "x.json").write_text(json.dumps({"settings": {"n": 3}, "units": {"old": 1}}))
    file.add("new", 2)
    record = file.finish({"sum": 3})
    assert record["units"] == {"old": 1, "new": 2}
    assert list(record["code"]) == ["new"]
    assert json.loads((tmp_path / "x.json").read_text()) == record
