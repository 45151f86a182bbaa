"""The list of what to do next is short, true and can be copied."""

import shlex
from pathlib import Path
from typing import Any

import killing
import pytest
import torch
from small_runs import go
from torch import nn

from fishleg.report import next_steps, render_report, short_path

FINISHED = {"status": "finished", "name": "net.py:make", "pattern": "global"}


def code_of(record: dict[str, Any], title: str, directory: str = "run") -> str:
    return dict(next_steps(record, directory))[title]


def test_the_commands_of_a_finished_run() -> None:
    steps = next_steps(FINISHED, "my run")
    commands = [code for _, code in steps if code.startswith("fishleg ")]
    assert commands == [
        "fishleg eval 'my run'",
        "fishleg export 'my run' --to model.onnx",
        "fishleg bench 'my run'",
    ]
    for _, code in steps:
        if not code.startswith("fishleg "):
            compile(code, "step", "exec")
    assert "fishleg.keep_zeros(model, optimizer)" in code_of(FINISHED, "Fine-tune it")


def test_a_run_that_has_not_finished_goes_on() -> None:
    assert next_steps(FINISHED | {"status": "interrupted"}, "a;b") == [
        ("Continue the run", f"fishleg resume {shlex.quote('a;b')}")
    ]


@pytest.mark.parametrize(
    ("name", "line", "call"),
    [
        ("net.py:make", "from net import make", "make()"),
        ("./nets/small.py:make", "from nets.small import make", "make()"),
        ("package.module:make", "from package.module import make", "make()"),
        ("my-nets/net.py:make", "import runpy", 'runpy.run_path("my-nets/net.py")["make"]()'),
        ("workload:digits", "import WORKLOADS", 'WORKLOADS["digits"].model(trained=False)'),
        ("a model of mine", "from safetensors", "make_model()"),
    ],
)
def test_how_the_model_is_built(name: str, line: str, call: str) -> None:
    code = code_of(FINISHED | {"name": name}, "Load it in Python")
    assert line in code
    assert f"model = {call}" in code
    compile(code, "step", "exec")


def test_the_code_for_a_gpu_is_only_for_two_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: the conversion is replaced, its rule for shapes is not."""
    title = "Run its 2:4 layers on a GPU"
    assert title not in dict(next_steps(FINISHED, "run"))
    code = code_of(FINISHED | {"pattern": "2:4"}, title)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64), nn.Linear(64, 10), nn.Linear(64, 32))
    with torch.no_grad():
        for layer in list(model)[:3]:
            layer.weight.view(-1, 4)[:, 2:] = 0
    converted = []

    def convert(weight: torch.Tensor) -> torch.Tensor:
        converted.append(tuple(weight.shape))
        return weight

    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", convert)
    monkeypatch.setattr(nn.Module, "cuda", lambda self: self)
    exec(code, {"model": model})
    assert converted == [(32, 64)]  # not the one of other sizes, not the one that is dense


def test_the_code_for_a_run_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that the code loads is the one that the run has ended with."""
    run, record = go(tmp_path, sparsity=0.5, stages=1)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for title, code in next_steps(record, "run"):
        if not code.startswith("fishleg "):
            exec(code, names)
            for name, value in run.model.state_dict().items():
                assert torch.equal(names["model"].state_dict()[name], value), title
    weight = names["model"].get_parameter("5.weight")
    zeros = weight == 0
    for x, y in killing.loader():
        names["optimizer"].zero_grad()
        nn.functional.cross_entropy(names["model"](x.to(weight)), y).backward()
        names["optimizer"].step()
    assert bool(zeros.any())
    assert bool((weight[zeros] == 0).all())
    assert not torch.equal(weight, run.model.get_parameter("5.weight"))


def test_the_code_for_rows_loads_the_smaller_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, record = go(tmp_path, sparsity=0.3, stages=1, pattern="rows")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for _, code in next_steps(record, "run"):
        if not code.startswith("fishleg "):
            exec(code, names)
    model = names["model"].eval()
    assert sum(p.numel() for p in model.parameters()) == record["parameters_small"] < record["parameters"]
    x, _ = next(iter(killing.loader()))
    x = x.to(model[0].weight)
    torch.testing.assert_close(model(x), run.model.eval()(x))


def test_the_section_of_the_report() -> None:
    run = FINISHED | {"base": "/home/someone/work"}
    page = render_report(run, [], "", Path("/home/someone/work/out/run <1>"))
    assert "<h2>What next</h2>" in page
    assert "fishleg eval &#x27;out/run &lt;1&gt;&#x27;" in page
    assert "For use in the directory /home/someone/work." in page
    assert "--pattern 2:4" in page
    assert "fishleg eval /elsewhere" in render_report(run, [], "", Path("/elsewhere"))
    assert "What next" not in render_report(run, [], "")  # the directory is not known
    undecodable = Path("/home/someone/work/caf\udce9")
    assert "fishleg eval &#x27;caf?&#x27;" in render_report(run, [], "", undecodable)


def test_short_paths(tmp_path: Path) -> None:
    assert short_path(tmp_path / "a" / "b", tmp_path) == "a/b"
    assert short_path(tmp_path, tmp_path / "a") == str(tmp_path)
