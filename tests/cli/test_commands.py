"""What the commands print."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from small_runs import QUICK_RUN

import fishleg
from fishleg.cli.commands import main
from fishleg.cli.doctor import diagnose


@pytest.mark.slow
def test_commands_print_what_scripts_want(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()

    def call(*arguments):
        result = runner.invoke(main, [str(a) for a in arguments])
        assert result.exit_code == 0, result.output
        if "--quiet" in arguments:  # no progress, but what the user must know
            assert result.stderr.splitlines() == [
                "warning: the accuracy is measured on the calibration data; name data that the model has not "
                "seen (eval_data) to know what pruning really costs"
            ]
        return result.stdout

    flags = ["--data", QUICK_RUN["data"], "--samples", 16, "--sub-batch", 8]
    record = json.loads(
        call("prune", QUICK_RUN["model"], *flags, "-s", 0.5, "--stages", 2, "--json", "--quiet", "-o", "r")
    )
    assert record["sparsity"] == pytest.approx(0.5, abs=1e-3)
    assert "accuracy" in json.loads(call("eval", "--run", "r", "--json"))
    matrices = [t for t in json.loads(call("inspect", "r", "--json"))["tensors"] if len(t["shape"]) > 1]
    assert sum(t["size"] - t["kept"] for t in matrices) == sum(t["size"] for t in matrices) / 2
    assert "packed size" in call("inspect", "r/packed.safetensors")
    assert json.loads(call("sensitivity", QUICK_RUN["model"], *flags, "--json"))["judged_at"] == 0.9
    assert {entry["what"] for entry in json.loads(call("doctor", "--json"))} == {
        e["what"] for e in diagnose()
    }
    text = call(
        "prune",
        QUICK_RUN["model"],
        *flags,
        "--print-recipe",
        "--pattern",
        "2:4",
        "--exclude",
        "a",
        "--exclude",
        "b",
    )
    Path("recipe.toml").write_text(text)
    assert call("prune", "--recipe", "recipe.toml", "--print-recipe") == text
    assert runner.invoke(main, ["inspect", "r", "--pattern", "2:4"]).exit_code == 1
    table = call(
        "compare",
        QUICK_RUN["model"],
        *flags,
        "-s",
        0.5,
        "--stages",
        1,
        "--methods",
        "magnitude,kfac",
        "-o",
        "c",
    )
    assert "kfac" in table


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.output == f"fishleg, version {fishleg.__version__}\n"


@pytest.mark.slow
def test_a_comparison_uses_the_empirical_fisher_where_a_method_knows_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = f"compare {QUICK_RUN['model']} --data {QUICK_RUN['data']} --samples 16 -s 0.5 --stages 1"
    line += " --methods kfac,diagonal --empirical -o c"
    result = CliRunner().invoke(main, line.split())
    assert result.exit_code == 0, result.output
    for method, empirical in (("kfac", "false"), ("diagonal", "true")):
        text = Path(f"c/{method}/recipe.toml").read_text()
        assert f"empirical = {empirical}" in text
        assert f'method = "{method}"' in text
