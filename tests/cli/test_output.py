"""Standard output holds the result and nothing else; errors are shown whole; an exit is no success."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fishleg.cli.commands import main

NET = """
import os
import subprocess
import sys

import torch
from torch import nn

print("the module is imported")


class Chatty(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        print("forward")
        os.write(1, b"raw bytes\\n")
        return self.inner(x)


def make():
    subprocess.run([sys.executable, "-c", "print('a child')"], check=True)
    return Chatty()


g = torch.Generator().manual_seed(0)
x = [torch.randn(16, 8, generator=g) for _ in range(3)]


def loader():
    return [(inputs, inputs[:, :4].argmax(1)) for inputs in x]


class Lines(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 60:
            raise RuntimeError("first line\\n    second line\\nthird line")
        return x[0][0], 0


def lines():
    return torch.utils.data.DataLoader(Lines(), batch_size=4, num_workers=0)


def lines_of_a_worker():
    return torch.utils.data.DataLoader(Lines(), batch_size=4, num_workers=1)


class Leaving:
    passes = 0

    def __iter__(self):
        Leaving.passes += 1
        yield loader()[0]
        if Leaving.passes > 5:
            sys.exit(0)
        yield from loader()


def leaving():
    return Leaving()
"""

PRUNE = [
    "prune",
    "net.py:make",
    "--data",
    "net.py:loader",
    "-s",
    "50%",
    "--method",
    "magnitude",
    "--stages",
    "1",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-B", "-m", "fishleg", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_model_that_prints_does_not_spoil_the_result(folder: Path) -> None:
    done = command(folder, *PRUNE, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "finished"
    for text in ("the module is imported", "forward", "raw bytes", "a child"):
        assert text in done.stderr
    for line in (["eval", "fishleg-run"], ["eval", "--run", "fishleg-run"]):
        found = command(folder, *line, "--json")
        assert json.loads(found.stdout).keys() == {"accuracy", "loss"}, found.stderr
    assert command(folder, "prune", "--help").stdout.startswith("Usage: ")
    assert command(folder, "eval", "fishleg-run").stdout.startswith("accuracy: ")


def test_percentages_are_shares(folder: Path) -> None:
    def recipe(*flags: str) -> str:
        result = CliRunner().invoke(main, ["prune", "net.py:make", *flags, "--print-recipe"])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert recipe("-s", "90%") == recipe("-s", "0.9")
    assert recipe("--sparsities", "50%,87.5%") == recipe("--sparsities", "0.5,0.875")
    assert recipe("--floor", "10%") == recipe("--floor", "0.1")
    Path("percent.toml").write_text('[schedule]\nsparsity = "90%"\n')
    assert recipe("--recipe", "percent.toml") == recipe("-s", "0.9")


@pytest.mark.slow
@pytest.mark.parametrize("data", ["lines", "lines_of_a_worker"])
def test_an_error_of_several_lines_at_a_late_batch_is_shown_whole(folder: Path, data: str) -> None:
    done = command(folder, *PRUNE, "--eval-data", f"net.py:{data}")
    assert done.returncode == 1
    assert "batch 16" in done.stderr
    assert "RuntimeError: first line\n    second line\nthird line" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "fishleg-run").exists()


@pytest.mark.slow
def test_an_exit_of_the_loader_is_no_success(folder: Path) -> None:
    done = command(folder, *PRUNE[:3], "net.py:leaving", *PRUNE[4:])
    assert done.returncode == 1
    assert "SystemExit: 0 (net.py, line" in done.stderr
    assert "Traceback" not in done.stderr
