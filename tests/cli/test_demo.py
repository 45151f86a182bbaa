"""The demo from beginning to end, with as few steps as possible."""

import json
from pathlib import Path

import pytest
import torch

from fishleg.cli import demo
from fishleg.cli.demo import METHODS, TARGETS, main


@pytest.fixture(autouse=True)
def single_precision() -> None:
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "GRADUAL", TARGETS)
    monkeypatch.setattr(demo, "SAMPLES", 8)
    options = ["--steps", "20", "--aux-steps", "4", "--tune-steps", "1"]
    assert main(["--out", str(tmp_path), *options]) == 0
    result = json.loads((tmp_path / "demo.json").read_text())
    for name in METHODS:
        assert [s for s, _ in result["pruning"][f"{name}, one shot"]] == list(TARGETS)
        assert [s for s, _ in result["pruning"][f"{name}, gradual"]] == list(TARGETS)
    shown = capsys.readouterr().out
    assert "gradual 95%" in shown
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    assert not list(tmp_path.glob("*.tmp"))


def test_wrong_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path), "--tune-steps", "0"])
    assert "--tune-steps must be >= 1, got 0" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path / "file" / "sub")])
    assert "cannot write to --out" in capsys.readouterr().err


def test_no_place_above_100_percent_in_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    modes = {"one shot": [(0.9, 0.0), (0.95, 1.0)], "gradual": [(0.9, 0.7), (0.95, 1.0)]}
    pruning = {f"{name}, {mode}": points for name in demo.METHODS for mode, points in modes.items()}
    demo.draw({"gauge": [(1, 0.5), (2, 0.1)], "pruning": pruning, "dense": 1.0}, tmp_path / "demo.png")
    for axis in drawn[0].axes[1:]:
        low, high = axis.get_ylim()
        assert low >= 0
        assert high <= 100
