"""The fuzzer: a few hundred inputs of each kind, and that it notices what it is there for."""

import json
import random
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from reproduction.benchmarks import fuzz, fuzz_mutators, fuzz_targets
from reproduction.command_line import main

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of much in files that are no torch files


@pytest.fixture(autouse=True)
def _float32():
    torch.set_default_dtype(torch.float32)
    fuzz_targets.network.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz.NAMES)
def test_no_input_is_neither_read_nor_refused(name: str) -> None:
    trial = fuzz.fuzz_randomly(fuzz.Trial(name), seconds=60, inputs=300)
    assert trial.findings == {}
    assert trial.inputs == 300
    assert 0 < trial.accepted < 300


@pytest.mark.parametrize("name", fuzz.NAMES)
def test_the_valid_files_are_accepted(name: str, tmp_path: Path) -> None:
    target = fuzz_targets.TARGETS[name]
    for data in target.seeds():
        target.check(data, tmp_path)
        assert target.mutate(data, random.Random(1)) == target.mutate(data, random.Random(1))


def test_checkpoints_get_a_correct_checksum(tmp_path: Path) -> None:
    """Without it, nothing behind the comparison of checksums would ever be tried."""
    data, source = fuzz_targets.checkpoint_seeds()[0], random.Random(0)
    reached = 0
    for _ in range(50):
        try:
            fuzz_targets.check_checkpoint(fuzz_mutators.mutate_checkpoint(data, source), tmp_path)
            reached += 1
        except ValueError as error:
            reached += "holds no state that" in str(error)
    assert reached > 25


def crash(_: bytes, __: Path) -> None:
    raise KeyError("planted")


def lines(_: bytes, __: Path) -> None:
    raise ValueError("two\nlines")


def slow(_: bytes, __: Path) -> None:
    time.sleep(0.02)


def large(_: bytes, __: Path) -> None:
    torch.ones(2**26).sum()


@pytest.mark.parametrize(
    ("check", "found"),
    [
        (crash, {"KeyError at nowhere": "'planted'"}),
        (lines, {"ValueError at nowhere: the message does not have one line": "two\nlines"}),
        (slow, {"TimeoutError at nowhere": "it took 0 s"}),
    ],
)
def test_what_is_planted_is_found(monkeypatch, tmp_path: Path, check, found: dict[str, str]) -> None:
    target = fuzz_targets.Target(list, check, fuzz_mutators.mutate_bytes)
    monkeypatch.setitem(fuzz_targets.TARGETS, "recipe", target)
    monkeypatch.setattr(fuzz, "HANG", 0.01)
    trial = fuzz.Trial("recipe", tmp_path)
    trial.run(b"data")
    trial.run(b"more")
    trial.close()
    assert trial.findings == found  # once each
    assert [path.read_bytes() for path in (tmp_path / "findings").iterdir()] == [b"data"]
    assert json.loads((tmp_path / fuzz.STATUS).read_text())["findings"] == found


def test_memory_is_measured(monkeypatch) -> None:
    target = fuzz_targets.Target(list, large, fuzz_mutators.mutate_bytes)
    monkeypatch.setitem(fuzz_targets.TARGETS, "recipe", target)
    monkeypatch.setattr(fuzz, "MEMORY", 2**20)
    monkeypatch.setattr(fuzz, "_peak_memory", iter([0, 2**21, 2**21]).__next__)
    trial = fuzz.Trial("recipe")
    trial.run(b"")
    trial.run(b"")
    assert trial.findings == {"MemoryError at nowhere": "it took 2,097,152 bytes"}


def test_a_model_that_changes_before_an_error_is_found(monkeypatch, tmp_path: Path) -> None:
    def careless(model, state, where) -> None:
        model.load_state_dict(state, strict=False)
        raise ValueError("too late")

    monkeypatch.setattr(fuzz_targets, "apply_weights", careless)
    state = {**fuzz_targets.network().state_dict(), "0.bias": torch.zeros(6)}
    (tmp_path / "a.safetensors").write_bytes(fuzz_targets.safetensors_bytes(state))
    with pytest.raises(fuzz_targets.Broken, match="the model was changed, and then the file was refused"):
        fuzz_targets.load_into_model(tmp_path / "a.safetensors")


@pytest.mark.slow
def test_the_command_writes_a_result_and_goes_on(tmp_path: Path) -> None:
    def call(seconds: str) -> dict[str, object]:
        flags = ["--seconds", seconds, "--only", "recipe", "-o", str(tmp_path), "--work", str(tmp_path / "w")]
        result = CliRunner().invoke(main, ["bench", "fuzz", *flags])
        assert result.exit_code == 0, result.output
        (row,) = json.loads((tmp_path / "fuzz.json").read_text())
        return row

    first = call("0.5")
    assert first["target"] == "recipe"
    assert first["findings"] == {}
    assert first["inputs"] > 10
    assert call("0.5") == first
    more = call("1.5")
    assert more["inputs"] > first["inputs"]
    assert more["seconds"] > 1.4
