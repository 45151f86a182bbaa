"""Nothing goes wrong without a word: data that are not finite, exits in user code, changes."""

import json
import sys
import xml
from pathlib import Path

import pytest
import torch
from killing import loader, make_model
from small_runs import QUICK_RUN
from torch import nn

from fishleg import Categorical, runs
from fishleg.formats import checkpoint
from fishleg.runs.directory import RECIPE, RUN, read_record
from fishleg.runs.errors import ToolError
from fishleg.runs.metrics import Evaluator, NonFiniteOutputs
from fishleg.runs.recipe import make_recipe
from fishleg.runs.sources import Data, untrusted_code

OPTIONS = {
    "model": "mine", "samples": 16, "sub_batch": 8, "sparsities": [0.3, 0.6], "out": "run",
    "method": "magnitude",
}  # fmt: skip


class StopAfterFirstStage:
    def event(self, event):
        if event["event"] == "stage":
            raise KeyboardInterrupt

    def close(self):
        pass


def batches(count: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    x = [torch.randn(8, 1, 4, 4, generator=generator) for _ in range(count)]
    return [(inputs, inputs.flatten(1)[:, :3].argmax(1)) for inputs in x]


# -- evaluation


@pytest.mark.parametrize("custom", [False, True])
def test_a_late_batch_with_nan_is_named(custom):
    data = batches()
    data[4][0][0, 0, 0, 0] = float("nan")

    def metric(model, loader):
        return sum(float(model(x).sum()) for x, _ in loader)

    evaluator = Evaluator(data, Categorical(), custom=metric if custom else None)
    with pytest.raises(ToolError, match="batch 5 of the data to evaluate on holds NaN in its inputs"):
        evaluator(make_model())


def test_infinities_are_told_where_they_reach_the_outputs():
    data = batches()
    data[3][0][0, 0, 0, 0] = float("inf")
    with pytest.raises(NonFiniteOutputs, match=r"batch 4 .* not finite \(NaN or Inf\); the batch holds Inf"):
        Evaluator(data, Categorical())(make_model())


class Masked(nn.Module):
    """Attention with a mask of −inf, which is how torch writes it."""

    def __init__(self):
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(4, 1, batch_first=True), nn.Linear(4, 3)

    def forward(self, x, mask):
        return self.last(self.attention(x, x, x, attn_mask=mask[0])[0].mean(1))


def test_minus_infinity_in_a_mask_is_fine():
    mask = torch.full((8, 5, 5), float("-inf")).triu(1)
    data = [{"x": torch.randn(8, 5, 4), "mask": mask, "labels": torch.zeros(8, dtype=torch.long)}]
    assert 0 <= Evaluator(data, Categorical())(Masked()).metric <= 1


def test_a_metric_of_ones_own_may_have_targets_with_nan():
    data = [(x, torch.full((8,), float("nan"))) for x, _ in batches()]
    assert (
        Evaluator(data, Categorical(), custom=lambda model, loader: len(list(loader)))(make_model()).metric
        == 6
    )


class NaNAtSix(nn.Module):
    """Outputs NaN where the first input is above a bound."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 3)

    def forward(self, x):
        x = x.flatten(1)
        return self.inner(x) + torch.where(x[:, :1] > 100, torch.nan, 0.0)


@pytest.mark.parametrize("custom", [False, True])
def test_late_outputs_that_are_not_finite_are_named(custom):
    data = batches()
    data[5][0][0, 0, 0, 0] = 1000.0

    def metric(model, loader):
        return sum(float(model(x).nan_to_num().sum()) for x, _ in loader)

    evaluator = Evaluator(data, Categorical(), custom=metric if custom else None)
    match = (
        "outputs hold NaN" if custom else "batch 6 of the data to evaluate on: the model's outputs are not"
    )
    with pytest.raises(NonFiniteOutputs, match=match):
        evaluator(NaNAtSix())


def test_a_late_batch_that_the_model_cannot_be_called_on_is_named():
    data = [*batches(), (torch.zeros(8, 1, 3, 3), torch.zeros(8, dtype=torch.long))]
    with pytest.raises(ToolError, match="batch 7 of the data to evaluate on: the model cannot be called"):
        Evaluator(data, Categorical())(make_model())


def test_progress_is_told_batch_by_batch():
    evaluator, heard = Evaluator(batches(), Categorical(), most_batches=4), []
    evaluator.on_batch = lambda done, total: heard.append((done, total))
    evaluator(make_model())
    assert heard == [(1, 4), (2, 4), (3, 4), (4, 4)]


# -- user code that ends the process


class Odd(BaseException):
    """An exception that is no Exception."""


@pytest.mark.parametrize("kind", [Odd, GeneratorExit, SystemExit])
def test_whatever_user_code_raises_is_an_error_with_a_status(tmp_path, kind):
    calls = 0

    def score(model, loader):
        nonlocal calls
        calls += 1
        if calls > 2:
            raise kind("text")
        return 1.0

    run = runs.start(make_recipe(OPTIONS), model=make_model(), data=Data(batches()), base=tmp_path)
    run.evaluator.custom = score
    with pytest.raises(ToolError, match=f"the work was ended by {kind.__name__}: text"):
        run.execute()
    assert read_record(tmp_path / "run")["status"] == "failed"


class Leaves:
    """A loader that calls sys.exit(0) at its n-th pass."""

    def __init__(self, at: int) -> None:
        self.at, self.passes = at, 0

    def __iter__(self):
        self.passes += 1
        for place, batch in enumerate(batches()):
            if self.passes >= self.at and place == 1:
                sys.exit(0)
            yield batch


def test_an_exit_in_the_loader_is_an_error(tmp_path):
    passes = Leaves(10**9)
    runs.start(make_recipe(OPTIONS), model=make_model(), data=Data(passes), base=tmp_path).execute()
    found = []
    for at in range(1, passes.passes + 1):
        out = f"run-{at}"
        recipe, data = make_recipe({**OPTIONS, "out": out}), Data(Leaves(at))
        with pytest.raises(ToolError, match="SystemExit"):
            runs.start(recipe, model=make_model(), data=data, base=tmp_path).execute()
        if (tmp_path / out).exists():
            found.append(read_record(tmp_path / out)["status"])
    assert found
    assert set(found) == {"failed"}


# -- what has changed before a resume


def interrupt(tmp_path: Path, model: nn.Module, data: Data, **options: object) -> Path:
    recipe = make_recipe({**OPTIONS, **options})
    with pytest.raises(runs.Interrupted):
        runs.start(recipe, model=model, data=data, base=tmp_path, listeners=[StopAfterFirstStage()]).execute()
    return tmp_path / "run"


def warnings_of(record: dict) -> list[str]:
    told = ("differs from", "differ from", "was edited")
    return [text for text in record["warnings"] if any(word in text for word in told)]


def test_a_resumed_run_with_everything_as_before_warns_of_nothing(tmp_path):
    directory = interrupt(tmp_path, make_model(), Data(loader(), None, loader()))
    record = runs.resume(directory, model=make_model(), data=Data(loader(), None, loader())).execute()
    assert warnings_of(record) == []


@pytest.mark.parametrize("which", ["calibration", "evaluation", "training"])
def test_other_data_are_noticed(tmp_path, which):
    gradual = {"mode": "gradual", "steps": 2} if which == "training" else {}
    good, other = batches(), [(x + 0.01, y) for x, y in batches()]
    directory = interrupt(tmp_path, make_model(), Data(good, good, good), **gradual)
    named = {"calibration": good, "train": good, "evaluation": good}
    named["train" if which == "training" else which] = other
    record = runs.resume(directory, model=make_model(), data=Data(**named)).execute()
    told = warnings_of(record)
    assert len(told) == 1
    assert f"the first batch of the {which} data differs" in told[0]
    assert any(which in line for line in (directory / "report.html").read_text().splitlines())


def test_another_activation_function_is_noticed(tmp_path):
    directory = interrupt(tmp_path, make_model(), Data(batches()))
    model = make_model()
    model[6] = nn.ReLU()
    record = runs.resume(directory, model=model, data=Data(batches())).execute()
    assert len(warnings_of(record)) == 1
    assert "the dense model's outputs on the first batch differ" in warnings_of(record)[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [("[0.3, 0.6]", "[0.3, 0.7]"), ('"magnitude"', '"diagonal"'), ("samples = 16", "samples = 17")],
)
def test_an_edited_recipe_is_refused_where_it_changes_the_result(tmp_path, old, new):
    directory = interrupt(tmp_path, make_model(), Data(batches()))
    text = (directory / RECIPE).read_text()
    assert old in text
    (directory / RECIPE).write_text(text.replace(old, new))
    with pytest.raises(ToolError, match=r"recipe.toml was edited after the run began: \w+ was .* and is"):
        runs.resume(directory, model=make_model(), data=Data(batches()))


def test_an_edited_recipe_is_told_where_it_does_not(tmp_path, caplog):
    directory = interrupt(tmp_path, make_model(), Data(batches()))
    text = (directory / RECIPE).read_text()
    (directory / RECIPE).write_text(text.replace("keep = 3", "keep = 4"))
    record = runs.resume(directory, model=make_model(), data=Data(batches())).execute()
    assert "keep was 3 and is 4" in caplog.text
    assert record["status"] == "finished"


# -- whose code runs


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """The current directory is one folder, and a run with its code is in another one."""
    for name in ("here", "theirs"):
        (tmp_path / name).mkdir()
    code = "from pathlib import Path\nPath('owned').touch()\n"
    for name in ("net.py", "workload.py"):
        (tmp_path / "theirs" / name).write_text(code)
    (tmp_path / "theirs" / "package").mkdir()
    (tmp_path / "theirs" / "package" / "net.py").write_text(code)
    (tmp_path / "theirs" / "package" / "__init__.py").symlink_to(str(xml.__file__))  # of an installed package
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "theirs"


def foreign_run(folder: Path, **specs: str) -> Path:
    directory = folder / "run"
    directory.mkdir()
    sections = make_recipe({**QUICK_RUN, **specs}).sections()
    record = {
        "base": str(folder),
        "warnings": [],
        "checkpoints": 0,
        "status": "interrupted",
        "recipe": sections,
    }
    (directory / RUN).write_text(json.dumps(record))
    return directory


@pytest.mark.parametrize(
    "specs",
    [
        {"model": "net.py:make"},
        {"model": "../theirs/net.py:make"},
        {"model": "net:make"},
        {"model": "workload:digits", "data": "net.py:loader"},
        {"model": "workload:digits", "eval_data": "net.py:loader"},
        {"model": "workload:digits", "metric": "net.py:score"},
        {"model": "workload:digits", "forward": "net.py:call"},
        {"model": "workload:digits", "data": "workload:loader"},
        {"model": "package.net:make"},
    ],
)
def test_code_from_elsewhere_needs_trust(elsewhere, specs):
    directory = foreign_run(elsewhere, **specs)
    with pytest.raises(ToolError, match=r"neither below the current directory nor installed: .*--trust"):
        runs.resume(directory)
    assert not (elsewhere.parent / "here" / "owned").exists()
    with pytest.raises(ToolError, match=r"net|workload"):
        runs.resume(directory, trust=True)
    assert (elsewhere.parent / "here" / "owned").exists()


def test_a_link_to_code_elsewhere_needs_trust(elsewhere):
    here = elsewhere.parent / "here"
    (here / "net.py").symlink_to(elsewhere / "net.py")
    assert untrusted_code({"model": "net.py:make"}, here) is not None


def test_code_below_the_current_directory_and_installed_code_is_trusted(elsewhere):
    here = elsewhere.parent / "here"
    (here / "sub").mkdir()
    (here / "sub" / "net.py").touch()
    for spec in (
        "sub/net.py:make",
        "torch.nn:Linear",
        "json:loads",
        "workload:digits",
        "fishleg.workloads:x",
    ):
        assert untrusted_code({"model": spec, "data": None}, here) is None
    assert untrusted_code({"model": "net:make"}, here / "sub") is None


def test_files_beside_a_run_do_not_take_the_place_of_installed_modules(elsewhere):
    (elsewhere / "colorsys.py").write_text("from pathlib import Path\nPath('owned').touch()\n")
    assert untrusted_code({"model": "colorsys:make"}, elsewhere) is not None
    (elsewhere / "evil_helper.py").write_text("")
    before = list(sys.path)
    from fishleg.runs.sources import find_function

    find_function("json:loads", "model", elsewhere)
    assert sys.path == before


def test_a_comparison_does_not_resume_code_from_elsewhere(elsewhere):
    from fishleg.runs.compare import compare_methods

    here = elsewhere.parent / "here"
    (here / "net.py").write_text("")
    recipe = make_recipe({**QUICK_RUN, "model": "net.py:make", "out": "comparison", "method": "magnitude"})
    directory = here / "comparison" / "magnitude"
    directory.mkdir(parents=True)
    sections = recipe.replace(out=str(directory), compensation="none").sections()
    record = {
        "base": str(elsewhere),
        "warnings": [],
        "checkpoints": 0,
        "recipe": sections,
        "status": "failed",
    }
    (directory / RUN).write_text(json.dumps(record))
    with pytest.raises(ToolError, match="neither below the current directory nor installed"):
        compare_methods(recipe, ["magnitude"])
    assert not (here / "owned").exists()


# -- outputs that JSON cannot hold


class MinusInfinity(nn.Module):
    """A class that can never be: its logit is −inf."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3))

    def forward(self, x):
        return torch.cat([self.inner(x), torch.full((len(x), 1), float("-inf"))], 1)


def test_a_model_with_a_logit_of_minus_infinity_can_be_resumed(tmp_path):
    directory = interrupt(tmp_path, MinusInfinity(), Data(batches()))
    record = runs.resume(directory, model=MinusInfinity(), data=Data(batches())).execute()
    assert record["status"] == "finished"
    assert warnings_of(record) == []


def test_a_slightly_different_activation_function_is_noticed(tmp_path):
    def with_gelu(how: str) -> nn.Module:
        model = make_model()
        model[6] = nn.GELU(how)
        return model

    directory = interrupt(tmp_path, with_gelu("none"), Data(batches()))
    record = runs.resume(directory, model=with_gelu("tanh"), data=Data(batches())).execute()
    assert "the dense model's outputs on the first batch differ" in warnings_of(record)[0]


# -- what the model itself is worth with refreshed statistics of BatchNorm


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


# -- checkpoints with a right checksum and a wrong content


def without(key):
    def spoil(state):
        del state[key]

    return spoil


def spoil_weights(state):
    state["model"] = {name: value[:1] for name, value in state["model"].items() if value.dim()}


def spoil_masks(state):
    masks = state["session"]["surgeon"]["masks"]
    state["session"]["surgeon"]["masks"] = {name: mask.float() * 3 for name, mask in masks.items()}


def spoil_plan(state):
    state["plan"] = {"done": "two", "fraction": 3}


def spoil_nan(state):
    next(iter(state["model"].values())).view(-1)[0] = float("nan")


def spoil_targets(state):
    state["plan"]["targets"] = [0.3]


def spoil_no_masks(state):
    state["session"]["surgeon"]["masks"] = {}


def spoil_times(state):
    state["run_log"]["timing"] = {}


def spoil_all(state):
    state.clear()


@pytest.mark.parametrize(
    "spoil",
    [without("session"), without("plan"), without("random"), without("run_log"), spoil_weights, spoil_all,
     spoil_plan, spoil_masks, spoil_nan, spoil_targets, spoil_no_masks, spoil_times],
    ids=["session", "plan", "random", "run_log", "weights", "all", "plan-values", "masks", "nan", "targets",
         "no-masks", "times"],
)  # fmt: skip
def test_a_checkpoint_with_a_wrong_content_falls_back_like_a_damaged_one(tmp_path, spoil):
    expected = make_model()
    runs.start(
        make_recipe({**OPTIONS, "out": "other"}), model=expected, data=Data(batches()), base=tmp_path
    ).execute()
    directory = interrupt(tmp_path, make_model(), Data(batches()))
    newest = sorted((directory / "checkpoints").iterdir())[-1]
    state = checkpoint.load(newest)
    spoil(state)
    newest.unlink()
    checkpoint.save(newest, state)
    model = make_model()
    record = runs.resume(directory, model=model, data=Data(batches())).execute()
    assert any(f"{newest.name} does not fit this run" in text for text in record["warnings"])
    for name, value in expected.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
