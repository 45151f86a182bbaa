"""Runs as a user sees them: budgets, files, interruptions, refusals; the command line on top."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from killing import in_child, loader, make_model
from torch import nn

from fishleg import Surgeon
from fishleg.cli.commands import main
from fishleg.cli.display import duration, make_display
from fishleg.cli.doctor import diagnose
from fishleg.formats.packed import pack, unpack
from fishleg.report import render_report
from fishleg.runs import run as runs
from fishleg.runs.budgets import Plan, count_macs
from fishleg.runs.compare import compare_methods
from fishleg.runs.directory import locked, read_record
from fishleg.runs.errors import Interrupted, ToolError
from fishleg.runs.events import read_events
from fishleg.runs.inspection import evaluate_run, inspect_path
from fishleg.runs.metrics import Evaluator
from fishleg.runs.recipe import make_recipe
from fishleg.runs.sensitivity import sensitivity
from fishleg.runs.sources import Data

QUICK = {"model": "killing:make_model", "data": "killing:loader", "samples": 16, "sub_batch": 8, "stages": 3}


@pytest.fixture(autouse=True)
def _float32():
    torch.set_default_dtype(torch.float32)


def go(tmp_path: Path, **options):
    run = runs.start(make_recipe(QUICK, {"out": "run"}, options), base=tmp_path)
    return run, run.execute()


def test_a_model_that_is_sparser_already_is_refused_before_anything_is_written(tmp_path):
    model = make_model()
    for p in model.parameters():
        if p.dim() > 1:
            p.data[p.abs() < p.abs().flatten().quantile(0.8)] = 0
    with pytest.raises(ValueError, match=r"a sparsity of 0\.5 .* removes nothing: 0\.\d+ of the prunable"):
        runs.start(make_recipe(QUICK, {"out": "run", "sparsity": 0.5}), base=tmp_path, model=model)
    assert not (tmp_path / "run").exists()


def test_whole_rows_are_cut_out_of_the_model_that_is_left_behind(tmp_path, capsys):
    run, record = go(tmp_path, sparsity=0.5, pattern="rows")
    small = run.directory / "small.safetensors"
    assert small.stat().st_size == record["bytes_small"] < record["bytes_plain"]
    assert record["parameters_small"] < record["nonzero"]  # columns that read removed rows go, too
    assert record["speed"]["what"].endswith("removed rows cut out")
    report = (run.directory / "report.html").read_text()
    assert "small.safetensors" in report
    assert "the same kernels and shapes" not in report
    flags = ["--weights", str(small), "--eval-data", QUICK["data"], "--json"]
    result = CliRunner().invoke(main, ["eval", QUICK["model"], *flags])
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


def test_a_model_that_cannot_be_cut_down_is_told(tmp_path):
    recipe = make_recipe(QUICK, {"out": "run", "pattern": "rows", "sparsity": 0.5})
    run = runs.start(recipe, base=tmp_path, model=written_sizes())
    record = run.execute()
    assert not (run.directory / "small.safetensors").exists()
    assert any("no small.safetensors, removed rows stay" in w for w in record["warnings"])
    assert record["status"] == "finished"


def test_a_run_leaves_everything_behind(tmp_path):
    run, record = go(tmp_path, sparsity=0.8)
    names = {path.name for path in run.directory.iterdir()}
    assert names >= {
        "run.json", "recipe.toml", "log.jsonl", "log.csv", "model.safetensors", "packed.safetensors",
        "report.html",
    }  # fmt: skip
    assert record["status"] == "finished"
    zeros = sum(int((run.model.get_parameter(n) == 0).sum()) for n in run.surgeon.prunable)
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


def test_max_drop_finds_the_largest_sparsity_that_fits(tmp_path):
    run, record = go(tmp_path, max_drop="10%", stages=5)
    assert run.plan is not None
    assert record["dense"]["metric"] - record["sparse"]["metric"] <= 0.1
    assert run.plan.bad is not None
    assert run.plan.good < run.plan.bad
    assert record["sparsity"] == pytest.approx(run.plan.good, abs=2e-3)
    assert any(event["event"] == "rollback" for event in read_events(run.directory / "log.jsonl"))


def test_nothing_pruned_is_an_error(tmp_path):
    with pytest.raises(ToolError, match="nothing was pruned"):
        go(tmp_path, max_drop=1e-9, stages=1, metric="killing:minus_zeros")
    assert read_record(tmp_path / "run")["status"] == "failed"


def test_max_params_and_max_flops_are_kept(tmp_path):
    _, record = go(tmp_path, max_params=500)
    assert record["nonzero"] <= 500
    assert record["nonzero"] >= 495
    for exchanges in (0, 12):
        _, record = go(tmp_path, max_flops="30%", exchanges=exchanges, out=f"exchanges-{exchanges}")
        assert 0.25 * record["macs_dense"] <= record["macs_sparse"] <= 0.3 * record["macs_dense"]


def test_macs_are_counted_per_example():
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(48, 5))
    macs = count_macs(model, torch.randn(7, 2, 4, 4), lambda m, x: m(x))
    assert macs == {"0.weight": 16 * 3 * 2 * 9, "2.weight": 48 * 5}
    sequence = nn.Linear(4, 6)
    assert count_macs(sequence, torch.randn(2, 9, 4), lambda m, x: m(x)) == {"weight": 9 * 24}


def test_a_plan_brackets_the_limit():
    plan = Plan([0.5, 0.8, 0.9, 0.95], max_drop=0.05, precision=0.01)
    tried = []
    while (target := plan.next(lambda s: s**4)) is not None:
        tried.append(target)
        plan.result(target, 0.0 if target < 0.5 else (target - 0.5) ** 2)  # the limit is 0.7236
    assert plan.good <= 0.7237 <= (plan.bad or 1)
    assert (plan.bad or 1) - plan.good <= 0.01
    assert len(tried) <= 12


def test_a_plan_takes_up_again_what_a_long_step_could_not_reach():
    plan = Plan([0.5, 0.9, 0.95], max_drop=0.01, precision=0.01)
    before = 0.0
    while (target := plan.next(lambda s: s**4)) is not None:
        # steps of more than 0.1 fail, and so does everything above 0.93; a drop of exactly the limit is fine
        fails = target - before > 0.6 * (1 - before) or target > 0.93
        if plan.result(target, 0.02 if fails else 0.1 - 0.09):
            before = target
    assert 0.92 <= plan.good <= 0.93


def test_a_second_run_refuses_to_overwrite(tmp_path):
    go(tmp_path, sparsity=0.5, stages=1)
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(ToolError, match="holds a run already"):
        go(tmp_path, sparsity=0.5)
    with pytest.raises(ToolError, match="nothing to resume"):
        runs.resume(tmp_path / "run")
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}


def test_two_processes_do_not_share_a_run(tmp_path):
    run = runs.start(make_recipe(QUICK, {"out": "run", "sparsity": 0.5}), base=tmp_path)
    run.directory.mkdir()

    def second() -> None:
        with pytest.raises(ToolError, match="another process"):
            run.execute()

    with locked(run.directory / "lock"):
        assert in_child(second) == 0
    assert not (run.directory / "run.json").exists()


def test_objects_in_hand_instead_of_names(tmp_path):
    model, data = make_model(), Data(loader(), None, loader())
    options = {"model": "mine", "samples": 16, "sub_batch": 8, "sparsity": 0.6, "stages": 2, "out": "run"}

    class Stop:
        def event(self, event):
            if event["event"] == "stage":
                raise KeyboardInterrupt

        def close(self):
            pass

    with pytest.raises(Interrupted, match="fishleg resume"):
        runs.start(make_recipe(options), model=model, data=data, base=tmp_path, listeners=[Stop()]).execute()
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


def test_without_labels_agreement_is_measured(tmp_path):
    inputs = [x for x, _ in loader()]
    options = {"model": "mine", "samples": 16, "sub_batch": 8, "sparsity": 0.5, "stages": 2, "out": "run"}
    record = runs.start(make_recipe(options), model=make_model(), data=Data(inputs), base=tmp_path).execute()
    assert record["metric"] == "agreement"
    assert record["dense"] == {"metric": 1.0, "loss": None}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, number):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.path.dirname(__file__)}
    command = [sys.executable, "-m", "fishleg", "prune", QUICK["model"], "--data", QUICK["data"]]
    command += [
        "--mode",
        "gradual",
        "--steps",
        "3000",
        "--sparsity",
        "0.5",
        "--samples",
        "16",
        "--out",
        "run",
    ]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "run/log.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (log.exists() and '"train"' in log.read_text()):
        time.sleep(0.05)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopping at the next safe point" in told
    assert f"fishleg resume {(tmp_path / 'run').resolve()}" in told
    assert "Traceback" not in told
    step = read_events(log)[-2]
    assert step["event"] == "train"
    run = runs.resume(tmp_path / "run")
    found = run.store.latest()
    assert found is not None
    assert found[1]["gradual"]["step"] == step["step"]


def test_signals_stay_the_owners_outside_the_main_thread(tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(go(tmp_path, sparsity=0.5, stages=1)[1]))
    thread.start()
    thread.join()
    assert found[0]["status"] == "finished"


def test_compare_goes_on_and_ranks(tmp_path):
    recipe = make_recipe(QUICK, {"out": "cmp", "sparsity": 0.7, "stages": 2})
    first = compare_methods(recipe, ["magnitude", "fishleg"], tmp_path)
    assert (tmp_path / "cmp/comparison.png").is_file()
    times = (tmp_path / "cmp/fishleg/run.json").stat().st_mtime
    again = compare_methods(recipe, ["magnitude", "fishleg"], tmp_path)
    assert (tmp_path / "cmp/fishleg/run.json").stat().st_mtime == times
    assert again.as_dict() == first.as_dict()
    lines = first.table().splitlines()
    assert len(lines) == 4
    with pytest.raises(ToolError, match="other options"):
        compare_methods(make_recipe(QUICK, {"out": "cmp", "sparsity": 0.6}), ["magnitude"], tmp_path)


def test_sensitivity_is_what_pruning_each_layer_alone_is_predicted_to_cost(tmp_path):
    model = make_model()
    surgeon = Surgeon(model, loader(), samples=16, sub_batch=8)
    found = sensitivity(surgeon, 0.7, (0.5,))
    assert found.grid == (0.5, 0.7)
    for name in surgeon.prunable:
        alone = Surgeon(make_model(), loader(), include=[f"^{name}$"], samples=16)
        assert surgeon.inverse is not None
        step = alone.prune(0.7, inverse=surgeon.inverse)
        assert found.loss_at(name) == pytest.approx(step.predicted, rel=1e-5)
    found.draw(tmp_path / "s.png")
    assert (tmp_path / "s.png").stat().st_size > 1000
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), make_model().parameters(), strict=True))


def test_packing_is_lossless_and_small():
    dense = torch.randn(30, 11)
    sparse = dense * (torch.rand(30, 11) < 0.1)
    state = {
        "dense": dense,
        "sparse": sparse,
        "half": sparse.bfloat16(),
        "count": torch.tensor(3),
        "none": sparse[:0],
    }
    back = unpack(pack(state))
    assert back.keys() == state.keys()
    assert all(
        torch.equal(back[name], value) and back[name].dtype == value.dtype for name, value in state.items()
    )
    assert sum(t.nbytes for n, t in pack(state).items() if n.startswith("sparse")) < 0.25 * sparse.nbytes
    assert unpack(state) == state


def test_evaluator_measures_what_it_says():
    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(3))
    x = torch.eye(3).repeat(2, 1)
    y = torch.tensor([0, 1, 2, 0, 1, 1])
    from fishleg import Categorical, Gaussian

    accuracy = Evaluator([(x[:4], y[:4]), (x[4:], y[4:])], Categorical())
    assert accuracy(model).metric == pytest.approx(5 / 6)
    assert accuracy.shown(5 / 6) == "83.33 %"
    squared = Evaluator([(x, x + 2)], Gaussian())
    assert (squared.name, squared.higher_is_better) == ("mse", False)
    assert squared(model).metric == pytest.approx(4)
    assert squared.drop(2.0, 2.2) == pytest.approx(0.1)
    custom = Evaluator([(x, y)], Categorical(), custom=lambda m, loader: 7)
    assert custom(model).metric == 7
    assert custom.drop(50, 49) == pytest.approx(0.02)  # relative: nobody knows its unit


def test_displays_tell_the_same_story(tmp_path, capsys):
    run = runs.start(make_recipe(QUICK, {"out": "run", "sparsity": 0.5, "stages": 2}), base=tmp_path)
    run.listen(make_display("%", "accuracy", live=False))
    run.listen(make_display("%", "accuracy", sys.stdout, live=True))
    run.execute()
    plain, live = capsys.readouterr().err, capsys.readouterr().out
    assert "[2/2] sparsity 50.0%: accuracy" in plain
    assert "done: accuracy" in plain
    assert live == ""  # taken by the first readouterr
    assert duration(40) == "40 s"
    assert duration(200) == "3 min"
    assert duration(7500) == "2 h 5 min"


def test_sparsity_counts_prunable_matrices_without_zeros(tmp_path):
    from safetensors.torch import save_file

    state = {"a": torch.tensor([[0.0, 1.0]]), "b": torch.ones(1, 2), "c": torch.ones(1, 2)}
    save_file(state, tmp_path / "model.safetensors")
    alone = inspect_path(tmp_path / "model.safetensors")
    assert (alone.sparsity, alone.sparsity_of) == (0.5, "matrices that have zeros")
    layers = [{"name": name, "reason": "frozen" if name == "c" else None} for name in state]
    (tmp_path / "run.json").write_text(json.dumps({"status": "finished", "layers": layers}))
    of_run = inspect_path(tmp_path)
    assert (of_run.sparsity, of_run.sparsity_of) == (0.25, "prunable matrices")


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

    flags = ["--data", QUICK["data"], "--samples", 16, "--sub-batch", 8]
    record = json.loads(
        call("prune", QUICK["model"], *flags, "-s", 0.5, "--stages", 2, "--json", "--quiet", "-o", "r")
    )
    assert record["sparsity"] == pytest.approx(0.5, abs=1e-3)
    assert "accuracy" in json.loads(call("eval", "--run", "r", "--json"))
    matrices = [t for t in json.loads(call("inspect", "r", "--json"))["tensors"] if len(t["shape"]) > 1]
    assert sum(t["size"] - t["kept"] for t in matrices) == sum(t["size"] for t in matrices) / 2
    assert "packed it takes" in call("inspect", "r/packed.safetensors")
    assert json.loads(call("sensitivity", QUICK["model"], *flags, "--json"))["judged_at"] == 0.9
    assert {entry["what"] for entry in json.loads(call("doctor", "--json"))} == {
        e["what"] for e in diagnose()
    }
    text = call(
        "prune",
        QUICK["model"],
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
        "compare", QUICK["model"], *flags, "-s", 0.5, "--stages", 1, "--methods", "magnitude,kfac", "-o", "c"
    )
    assert "kfac" in table


def test_trackers_hear_the_same_events(tmp_path, monkeypatch):
    """Weights & Biases through its own names, of which only three are used."""
    heard = []

    class Fake:
        def log(self, values):
            heard.append(values)

        def finish(self):
            heard.append("finished")

    module = types.ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.init = lambda **options: heard.append(options) or Fake()
    monkeypatch.setitem(sys.modules, "wandb", module)
    run, _ = go(tmp_path, sparsity=0.5, stages=1, wandb="my-project")
    assert heard[0]["project"] == "my-project"
    assert heard[0]["config"]["target"]["sparsity"] == 0.5
    assert heard[-1] == "finished"
    stages = [values for values in heard[1:-1] if "stage/metric" in values]
    assert stages[0]["stage/sparsity"] == run.surgeon.sparsity
