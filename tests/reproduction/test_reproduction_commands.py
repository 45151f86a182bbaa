"""The commands of `python -m reproduction`, without the work behind them."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from reproduction import command_line, golden, tables
from reproduction.figures import init, unstructured


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(command_line.main, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def commands(group: object = command_line.main, *names: str) -> list[list[str]]:
    found = [list(names)]
    for name, command in getattr(group, "commands", {}).items():
        found += commands(command, *names, name)
    return found


@pytest.mark.parametrize("names", commands(), ids=" ".join)
def test_every_command_has_help(names: list[str]) -> None:
    code, text = invoke(*names, "--help")
    assert code == 0
    assert "..." not in text.partition("Commands:")[2], "a summary is cut off"


def test_the_command_names_its_own_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unstructured-mine.png").write_text("of another run")
    monkeypatch.setattr(unstructured, "run", lambda out, **_: None)
    code, text = invoke("figure", "unstructured", "--out", tmp_path, "--config", "a/b.toml")
    assert (code, text.split()) == (0, [str(tmp_path / "unstructured-b.png")])


@pytest.mark.parametrize("arguments", [("init", "--jobs", "2"), ("unstructured", "--smoke", "--data", "x")])
def test_options_of_the_networks_are_refused_elsewhere(arguments: tuple[str, ...]) -> None:
    code, text = invoke("figure", *arguments)
    assert code == 2
    assert f"{arguments[-2]}: for unstructured and semi_structured only, and not with --smoke" in text


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("width must be >= 8"), 1, "Error: width must be >= 8"),
        (KeyboardInterrupt(), 130, "stopped; finished parts are kept"),
    ],
)
def test_errors_are_one_line(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(init, "run", run)
    found, text = invoke("figure", "init")
    assert found == code
    assert line in text
    assert "Traceback" not in text


def test_tables_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing to fill")
    monkeypatch.setattr(tables, "outdated", lambda paths: dict.fromkeys(paths, b""))
    code, text = invoke("tables", "--check", page)
    assert code == 1
    assert f"out of date: {page}" in text
    assert page.read_text() == "nothing to fill"


def test_golden_runs_are_recorded_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    states = {"a": {"w": torch.tensor([1.0, 0.0])}, "b": {"w": torch.tensor([2.0, 0.0])}}

    def lost() -> golden.State:
        raise FileNotFoundError("no data")

    monkeypatch.setattr(golden, "runs", lambda: {**{n: lambda n=n: states[n] for n in states}, "lost": lost})
    file = tmp_path / "golden.json"
    assert invoke("golden", "record", file)[0] == 0
    code, text = invoke("golden", "compare", file)
    assert code == 0
    assert text.splitlines() == ["a: the same bits", "b: the same bits", "lost: left out, no data"]
    states["b"] = {"w": torch.tensor([3.0, 0.0])}
    code, text = invoke("golden", "compare", file)
    assert code == 1
    assert "b: other weights\n" in text
    assert "Error: other bits: b" in text
    states["a"] = {"w": torch.tensor([0.0, 1.0])}
    assert "a: other weights and masks\n" in invoke("golden", "compare", file, "--only", "a")[1]


def test_every_golden_run_has_a_hash() -> None:
    import json

    recorded = json.loads((command_line.RESULTS / "golden.json").read_text())
    assert list(golden.runs()) == list(recorded)
