"""Wrong input on the command line: one clear message, a non-zero exit code, nothing written, at once."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file
from wrong_inputs import PRUNE, RUN, SENSITIVITY, WRONG_INPUTS

from fishleg.cli.commands import main
from fishleg.runs.directory import LOCK


def snapshot(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else None,
        )
        for path in folder.rglob("*")
    }


def refused(folder: Path, arguments: list[str], fragment: str) -> Result:
    """Run a command that must fail as described at the top of this file."""
    before, started = snapshot(folder), time.monotonic()
    result = CliRunner().invoke(main, arguments)
    seconds = time.monotonic() - started
    assert isinstance(result.exception, SystemExit), (result.exception, result.output)
    assert result.exit_code not in (0, None)
    assert fragment in result.output, result.output
    assert "Traceback" not in result.output
    starts = [line for line in result.output.splitlines() if line.startswith(("error:", "Error:"))]
    assert len(starts) == 1, result.output
    assert seconds < 5
    assert snapshot(folder) == before
    return result


def test_there_are_enough_cases():
    assert len(WRONG_INPUTS) >= 300
    assert len({line for line, _ in WRONG_INPUTS}) == len(WRONG_INPUTS)


@pytest.mark.parametrize(("line", "fragment"), WRONG_INPUTS, ids=[line[:70] for line, _ in WRONG_INPUTS])
def test_wrong_input(work: Path, line: str, fragment: str) -> None:
    refused(work, line.split(), fragment)


@pytest.mark.parametrize(
    ("line", "fragment"),
    [
        (f"{SENSITIVITY} --samples 8 --pattern 2:4", "0.weight"),  # judged at what the pattern allows
        ("sensitivity net.py:tiny --data data.py:loader --samples 8 --method diagonal", "2.weight"),
        (
            "eval net.py:frozen --eval-data data.py:loader",
            "accuracy",
        ),  # there is nothing to prune, and no need
        ("eval --run done", "accuracy"),
        ("eval --run unlabelled", "agreement"),  # with the dense model, not with itself
        ("inspect done", "sparsity of the prunable matrices: 50.00%"),
    ],
)
def test_valid_input_is_accepted(work: Path, line: str, fragment: str) -> None:
    before = snapshot(work)
    result = CliRunner().invoke(main, line.split())
    assert result.exit_code == 0, result.output
    assert fragment in result.output
    assert "agreement: 1.0" not in result.output
    assert snapshot(work) == before


def test_read_only_directory(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    refused(work, [*PRUNE.split(), "--out", "sub/run"], "is read-only")


def test_empty_texts(work: Path) -> None:
    refused(work, ["prune", "", "--data", "data.py:loader"], "MODEL is missing")
    refused(work, [*PRUNE.split(), "--device", ""], "device must be a text that is not empty, got ''")
    refused(work, [*PRUNE.split(), "--out", ""], "out must be a text that is not empty, got ''")
    refused(work, [*PRUNE.split(), "--exclude", ""], "exclude must not hold an empty text")
    refused(work, [*PRUNE.split(), "--weights", ""], "is a directory")


def test_a_run_that_another_process_works_on_is_left_alone(work: Path, tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    run = tmp_path / "run"
    shutil.copytree(work / "done", run)
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "status": "running"}))
    # a process of its own: one and the same may take the lock as often as it likes
    code = f"import fcntl, time; f = open({str(run / LOCK)!r}, 'w'); fcntl.lockf(f, fcntl.LOCK_EX); "
    other = subprocess.Popen(
        [sys.executable, "-c", code + "print('locked', flush=True); time.sleep(60)"], stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        refused(tmp_path, ["resume", str(run)], "another process is working on")
    finally:
        other.kill()
        other.communicate()


def test_debug_shows_where(work: Path) -> None:
    result = CliRunner().invoke(main, ["--debug", *PRUNE.split(), "--weights", "missing.pt"])
    assert result.exit_code == 1
    assert "Traceback" in result.output
    assert "error: weights: there is no file" in result.output


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-B", "-m", "fishleg", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "fragment"),
    [
        (f"{RUN} -s 90", "error: sparsity must be in (0, 1), got 90.0; for 90 % write 0.9 or 90%\n"),
        ("prune net.py:make --data data.py:ten", "error: data: label 10 is out of range"),
    ],
)
def test_in_a_process_of_its_own(work: Path, line: str, fragment: str) -> None:
    before, started = snapshot(work), time.monotonic()
    result = command(work, *line.split())
    assert time.monotonic() - started < 20  # importing torch on a busy machine; the rest is timed above
    assert result.returncode == 1
    assert fragment in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert snapshot(work) == before


@pytest.mark.slow
def test_debug_in_a_process_of_its_own(work: Path) -> None:
    result = command(work, "--debug", *PRUNE.split(), "--weights", "whole.pt")
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("error: weights:")


def test_several_processes_are_refused(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(work, PRUNE.split(), "torchrun has started 2 processes, but the command line works in one")


def test_control_characters_do_not_reach_the_terminal(work: Path, tmp_path: Path) -> None:
    path = tmp_path / "evil.safetensors"
    save_file({"a\x1b[2J": torch.zeros(2, 2)}, path, {"recipe": "\x1b]0;owned\x07"})
    result = CliRunner().invoke(main, ["inspect", str(path)])
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    assert "\x07" not in result.output
    result = refused(work, [*PRUNE.split(), "--weights", str(path)], "does not fit the model")
    assert "\x1b" not in result.output
    result = refused(work, ["prune", "net.py:\x1b[31mmake"], "")
    assert "\x1b" not in result.output
