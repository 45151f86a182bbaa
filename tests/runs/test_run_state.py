"""A checkpoint with a right checksum and a wrong content is passed over like a damaged one."""

import pytest
import torch
from killing import make_model
from small_runs import OPTIONS, batches, interrupt

from fishleg import runs
from fishleg.formats import checkpoint
from fishleg.runs.recipe import make_recipe
from fishleg.runs.sources import Data


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
