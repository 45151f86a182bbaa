"""Which parameters are pruned, by which names, and why the others are not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from helpers import (
    QUICK,
    inputs_6,
    inputs_8,
    net_6_10_4,
    net_8_16_4,
    net_with_dropout,
    random_images,
    training_batches,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fishleg import PruningOptions, Surgeon
from fishleg.workloads.digits_net import DigitsNet


def test_include_exclude_and_the_table() -> None:
    model = DigitsNet(8)
    surgeon = Surgeon(
        model,
        random_images(),
        options=PruningOptions(include=["conv"], exclude=["^conv1"], method="magnitude"),
    )
    assert surgeon.weights.names == ["conv2.weight", "conv3.weight"]
    surgeon.prune(0.5)
    assert set(surgeon.masks) == set(surgeon.weights.names)
    lines = {line.split()[0]: line for line in surgeon.table().splitlines()}
    assert lines["parameter"].endswith("pruned?")
    assert lines["conv1.weight"].endswith(" 72     0.0%  excluded")
    assert lines["conv3.weight"].endswith("  yes")
    assert f"{surgeon.history[0].per_layer['conv3.weight']:.1%}" in lines["conv3.weight"]
    assert lines["bn1.weight"].endswith("not a matrix")
    assert lines["linear.weight"].endswith("not included")
    assert (
        "1 inputs are not a multiple of 4"
        in Surgeon(model, random_images(), options=PruningOptions(pattern="2:4")).table()
    )


def test_names_are_names_and_not_regular_expressions() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(13)))
    every, data = [f"{i}.weight" for i in range(13)], [torch.randn(4, 4)]

    def chosen(**options: Any) -> list[str]:
        return Surgeon(model, data, options=PruningOptions(**options)).weights.names

    assert chosen(exclude=["2.weight"]) == [name for name in every if name != "2.weight"]
    assert chosen(include=["1"]) == ["1.weight"]
    assert chosen(include=["^1"]) == ["1.weight", "10.weight", "11.weight", "12.weight"]
    nested = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    assert Surgeon(nested, data, options=PruningOptions(include=["0"])).weights.names == ["0.0.weight"]
    with pytest.raises(ValueError, match=r"'0\.1' matches no parameter; the model has 0\.0\.weight"):
        Surgeon(nested, data, options=PruningOptions(include=["0.1"]))


def test_tied_weights_go_by_each_of_their_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head, self.subhead = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.head.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.subhead(self.first(x)))
            return y

    for name in ("head", "head.weight", "first"):
        assert Surgeon(Tied(), [torch.randn(4, 4)], options=PruningOptions(exclude=[name])).weights.names == [
            "subhead.weight"
        ]


def test_a_model_that_is_mostly_frozen_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = net_8_16_4()
    model[0].requires_grad_(False)
    with caplog.at_level(logging.WARNING):
        Surgeon(model, inputs_8(3))
    assert "only 30.2 % of the model's 212 parameters can be pruned" in caplog.text
    assert "0.weight (frozen)" in caplog.text


def test_a_tied_weight_is_known_by_all_its_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.body, self.head = nn.Embedding(10, 6), nn.Linear(6, 6), nn.Linear(6, 10)
            self.head.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(self.embedding(x)).tanh())

    data = [torch.randint(0, 10, (8, 3)) for _ in range(2)]
    assert Surgeon(Tied(), data, options=PruningOptions(exclude=["^head"])).weights.names == ["body.weight"]
    assert Surgeon(Tied(), data, options=PruningOptions(exclude=["^embedding"])).weights.names == [
        "body.weight"
    ]
    assert Surgeon(Tied(), data, options=PruningOptions(include=[r"head\.weight"])).weights.names == [
        "embedding.weight"
    ]


def test_a_parametrized_weight_is_reported_apart_and_its_state_stays() -> None:
    model = net_6_10_4(nn.Tanh)
    parametrizations.spectral_norm(model[0])
    state = {name: value.clone() for name, value in model.named_buffers()}
    surgeon = Surgeon(model, inputs_6(), options=PruningOptions(**QUICK, measure_batches=0))
    assert "parametrized: make it an ordinary weight" in surgeon.table()
    assert all(torch.equal(value, state[name]) for name, value in model.named_buffers())


def test_a_lazy_layer_must_know_its_shape() -> None:
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet: call the model once"):
        Surgeon(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)), inputs_6())


def test_most_of_a_model_left_out_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(6, 32, batch_first=True), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x.unsqueeze(1))[0][:, -1])

    data = [x for x, _ in training_batches()]
    with caplog.at_level(logging.WARNING):
        Surgeon(Tagger(), data)
    assert "only 2.4 % of the model's" in caplog.text
    assert "lstm.weight_hh_l0 (not the weight of a linear layer, convolution or embedding" in caplog.text
    caplog.clear()
    Surgeon(net_with_dropout(), data)
    Surgeon(net_with_dropout(), data, options=PruningOptions(include=["5.weight"]))  # as one likes
    assert not caplog.text
