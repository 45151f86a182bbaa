"""What is shown while a run works."""

import io
import sys

import pytest
from rich.console import Console
from small_runs import QUICK_RUN

from fishleg import runs
from fishleg.cli import display
from fishleg.cli.display import Progress, duration, make_display
from fishleg.runs.recipe import make_recipe


@pytest.mark.slow
def test_all_displays_show_the_same_stages(tmp_path, capsys):
    run = runs.start(make_recipe(QUICK_RUN, {"out": "run", "sparsity": 0.5, "stages": 2}), base=tmp_path)
    run.listen(make_display("%", "accuracy", live=False))
    run.listen(make_display("%", "accuracy", sys.stdout, live=True))
    run.execute()
    shown = capsys.readouterr()
    plain, live = shown.err, shown.out
    assert "[2/2] sparsity 50.0%: accuracy" in plain
    assert "done: accuracy" in plain
    assert "50.0%" in live
    assert "accuracy" in live
    assert duration(40) == "40 s"
    assert duration(200) == "3 min"
    assert duration(7500) == "2 h 5 min"


class FakeTime:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(display, "time", fake)
    return fake


def test_a_display_needs_to_know_nothing_at_first(clock, capsys):
    shown = make_display(live=False)
    shown.event({"event": "phase", "message": "loading the model net.py:make"})
    start = {"event": "start", "metric": 0.9, "prunable": 1000, "stages": 1}
    shown.event(start | {"metric_name": "agreement", "metric_unit": "%"})
    shown.event({"event": "stage", "stage": 1, "stages": 1, "sparsity": 0.5, "metric": 0.875})
    assert capsys.readouterr().err.splitlines() == [
        "loading the model net.py:make",
        "dense agreement 90.00 %, 1,000 prunable weights, 1 stage",
        "[1/1] sparsity 50.0%: agreement 87.50 %",
    ]


def test_a_resumed_run_names_its_metric_too(capsys):
    shown = make_display(live=False)
    names = {"metric_name": "accuracy", "metric_unit": "%"}
    shown.event({"event": "resume", "sparsity": 0.25, "checkpoint": "3.ckpt", "fraction": 0.5, **names})
    shown.event({"event": "stage", "stage": 2, "stages": 2, "sparsity": 0.5, "metric": 0.875})
    assert "accuracy 87.50 %" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stages", "said"), [(1, "1 stage\n"), (2, "2 stages\n"), (None, "as many stages as it takes\n")]
)
def test_stages_are_counted_in_english(stages, said, capsys):
    make_display("%", "accuracy", live=False).event({"event": "start", "metric": 0.9, "stages": stages})
    assert capsys.readouterr().err.endswith(said)


def test_plain_counts_come_after_ten_seconds_of_silence(clock, capsys):
    shown = make_display(live=False)
    shown.event({"event": "phase", "message": "evaluating the dense model"})
    for done in range(1, 41):
        clock.now += 1.0
        shown.event({"event": "progress", "what": "evaluating the dense model", "done": done, "total": 40})
    shown.event({"event": "progress", "what": "reading", "done": 1, "total": None})
    clock.now += 10
    shown.event({"event": "progress", "what": "reading", "done": 7, "total": None})
    assert capsys.readouterr().err.splitlines() == [
        "evaluating the dense model",
        *(f"evaluating the dense model: {done} of 40 batches" for done in (10, 20, 30, 40)),
        "reading: 7 batches",
    ]


def test_the_first_count_is_shown_at_once(clock, capsys):
    shown = make_display(live=False)
    shown.event({"event": "progress", "what": "evaluating", "done": 1, "total": 1})
    assert capsys.readouterr().err == "evaluating: 1 of 1 batch\n"


def test_a_little_time_left_is_not_announced(clock, capsys):
    shown = make_display("%", "accuracy", live=False)
    stage = {"event": "stage", "stages": 4, "sparsity": 0.5, "metric": 0.9}
    for number in range(1, 5):
        clock.now += 2.0
        shown.event({**stage, "stage": number})
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(", ")[2] for line in lines] == ["about 6 s left", "about 4 s left", "", ""]


def test_the_panel_lives_before_the_run_starts(clock):
    stream = io.StringIO()
    shown = make_display(stream=stream, live=True)
    panel = Console(width=80, file=io.StringIO())

    def drawn():
        with panel.capture() as capture:
            panel.print(shown._panel())
        return capture.get()

    assert "starting" in drawn()
    assert "sparsity" not in drawn()
    shown.event({"event": "phase", "message": "loading [the model] net.py:make"})
    clock.now = 5.0
    assert "loading [the model] net.py:make" in drawn()
    assert "5 s" in drawn()  # without an event
    shown.event({"event": "progress", "what": "evaluating the dense model", "done": 12, "total": 40})
    assert "12 of 40 batches" in drawn()
    assert "━" in drawn()
    shown.event({"event": "progress", "what": "evaluating the dense model", "done": 13, "total": None})
    assert "13 batches" in drawn()
    start = {"event": "start", "metric": 0.9, "metric_name": "accuracy", "metric_unit": "%", "stages": 2}
    shown.event(start)
    assert "90.00 %" in drawn()
    assert "batches" not in drawn()
    shown.close()
    assert "evaluating the dense model" not in stream.getvalue()  # counts do not scroll


def test_the_time_left_does_not_count_the_loading(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("fishleg.cli.display.time.monotonic", lambda: now[0])
    progress = Progress()
    now[0] = 1000.0  # seconds of loading
    progress.update({"event": "start", "metric": 0.9, "prunable": 5, "stages": 10})
    now[0] += 20.0
    line = progress.update({"event": "stage", "stage": 1, "stages": 10, "sparsity": 0.1, "metric": 0.9})
    assert line is not None
    assert line.endswith("about 3 min left")
