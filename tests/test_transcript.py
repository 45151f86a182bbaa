"""The transcript in the documentation is what its commands print, from an empty directory."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from fishleg.formats.onnx import missing_packages

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def transcript() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transcript", ROOT / "docs" / "generate_transcript.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_at_most_five_commands(transcript: ModuleType) -> None:
    assert 1 + len(transcript.COMMANDS) <= 5  # with that which installs the package
    text = transcript.PAGE.read_text("utf-8")
    assert re.findall(r"^\$ (.+)$", text, re.MULTILINE) == list(transcript.COMMANDS)


@pytest.mark.slow
@pytest.mark.skipif(
    bool(missing_packages()), reason="the transcript exports ONNX: pip install 'fishleg[onnx]'"
)
def test_the_transcript_is_what_the_commands_print(transcript: ModuleType, tmp_path: Path) -> None:
    printed = transcript.run_commands(tmp_path)
    written = transcript.PAGE.read_text("utf-8")
    found, expected = transcript.masked(transcript.page(printed)), transcript.masked(written)
    assert found == expected, "docs/transcript.md is out of date: run python docs/generate_transcript.py"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fishleg-run", "model.onnx"]
    assert (tmp_path / "fishleg-run" / "report.html").is_file()
    accuracy = re.search(r"accuracy: ([\d.]+) %", "\n".join(printed.values()))
    assert accuracy is not None
    assert float(accuracy[1]) > 95
    assert str(tmp_path) not in "".join(printed.values())


def test_what_is_masked(transcript: ModuleType) -> None:
    lines = "a 1.5e-05 b 90.0%\n[3/9] x: accuracy 99.00 %, about 3 s left\nwarning: 1\n"
    lines += "Clearly faster than the dense model: a.\n$ fishleg prune -s 0.9"
    assert transcript.masked(lines) == [
        "a # b #%",
        "[#/#] x: accuracy # %",
        "Clearly faster than the dense model: #",
        "$ fishleg prune -s 0.9",
    ]
    assert transcript.masked("dense accuracy 1") != transcript.masked("dense loss 1")
