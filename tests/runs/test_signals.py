"""Signals end a run with its state saved."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from small_runs import QUICK_RUN, go

from fishleg import runs
from fishleg.runs.events import read_events
from fishleg.runs.signals import capture_warnings


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, number):
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "fishleg", "prune", QUICK_RUN["model"], "--data", QUICK_RUN["data"]]
    command += [
        "--mode",
        "gradual",
        "--steps",
        "3000",
        "--sparsity",
        "0.5",
        "--samples",
        "16",
        "--out",
        "run",
    ]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "run/log.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (log.exists() and '"train"' in log.read_text()):
        time.sleep(0.05)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopping at the next safe point" in told
    assert f"fishleg resume {(tmp_path / 'run').resolve()}" in told
    assert "Traceback" not in told
    step = read_events(log)[-2]
    assert step["event"] == "train"
    run = runs.resume(tmp_path / "run")
    found = run.store.latest()
    assert found is not None
    assert found[1]["session"]["fine_tuner"]["step"] == step["step"]


def test_signal_handlers_stay_unchanged_outside_the_main_thread(tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(go(tmp_path, sparsity=0.5, stages=1)[1]))
    thread.start()
    thread.join()
    assert found[0]["status"] == "finished"


def test_captured_warnings_may_end_in_any_order():
    library = logging.getLogger("fishleg")
    assert library.propagate
    heard: list[str] = []
    first, second = capture_warnings(heard.append), capture_warnings(heard.append)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not library.propagate
    library.warning("only once")
    second.__exit__(None, None, None)
    assert library.propagate
    assert heard == ["only once"]
