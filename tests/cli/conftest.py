"""A folder with models, data, weights, recipes and runs, right and wrong ones."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from fishleg.cli.commands import main
from fishleg.formats import checkpoint

NET = """
import torch
from torch import nn

number = 3


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10)).float()


def raising():
    raise RuntimeError("out of cheese")


def leaving():
    raise SystemExit(3)


def needy(width):
    return make()


def pair():
    return make(), 1


def nothing():
    return None


def bare():
    return nn.ReLU()


def odd():  # no layer has a multiple of 4 inputs
    return nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 10)).float()


def tiny():  # layers with fewer weights than 98 % leaves anything of
    return nn.Sequential(nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 10)).float()


def wide():
    return nn.Sequential(nn.Linear(8, 600), nn.ReLU(), nn.Linear(600, 10)).float()


def conv():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(10)).float()


def frozen():
    return make().requires_grad_(False)


def poisoned():
    model = make()
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    return model


class Chatty(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = make()

    def forward(self, x):
        return "a text"


def text_out(): return Chatty()


class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(x) if float(x.sum()) > 0 else super().forward(-x)


def branching(): return Branching(8, 10).float()


class Sixteen(nn.Linear):
    def forward(self, x):
        return super().forward(x.view(16, 8))


def sixteen(): return Sixteen(8, 10).float()


def call_pair(model, batch):
    return model(batch[0]), 1


def call_bare(model):
    return model


def say(model, loader):
    return "good"


def nan(model, loader):
    return float("nan")


def none(model, loader):
    return None


def broken_metric(model, loader):
    raise KeyError("score")


def metric_of_one(model):
    return 1.0
"""


DATA = """
import torch

g = torch.Generator().manual_seed(0)
x = [torch.randn(16, 8, generator=g, dtype=torch.float32) for _ in range(3)]
y = [torch.randint(0, 10, (16,), generator=g) for _ in range(3)]
good = list(zip(x, y))


def loader(): return good
def unlabelled(): return x
def seven(): return [x[0][:, :7]]
def empty(): return []
def hollow(): return [(x[0][:0], y[0][:0])]
def nan(): return [(torch.full((16, 8), float("nan")), y[0])]
def second_nan(): return [good[0], (x[1] * float("inf"), y[1])]
def doubles(): return [(x[0].double(), y[0])]
def longs(): return [(x[0].long(), y[0])]
def ten(): return [(x[0], torch.full((16,), 10))]
def minus(): return [(x[0], torch.full((16,), -1))]
def late_ten(): return [*good, good[0], (x[0], torch.full((16,), 10))]
def floats(): return [(x[0], y[0].float())]
def short_labels(): return [(x[0], y[0][:5])]
def nan_targets(): return [(x[0], torch.full((16, 10), float("nan")))]
def targets_of_two(): return [(x[0], torch.full((16, 10), 2.0))]
def threes(): return [(x[0], y[0], y[0])]
def words(): return [["a", "b"]]
def images(): return [(torch.zeros(16, 3, 8, 8), y[0])]
def grey(): return [(torch.zeros(16, 1, 8, 8), y[0])]
def nothing(): return None
def number(): return 3
def generator(): return (b for b in good)
def raising(): raise OSError("the disk is on fire")
def needy(path): return good


class Once:
    def __init__(self): self.iterator = iter(good)
    def __iter__(self): return self.iterator


class Torn:
    def __iter__(self):
        yield good[0]
        raise RuntimeError("shard 2 is torn")


class Endless:
    def __iter__(self): return iter(good)


def once(): return Once()
def torn(): return Torn()
def no_length(): return Endless()
"""


RECIPES = {
    "spelling.toml": '[model]\nmodel = "net.py:make"\n[schedule]\nsparsty = 0.5\n',
    "section.toml": '[modle]\nmodel = "net.py:make"\n',
    "misplaced.toml": '[model]\nmodel = "net.py:make"\nsparsity = 0.5\n',
    "top.toml": 'sparsity = 0.5\n',
    "list.toml": '[model]\nmodel = "net.py:make"\n[pruning]\nsamples = [1, 2]\n',
    "text.toml": '[model]\nmodel = "net.py:make"\n[schedule]\nsparsity = "90"\n',
    "bool.toml": '[model]\nmodel = "net.py:make"\n[pruning]\nsamples = true\n',
    "fraction.toml": '[model]\nmodel = "net.py:make"\n[schedule]\nstages = 2.5\n',
    "flag.toml": '[model]\nmodel = "net.py:make"\n[pruning]\nempirical = "yes"\n',
    "one_text.toml": '[model]\nmodel = "net.py:make"\n[pruning]\nexclude = "0"\n',
    "mixed.toml": '[model]\nmodel = "net.py:make"\n[schedule]\nsparsities = [0.5, "x"]\n',
    "nan.toml": '[model]\nmodel = "net.py:make"\n[schedule]\nsparsity = nan\n',
    "two.toml": '[model]\nmodel = "net.py:make"\n[schedule]\nsparsity = 0.5\nmax_params = 100\n',
    "syntax.toml": '[model\nmodel = "net.py:make"\n',
    "twice.toml": '[run]\nseed = 1\nseed = 2\n',
    "null.toml": '[model]\nmodel = "net\\u0000.py:make"\n',
    "huge.json": '{"run": {"seed": 1' + 400 * "0" + "}}",
    "syntax.json": '{"model": {"model": "net.py:make",}}',
    "array.json": '[{"model": "net.py:make"}]',
    "syntax.yaml": "model:\n  model: [net.py:make\n",
    "code.yaml": "model:\n  model: !!python/object/apply:os.mkdir ['owned']\n",
    "empty.yaml": "",
    "flat.yaml": "model: net.py:make\n",
    "recipe.txt": "[model]\n",
}  # fmt: skip


def write_weights(folder: Path) -> None:
    torch.manual_seed(0)
    good = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
    state = good.state_dict()
    torch.save({**state, "3.weight": torch.zeros(2)}, folder / "extra.pt")
    torch.save({"0.weight": state["0.weight"]}, folder / "part.pt")
    torch.save({**state, "0.weight": torch.zeros(16, 9)}, folder / "shape.pt")
    torch.save({**state, "0.bias": torch.full((16,), float("nan"))}, folder / "nan.pt")
    torch.save(good, folder / "whole.pt")
    torch.save([1, 2], folder / "list.pt")
    torch.save({0: torch.zeros(1)}, folder / "numbered.pt")
    torch.save({"epoch": 3, "lr": 0.1}, folder / "numbers.pt")
    torch.save({}, folder / "none.pt")
    (folder / "text.pt").write_text("these are no weights\n")
    (folder / "cut.pt").write_bytes((folder / "extra.pt").read_bytes()[:300])
    (folder / "bytes.safetensors").write_bytes(b"\x00\x01garbage" * 9)
    save_file({name: value.contiguous() for name, value in state.items()}, folder / "good.safetensors")
    save_file({"0.weight.$mask": torch.zeros(2, dtype=torch.uint8)}, folder / "half.safetensors")
    checkpoint.save(folder / "numbers.ckpt", {"a": 1})
    checkpoint.save(folder / "list.ckpt", [torch.zeros(2)])


QUICK = "--method magnitude --samples 8 --sub-batch 8 --stages 1 --quiet"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, data, weights, recipes, and a run that is finished (`done`) or was not."""
    folder = tmp_path_factory.mktemp("template")
    make_template(folder)
    return folder


def make_template(folder: Path) -> None:
    (folder / "net.py").write_text(NET)
    (folder / "data.py").write_text(DATA)
    (folder / "script.py").write_text("import argparse\np = argparse.ArgumentParser()\np.exit(2)\n")
    (folder / "torn.py").write_text("def make(:\n")
    (folder / "lacking.py").write_text("import no_such_package\n")
    (folder / "weights").mkdir()
    (folder / "empty").mkdir()
    for name, text in RECIPES.items():
        (folder / name).write_text(text)
    (folder / "binary.toml").write_bytes(bytes(range(128, 256)))
    write_weights(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(sys, "dont_write_bytecode", True)
        torch.set_default_dtype(torch.float32)
        for data, out, sparsity in (("loader", "done", 0.5), ("unlabelled", "unlabelled", 0.9)):
            line = f"prune net.py:make --data data.py:{data} -s {sparsity} --out {out} {QUICK}"
            result = CliRunner().invoke(main, line.split())
            assert result.exit_code == 0, result.output
        torch.set_default_dtype(torch.float64)
    broken_runs(folder)


def broken_runs(folder: Path) -> None:
    def variant(name: str) -> Path:
        shutil.copytree(folder / "done", folder / name)
        record = json.loads((folder / name / "run.json").read_text())
        (folder / name / "run.json").write_text(json.dumps({**record, "status": "interrupted"}))
        (folder / name / "model.safetensors").unlink()
        return folder / name

    (variant("garbled") / "run.json").write_text("{oh no")
    (variant("listed") / "run.json").write_text("[]")
    (variant("baseless") / "run.json").write_text('{"status": "running"}')
    (variant("no-dense") / "dense.ckpt").unlink()
    (variant("cut-dense") / "dense.ckpt").write_bytes(b"cut")
    without = variant("no-recipe")
    (without / "recipe.toml").unlink()
    record = json.loads((without / "run.json").read_text())
    del record["recipe"]
    (without / "run.json").write_text(json.dumps(record))
    edited = variant("edited") / "recipe.toml"
    edited.write_text(edited.read_text().replace("sparsity = 0.5", "sparsity = 0.6"))
    (variant("bad-recipe") / "recipe.toml").write_text("[schedule]\nsparsity = 2.0\n")
    for path in (variant("damaged") / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-7])
    half = variant("modelless")
    shutil.rmtree(half / "checkpoints")
    other = variant("other-model")
    text = (other / "recipe.toml").read_text()
    (other / "recipe.toml").write_text(text.replace("net.py:make", "net.py:wide"))
    (folder / "theirs").mkdir()
    for name in ("comparison.json", "demo.png"):
        (folder / "theirs" / name).write_text("{}")
    (folder / "used").mkdir()
    save_file({"a": torch.ones(3)}, folder / "used" / "model.safetensors")


@pytest.fixture
def work(template: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder itself, as the working directory: the tests are about its staying as it is."""
    folder = template
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    torch.set_default_dtype(torch.float32)
    yield folder
    torch.set_default_dtype(torch.float64)
