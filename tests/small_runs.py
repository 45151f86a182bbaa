"""Short runs on the small model of killing.py."""

from pathlib import Path

import pytest
import torch
from torch import nn

from fishleg import runs
from fishleg.formats.onnx import missing_packages
from fishleg.runs.recipe import make_recipe
from fishleg.runs.sources import Data

QUICK_RUN = {
    "model": "killing:make_model",
    "data": "killing:loader",
    "samples": 16,
    "sub_batch": 8,
    "stages": 3,
}

needs_onnx = pytest.mark.skipif(
    bool(missing_packages()), reason=f"pip install 'fishleg[onnx]' (missing: {', '.join(missing_packages())})"
)


def go(tmp_path: Path, **options):
    run = runs.start(make_recipe(QUICK_RUN, {"out": "run"}, options), base=tmp_path)
    return run, run.execute()


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


def interrupt(tmp_path: Path, model: nn.Module, data: Data, **options: object) -> Path:
    recipe = make_recipe({**OPTIONS, **options})
    with pytest.raises(runs.Interrupted):
        runs.start(recipe, model=model, data=data, base=tmp_path, listeners=[StopAfterFirstStage()]).execute()
    return tmp_path / "run"


def warnings_of(record: dict) -> list[str]:
    told = ("differs from", "differ from", "was edited")
    return [text for text in record["warnings"] if any(word in text for word in told)]


def make_two_runs(folder: Path) -> Path:
    """A finished run of single weights, `run`, and one of rows, `rows`."""
    torch.set_default_dtype(torch.float32)
    for out, options in (("run", {"sparsity": 0.5}), ("rows", {"sparsity": 0.3, "pattern": "rows"})):
        go(folder, method="magnitude", out=out, **{**options, "stages": 1})
    return folder
