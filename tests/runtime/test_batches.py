"""How batches of every form reach the model, and how they are split."""

import logging
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import EXAMPLES_8, net_8_16_4, quick_prune
from torch import Tensor, nn

from fishleg.runtime.batches import (
    batch_size,
    default_forward,
    inputs_of,
    map_tensors,
    move_batch,
    output_tensor,
    resize_batch,
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


def test_slice_splits_every_part_that_has_the_length_of_the_batch() -> None:
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


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net_8_16_4()

    def forward(self, mask: Tensor, u: Tensor) -> Tensor:
        assert mask.shape == (5, 5)
        return self.net((mask @ u).mean(1))


def test_an_attention_mask_in_the_first_place_is_not_split(caplog: pytest.LogCaptureFixture) -> None:
    batch = {"mask": torch.ones(5, 5), "u": torch.randn(16, 5, 8)}
    assert batch_size(batch) == 16
    assert slice_batch(batch, 2, 6)["u"].shape == (4, 5, 8)
    with caplog.at_level(logging.WARNING):
        quick_prune(Mixed(), [batch])
    assert not caplog.text


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        ({"ids": torch.zeros(8, 12), "mask": torch.zeros(12, 12)}, 8),
        ({"place": torch.zeros(12), "mask": torch.zeros(12, 12), "x": torch.zeros(8, 12, 3)}, 8),
        ({"weights": torch.zeros(5), "x": torch.zeros(8, 3), "z": torch.zeros(8, 2)}, 8),
        ({"x": torch.zeros(8, 3), "table": torch.zeros(100, 7)}, 8),
        ({"mask": torch.zeros(5, 5), "x": torch.zeros(8, 5), "labels": torch.zeros(8)}, 8),
        (({"mask": torch.zeros(8, 5), "x": torch.zeros(5, 3)}, torch.zeros(5)), 5),
        ({"boxes": torch.zeros(0, 4), "x": torch.zeros(8, 3)}, 8),
        ((torch.zeros(12, 4, 6), torch.zeros(4)), 12),
    ],
)
def test_the_size_of_a_batch(batch: Any, size: int) -> None:
    assert batch_size(batch) == size


def test_targets_of_another_name_are_refused() -> None:
    batch = {"mask": torch.ones(5, 5), "u": torch.randn(16, 5, 8), "y": torch.ones(16)}
    with pytest.raises(
        ValueError, match=r"takes no argument 'y'.*called labels, label, targets or target.*forward="
    ):
        quick_prune(Mixed(), [batch])

    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.relu(x, slope=1)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="slope"):  # a fault of the model's own
        default_forward(Wrong(), {"x": EXAMPLES_8})


def test_lists_of_texts_are_split_with_the_tensors() -> None:
    batch = {"x": torch.arange(4), "text": ["a", "b", "c", "d"], "about": ["two", "words"], "pair": (1, 2)}
    cut = slice_batch(batch, 1, 3)
    assert cut["x"].tolist() == [1, 2]
    assert cut["text"] == ["b", "c"]
    assert (cut["about"], cut["pair"]) == (["two", "words"], (1, 2))


def test_inputs_with_time_first_are_refused() -> None:
    batch = torch.randn(12, 4, 6), torch.randint(0, 4, (4,))
    with pytest.raises(ValueError, match=r"length 12 and its targets 4: .*batch_first=True"):
        slice_batch(batch, 0, 4)
    assert slice_batch(batch, 0, 12)[0].shape == (12, 4, 6)  # nothing is cut


def test_labels_that_repeat_the_tokens_are_shifted() -> None:
    tokens = torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]])
    labels = torch.tensor([[1, 2, 3, -100], [4, 5, 6, 7]])
    found = targets_of({"input_ids": tokens, "labels": labels})
    assert found is not None
    assert found.tolist() == [[2, 3, -100, -100], [5, 6, 7, -100]]
    masked = torch.tensor([[-100, 9, -100, -100], [-100, -100, 8, -100]])  # of a masked language model
    assert targets_of({"input_ids": tokens, "labels": masked}) is masked
    classes = torch.tensor([0, 1])
    assert targets_of({"input_ids": tokens, "labels": classes}) is classes


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_batch_is_resized(size: int) -> None:
    point = namedtuple("point", "x y")
    kept = torch.zeros(5)
    batch = {"pair": point(X, Y), "texts": ["a", "b", "c"], "kept": kept, "scalar": torch.tensor(1.0), "n": 3}
    found = resize_batch(batch, size)
    chosen = [index % 3 for index in range(size)]
    assert type(found["pair"]) is point
    assert torch.equal(found["pair"].x, X[chosen])
    assert torch.equal(found["pair"].y, Y[chosen])
    assert found["texts"] == ["abc"[index] for index in chosen]
    assert found["kept"] is kept
    assert found["n"] == 3
    assert batch_size(found["pair"]) == size
