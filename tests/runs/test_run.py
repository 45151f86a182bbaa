"""A run and what it leaves behind."""

import json

import pytest
import torch
from click.testing import CliRunner
from killing import loader, make_model
from small_runs import OPTIONS, QUICK_RUN, StopAfterFirstStage, batches, go
from torch import nn

from fishleg import runs
from fishleg.cli.commands import main
from fishleg.formats.packed import unpack
from fishleg.report import render_report
from fishleg.runs.directory import read_record
from fishleg.runs.errors import Interrupted
from fishleg.runs.events import read_events
from fishleg.runs.inspection import evaluate_run, inspect_path
from fishleg.runs.recipe import make_recipe
from fishleg.runs.sources import Data


def test_a_model_that_is_sparser_already_is_refused_before_anything_is_written(tmp_path):
    model = make_model()
    for p in model.parameters():
        if p.dim() > 1:
            p.data[p.abs() < p.abs().flatten().quantile(0.8)] = 0
    with pytest.raises(ValueError, match=r"a sparsity of 0\.5 .* removes nothing: 0\.\d+ of the prunable"):
        runs.start(make_recipe(QUICK_RUN, {"out": "run", "sparsity": 0.5}), base=tmp_path, model=model)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_whole_rows_are_cut_out_of_the_model_that_is_left_behind(tmp_path, capsys):
    run, record = go(tmp_path, sparsity=0.5, pattern="rows")
    small = run.directory / "small.safetensors"
    assert small.stat().st_size == record["bytes_small"] < record["bytes_plain"]
    assert record["parameters_small"] < record["nonzero"]  # columns that read removed rows go, too
    assert record["speed"]["what"].endswith("removed rows cut out")
    report = (run.directory / "report.html").read_text()
    assert "small.safetensors" in report
    assert "the same kernels and shapes" not in report
    flags = ["--weights", str(small), "--eval-data", QUICK_RUN["data"], "--json"]
    result = CliRunner().invoke(main, ["eval", QUICK_RUN["model"], *flags])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["accuracy"] == record["sparse"]["metric"]
    other = ["eval", "workload:digits", "--weights", str(small)]
    result = CliRunner().invoke(main, other)
    assert result.exit_code != 0
    assert "does not fit the model: the state is that of another model" in result.output


def written_sizes():
    """A model that cannot do without its rows."""

    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = nn.Linear(16, 12), nn.Linear(12, 3)

        def forward(self, x):
            return self.last(torch.relu(self.inner(x.flatten(1))).view(-1, 12))

    torch.manual_seed(0)
    return Written()


def test_a_model_that_cannot_be_cut_down_gives_a_warning(tmp_path):
    recipe = make_recipe(QUICK_RUN, {"out": "run", "pattern": "rows", "sparsity": 0.5})
    run = runs.start(recipe, base=tmp_path, model=written_sizes())
    record = run.execute()
    assert not (run.directory / "small.safetensors").exists()
    assert any("small.safetensors is not written, removed rows stay" in w for w in record["warnings"])
    assert record["status"] == "finished"


@pytest.mark.slow
def test_a_run_leaves_everything_behind(tmp_path):
    run, record = go(tmp_path, sparsity=0.8)
    names = {path.name for path in run.directory.iterdir()}
    assert names >= {
        "run.json", "recipe.toml", "log.jsonl", "log.csv", "model.safetensors", "packed.safetensors",
        "report.html",
    }  # fmt: skip
    assert record["status"] == "finished"
    zeros = sum(int((run.model.get_parameter(n) == 0).sum()) for n in run.surgeon.weights.names)
    assert zeros == round(0.8 * record["prunable"])
    from safetensors.torch import load_file

    plain = make_model()
    plain.load_state_dict(load_file(run.directory / "model.safetensors"))
    packed = unpack(load_file(run.directory / "packed.safetensors"))
    assert all(torch.equal(packed[name], value) for name, value in plain.state_dict().items())
    assert evaluate_run(run.directory)["accuracy"] == record["sparse"]["metric"]
    kinds = [event["event"] for event in read_events(run.directory / "log.jsonl")]
    assert kinds.count("prune") == kinds.count("stage") == 3
    assert (run.directory / "log.csv").read_text().count("\n") == len(kinds) + 1
    facts = inspect_path(run.directory)
    assert facts.sparsity == pytest.approx(0.8, abs=1e-3)
    assert facts.made["method"] == "fishleg"
    assert "finished" in facts.table()
    assert json.loads(json.dumps(facts.as_dict()))["tensors"]
    again = render_report(record, read_events(run.directory / "log.jsonl"), "x = 1")
    assert "80" in again


@pytest.mark.slow
def test_a_run_takes_python_objects_instead_of_names(tmp_path):
    model, data = make_model(), Data(loader(), None, loader())
    options = {"model": "mine", "samples": 16, "sub_batch": 8, "sparsity": 0.6, "stages": 2, "out": "run"}

    with pytest.raises(Interrupted, match="fishleg resume"):
        runs.start(
            make_recipe(options), model=model, data=data, base=tmp_path, listeners=[StopAfterFirstStage()]
        ).execute()
    assert read_record(tmp_path / "run")["status"] == "interrupted"
    other = make_model()
    record = runs.resume(tmp_path / "run", model=other, data=Data(loader(), None, loader())).execute()
    assert record["resumed"] == 1
    undisturbed = make_model()
    runs.start(
        make_recipe({**options, "out": "two"}),
        model=undisturbed,
        data=Data(loader(), None, loader()),
        base=tmp_path,
    ).execute()
    for name, value in undisturbed.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])


def test_lagging_statistics_of_batchnorm_are_told_and_do_not_hide_a_drop(tmp_path):
    model = make_model()
    model[1].running_mean += 2.0
    options = {**OPTIONS, "sparsities": None, "max_drop": "2%", "stages": 4, "batchnorm_batches": 3}
    options.pop("sparsities")
    run = runs.start(make_recipe(options), model=model, data=Data(batches(), None, batches()), base=tmp_path)
    record = run.execute()
    assert record["refreshed"]["metric"] > record["dense"]["metric"] + 0.05
    assert record["refreshed"]["metric"] - record["sparse"]["metric"] <= 0.02 + 1e-9
    told = [text for text in record["warnings"] if "the statistics lag behind the weights" in text]
    assert len(told) == 1
    assert "dense with refreshed BatchNorm statistics" in (tmp_path / "run/report.html").read_text()
