"""How batches of every form reach the model, and how they are cut."""

from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fishleg.runtime.batches import (
    batch_size,
    default_forward,
    inputs_of,
    map_tensors,
    move_batch,
    output_tensor,
    slice_batch,
    targets_of,
)

X, Y = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 0])


class Keywords(nn.Module):
    def forward(self, *, x: Tensor, shift: Tensor) -> dict[str, Tensor]:
        return {"loss": torch.zeros(()), "logits": x + shift}


FORMS = {
    "tensor": (X, None),
    "pair": ((X, Y), Y),
    "list": ([X, Y], Y),
    "single": ((X,), None),
    "pair-with-other-target": ((X, "label"), None),
}


@pytest.mark.parametrize("name", FORMS)
def test_inputs_and_targets(name: str) -> None:
    batch, targets = FORMS[name]
    assert inputs_of(batch) is X
    assert targets_of(batch) is targets
    assert torch.equal(default_forward(nn.Identity(), batch), X)


@pytest.mark.parametrize("key", ["labels", "label", "targets", "target"])
def test_mappings_become_keyword_arguments(key: str) -> None:
    batch = {"x": X, "shift": torch.ones(2), key: Y}
    assert targets_of(batch) is Y
    assert targets_of({"x": X, key: "cat"}) is None
    assert set(inputs_of(batch)) == {"x", "shift"}
    assert torch.equal(default_forward(Keywords(), batch), X + 1)
    assert torch.equal(default_forward(Keywords(), (batch, Y)), X + 1)


@pytest.mark.parametrize("outputs", [X, {"logits": X}, SimpleNamespace(logits=X), (X, Y), [X]])
def test_output_tensor(outputs: object) -> None:
    assert output_tensor(outputs) is X


def test_slice_cuts_what_has_the_length_of_the_batch() -> None:
    Point = namedtuple("Point", ["x", "rest"])
    batch = Point(
        X, {"mask": torch.eye(3), "scale": torch.ones(2), "scalar": torch.tensor(1.0), "name": "a", "y": [Y]}
    )
    cut = slice_batch(batch, 1, 3)
    assert isinstance(cut, Point)
    assert batch_size(cut) == 2
    assert torch.equal(cut.x, X[1:])
    assert torch.equal(cut.rest["mask"], torch.eye(3)[1:])
    assert torch.equal(cut.rest["y"][0], Y[1:])
    assert cut.rest["scale"].shape == (2,)
    assert cut.rest["scalar"].shape == ()
    assert cut.rest["name"] == "a"


def test_map_and_move_reach_every_tensor() -> None:
    batch = {"a": (X, [Y]), "b": 3}
    assert torch.equal(map_tensors(batch, lambda t: t + 1)["a"][1][0], Y + 1)
    moved = move_batch(batch, torch.device("meta"))
    assert moved["a"][0].device.type == moved["a"][1][0].device.type == "meta"
    assert moved["b"] == 3


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: inputs_of(()), ValueError, "at least the model's input, got an empty sequence"),
        (lambda: inputs_of((X, X, Y)), ValueError, "a batch of 3 parts is ambiguous"),
        (lambda: batch_size(torch.zeros(0, 2)), ValueError, r"must not be empty, got .* \(0, 2\)"),
        (lambda: batch_size({"n": 3}), ValueError, "at least one tensor with a batch dimension, got dict"),
        (lambda: output_tensor({"loss": X}), TypeError, "returned dict, which holds no output tensor"),
        (lambda: output_tensor(None), TypeError, "returned NoneType"),
    ],
)
def test_errors(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
