"""The report is one sound, self-contained page, whatever the record of the run lacks."""

import json
import math
import os
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fishleg.report import render_report, write_report

VOID = {"meta", "br", "hr", "img", "input", "link", "wbr"}


SECTIONS = ("against sparsity", "Layers", "Predicted", "Convergence", "Training loss", "Time spent")


STAGES = (0.25, 0.5, 0.75, 0.9, 0.95, 0.98)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


NAN = math.nan


class Checker(HTMLParser):
    """Follows the tags and complains of those that do not match; collects the text of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        assert len(dict(attributes)) == len(attributes), f"{tag} has an attribute twice"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()} closes something else"

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def check(page: str) -> str:
    """The text of a page that is well formed, loads nothing and draws only at finite places."""
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    tags = {tag for tag, _ in checker.tags}
    assert not tags & {"script", "link", "img", "iframe", "object"}
    assert not {"src", "href", "onclick", "onload"} & {name for _, given in checker.tags for name in given}
    assert "url(" not in page
    assert "@import" not in page
    for tag, given in checker.tags:
        drawn = " ".join(
            v or "" for k, v in given.items() if k not in ("aria-label", "class", "title", "content")
        )
        assert not re.search(r"\b(nan|inf|None)\b", drawn), (tag, given)
        if tag == "svg":
            assert given.get("aria-hidden") or (given["role"] == "img" and given["aria-label"])
    return "".join(checker.text).replace("\u00a0", " ")


def make_layers(names: int) -> list[dict[str, Any]]:
    layers = []
    for i in range(names):
        spread = [10 ** (-7 + 0.01 * i + d) for d in (-2, -1, 0, 1, 2)]
        layer = {
            "name": f"layer{i}.conv.weight",
            "shape": [16, 16, 3, 3],
            "size": 2304,
            "sparsity": i / names,
        }
        layers.append({**layer, "reason": None, "macs": 2304 * 64, "saliency": spread})
    layers.append({"name": "bn.weight", "shape": [16], "size": 16, "sparsity": 0.0, "reason": "excluded"})
    return layers


def make_run(layers: int = 20) -> dict[str, Any]:
    return {
        "name": "resnet20.py:make",
        "status": "finished",
        "error": None,
        "command": "fishleg prune resnet20.py:make --gradual --sparsity 0.98",
        "started": "2026-01-02T03:04:05Z",
        "seconds": 123.4,
        "mode": "gradual",
        "method": "fishleg",
        "pattern": "global",
        "likelihood": "categorical",
        "metric": "accuracy",
        "higher_is_better": True,
        "metric_unit": "%",
        "dense": {"metric": 0.9175, "loss": 0.29},
        "sparse": {"metric": 0.885, "loss": 0.36},
        "sparsity": 0.98,
        "target": 0.98,
        "parameters": 272474,
        "prunable": 270896,
        "nonzero": 6996,
        "bytes_dense": 1090000,
        "bytes_sparse": 190000,
        "bytes_plain": 1090000,
        "macs_dense": 40810000,
        "macs_sparse": 2110000,
        "speed": {"dense_ms": 3.2, "sparse_ms": 3.1, "what": "dense kernels, zeros are multiplied"},
        "timing": {"estimate": 12.3, "prune": 4.0, "train": 100.0, "evaluate": 5.0, "other": 0.0},
        "environment": {"fishleg": "0.1.0", "torch": "2.9", "device": "cpu"},
        "layers": make_layers(layers),
        "warnings": ["only 512 examples"],
        "resumed": 2,
        "base": "/somewhere",
        "macs_small": None,
        "parameters_small": None,
        "bytes_small": None,
        "zero_rows_small": None,
        "total": {"predicted": 0.4, "measured": 0.5, "steps": 6, "verdict": None},
    }


def make_events(stages: tuple[float, ...] = STAGES, steps: int = 60) -> list[dict[str, Any]]:
    rng, events = random.Random(0), list[dict[str, Any]]()
    for stage, sparsity in enumerate(stages, 1):
        phase = "estimate" if stage == 1 else "refine"
        for step in range(1, steps):
            gauge = -0.8 * math.exp(-step / 9) + rng.gauss(0, 0.01)
            q = {"event": "q", "step": step, "auxiliary_loss": -step / 2, "gauge": gauge, "phase": phase}
            events.append(q)
        rise = 0.002 / (1 - sparsity) ** 1.5
        prune = {
            "event": "prune",
            "stage": stage,
            "stages": len(stages),
            "target": sparsity,
            "sparsity": sparsity,
        }
        after = {
            "predicted": rise,
            "measured": 1.3 * rise,
            "metric": 0.9175 - 0.8 * rise,
            "loss": 0.29 + rise,
        }
        events.append({**prune, **after})
        for step in range(5, 5 + steps, 5):
            loss = 0.1 + rise * math.exp(-step / 20)
            events.append(
                {"event": "train", "stage": stage, "step": step, "steps": 98, "loss": loss, "lr": 0.05}
            )
        events.append(
            {"event": "stage", "stage": stage, "sparsity": sparsity, "metric": 0.92 - 0.03 * sparsity}
        )
    events.append({"event": "rollback", "sparsity": 0.99, "metric": 0.85, "reason": "drops too far"})
    return [{**event, "time": 0.1 * i} for i, event in enumerate(events)]


def few_events() -> list[dict[str, Any]]:
    return make_events((0.5, 0.9), 6)


def record(directory: Path, run: Any = None, events: Any = None, tail: str = "") -> Path:
    (directory / "run.json").write_text(json.dumps(make_run() if run is None else run))
    lines = [json.dumps(event) for event in (make_events() if events is None else events)]
    (directory / "log.jsonl").write_text("\n".join(lines) + "\n" + tail)
    return directory


def test_a_whole_run(tmp_path: Path) -> None:
    (record(tmp_path) / "recipe.toml").write_text('[prune]\nsparsity = 0.98 # "as asked"\n')
    out = write_report(tmp_path)
    assert out == tmp_path / "report.html"
    page = out.read_text("utf-8")
    text = check(page)
    assert "http://" not in page
    assert "https://" not in page
    places = [text.index(name) for name in (*SECTIONS, "Environment", "Recipe", "Command")]
    assert places == sorted(places)
    assert text.index("File size") < text.index("only 512 examples") < places[0]
    for said in ("91.75 % → 88.50 %", "−3.25 percentage points (worse)", "98.0 %", "7.00 k", "2 min 3 s"):
        assert said in text
    for said in ("1.09 MB → 190 kB", "5.7× smaller", "Zeros alone do not make dense kernels faster"):
        assert said in text
    assert '[prune]\nsparsity = 0.98 # "as asked"\n' in text
    assert "resumed 2 times" in text
    assert "not pruned: excluded" in text
    assert "rejected trial at 99.00 % sparsity: 85.00 % (drops too far)" in text
    assert "A triangle at the edge" in text  # the collapse after pruning is off the axis
    assert "Interrupted" not in text
    assert not list(tmp_path.glob("*.tmp"))


def test_other_place_and_readable_by_others(tmp_path: Path) -> None:
    out = write_report(record(tmp_path), tmp_path / "other.html")
    assert out.exists()
    assert out.stat().st_mode & 0o044 == 0o044
    assert not (tmp_path / "report.html").exists()


def test_text_of_users_is_escaped() -> None:
    evil = '"><script>alert(1)</script>&amp;\'<b x="'
    run = make_run()
    run["layers"][0] |= {"name": evil, "shape": [evil]}
    run["layers"][1] |= {"reason": evil}
    for name in ("name", "command", "error", "metric", "metric_unit", "mode", "method", "started", "status"):
        run[name] = evil
    run |= {"warnings": [evil], "environment": {evil: evil, "fishleg": evil}, "timing": {evil: 3.0}}
    run["speed"]["what"] = evil
    events = make_events()
    for event in events:
        event["phase"] = event["reason"] = evil
    page = render_report(run, events, f"</pre>{evil}")
    text = check(page)
    assert "<script" not in page
    assert f"</pre>{evil}" in text
    assert text.count(evil) >= 12


@pytest.mark.parametrize("missing", [*make_run(), "all"])
def test_missing_keys(missing: str) -> None:
    run = {} if missing == "all" else {k: v for k, v in make_run(2).items() if k != missing}
    check(render_report(run, few_events(), ""))
    check(render_report(run, [], ""))


@pytest.mark.parametrize("value", [None, NAN, -math.inf, "text", {}, True, -1.0, 0, 10**400])
def test_values_that_are_not_numbers(value: Any) -> None:
    for key in make_run():
        check(render_report({**make_run(1), key: value}, [], ""))
    run = make_run(3)
    for layer in run["layers"]:
        layer |= {"size": value, "sparsity": value, "macs": value, "saliency": [value] * 5}
    for name in ("dense", "sparse", "timing", "speed", "total"):
        run[name] = dict.fromkeys(run[name], value)
    check(render_report(run, few_events(), ""))
    kept = ("event", "phase", "reason")
    events = [{k: v if k in kept else value for k, v in event.items()} for event in few_events()]
    check(render_report(make_run(2), events, ""))
    kinds = ("loss", "auxiliary_loss", "gauge", "predicted", "measured")
    for name in ("metric", "step", "stage", "sparsity", "time", *kinds):
        mixed = [{**e, name: value} if i % 3 and name in e else e for i, e in enumerate(few_events())]
        check(render_report(make_run(1), mixed, ""))


def test_sections_without_data_are_left_out() -> None:
    text = check(render_report({"name": "net.py:make", "status": "finished"}, [], ""))
    assert "net.py:make" in text
    for name in (*SECTIONS, "Environment", "Recipe", "Command", "File size", "Speed"):
        assert name not in text


def test_broken_lines(tmp_path: Path) -> None:
    text = check(write_report(record(tmp_path, tail='{"event": "tra')).read_text("utf-8"))
    assert "unreadable" not in text  # a run may be writing just now
    tail = '{"event": "tra\n[1]\n{"event": "unknown"}\n'
    text = check(write_report(record(tmp_path, tail=tail)).read_text("utf-8"))
    assert "log.jsonl: 1 unreadable line(s) left out" in text
    (tmp_path / "run.json").write_text('{"name": ')
    assert "run.json could not be read" in check(write_report(tmp_path).read_text("utf-8"))
    (tmp_path / "run.json").unlink()
    assert "run.json is missing" in check(write_report(tmp_path).read_text("utf-8"))
    (tmp_path / "log.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither run\.json nor log\.jsonl"):
        write_report(tmp_path)


@pytest.mark.parametrize("status", ["interrupted", "running", "failed", None])
def test_unfinished(status: str | None) -> None:
    run = make_run() | {"status": status, "error": "RuntimeError: <broken>", "sparse": None, "seconds": 60}
    events = [event for event in make_events() if event.get("stage", 0) <= 3]
    text = check(render_report(run, events, ""))
    lead = {"interrupted": "Interrupted after 1 min.", "running": "Still running after 1 min."}
    lead |= {"failed": "Failed after 1 min."}
    assert lead.get(str(status), "does not say that this run has finished") in text
    assert "reached stage 3 of 6, sparsity 75.0 % (target 98.0 %)" in text
    assert "RuntimeError: <broken>" in text
    assert "last measured: 89.75 % at 75.0 % sparsity" in text
    if status == "interrupted":  # a record that was never brought up to date knows less than the log
        assert "after 2 min" in check(render_report(run, [*events, {"event": "q", "time": 120.0}], ""))


def test_many_layers() -> None:
    run = make_run(150)
    run["layers"][7]["name"] = "transformer.encoder.layer.7.attention.output.dense.weight"
    page = render_report(run, [], "")
    text = check(page)
    assert 'class="scroll layers long"' in page
    assert "Layers (151)" in text
    assert "layer149.conv.weight" in text
    assert run["layers"][7]["name"] in text
    assert len(page) < 500_000


def test_long_logs_stay_small() -> None:
    events = [{"event": "train", "stage": 1, "step": i, "loss": 1 / (i + 1)} for i in range(20_000)]
    events += [{"event": "q", "step": i, "gauge": 0.01, "auxiliary_loss": -1.0} for i in range(20_000)]
    page = render_report({}, events, "")
    check(page)
    assert len(page) < 150_000


def test_predictions_of_zero() -> None:
    events = make_events()
    prunings = [event for event in events if event["event"] == "prune"]
    prunings[0]["predicted"], prunings[1]["measured"], prunings[2]["measured"] = 0.0, -0.01, None
    text = check(render_report(make_run(), events, ""))
    assert "cannot show zero or less" in text
    for event in prunings:
        event["predicted"] = 0.0
    text = check(render_report(make_run(), events, ""))
    assert "dashed line" not in text


def test_metrics_of_other_kinds() -> None:
    run = make_run() | {
        "metric": "perplexity",
        "metric_unit": "",
        "higher_is_better": False,
        "mode": "one-shot",
    }
    run |= {"dense": {"metric": 20.5}, "sparse": {"metric": 19.25}}
    events: list[dict[str, Any]] = [{"event": "prune", "stage": 1, "sparsity": 0.98, "metric": 19.25}]
    events.append({"event": "stage", "stage": 1, "sparsity": 0.98, "metric": 19.25})
    text = check(render_report(run, events, ""))
    assert "20.5 → 19.2" in text
    assert "−1.25 (better)" in text
    assert "Lower is better" in text
    assert "after fine-tuning" not in text
    # without a metric the loss has to do
    text = check(render_report({"mode": "staged"}, [{"event": "prune", "sparsity": 0.5, "loss": 0.4}], ""))
    assert "Loss against sparsity" in text


def test_speed_that_was_gained() -> None:
    run = make_run() | {"speed": {"dense_ms": 3.0, "sparse_ms": 1.0, "what": "2:4 kernels"}}
    text = check(render_report(run, [], ""))
    assert "3.00× as fast" in text
    assert "Zeros alone" not in text
    assert "Zeros alone" in check(render_report(run | {"speed": None}, [], ""))


def test_a_failed_write_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = write_report(record(tmp_path))
    before = out.read_text("utf-8")

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(record(tmp_path, run={"name": "new"}))
    assert out.read_text("utf-8") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "report.html", "run.json"]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on PATH")
def test_in_a_browser(tmp_path: Path) -> None:
    """No error in the console, and no sideways scrolling of the page at the width of a phone."""
    assert CHROMIUM is not None
    run = make_run(60)
    run["layers"][0]["name"] = run["name"] = "a_very_long_name_without_any_place_to_break_it" * 3
    run["command"] = run["error"] = "x" * 500
    write_report(record(tmp_path, run=run | {"status": "failed"}))
    frames = "".join(
        f'<iframe width="{width}" height="900" src="report.html"></iframe>' for width in (390, 1280)
    )
    widths = (
        "[...document.querySelectorAll('iframe')].map(f => f.contentDocument.documentElement.scrollWidth)"
    )
    harness = tmp_path / "harness.html"
    harness.write_text(
        f"<!doctype html><style>iframe {{ border: 0 }}</style><body>{frames}<script>"
        f"onload = () => {{ document.title = 'widths ' + {widths} }}</script></body>"
    )
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += ["--disable-dev-shm-usage", "--hide-scrollbars", "--enable-logging=stderr", "--v=0"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", "--allow-file-access-from-files"]
    done = subprocess.run(
        [*command, harness.as_uri()], capture_output=True, text=True, errors="replace", timeout=60, check=True
    )
    assert "<title>widths 390,1280</title>" in done.stdout
    assert "CONSOLE" not in done.stderr


def test_a_gain_from_the_refresh_of_batchnorm_does_not_hide_a_loss() -> None:
    run = {"metric": "accuracy", "metric_unit": "%", "higher_is_better": True, "dense": {"metric": 0.74}}
    run |= {"refreshed": {"metric": 0.887}, "sparse": {"metric": 0.85}}
    page = render_report(run, [], "")
    assert "3.70 percentage points (worse), against 88.70" in page.replace("−", "").replace("\u00a0", " ")
    assert "dense with refreshed BatchNorm statistics: 88.70" in page.replace("\u00a0", " ")
