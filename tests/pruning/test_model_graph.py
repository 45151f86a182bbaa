"""Which layers make the outputs, and which norms follow which layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    QUICK,
    QUICK_ROWS,
    TwoHeads,
    conv_net_with_norms,
    image_batches,
    inputs_6,
    inputs_8,
    net_6_10_4,
)
from torch import Tensor, nn

from fishleg import PruningOptions, Surgeon


def test_the_output_layer_is_the_one_that_is_called_last() -> None:
    class HeadFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.norm, self.body = nn.Linear(6, 3), nn.BatchNorm1d(6), nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.norm(self.body(x)))
            return y

    model = HeadFirst().train()
    surgeon = Surgeon(model, [torch.randn(8, 4)], options=PruningOptions(method="magnitude", pattern="rows"))
    assert surgeon.weights.names == ["body.weight"]
    assert "output layer" in str(surgeon.weights.reasons["head.weight"])
    assert model.norm.num_batches_tracked == 0
    assert not model.head._forward_hooks
    empty = Surgeon(
        model, [], options=PruningOptions(method="magnitude", pattern="rows")
    )  # no data: as registered
    assert empty.weights.names == ["head.weight"]


@pytest.mark.parametrize("deep", [False, True])
def test_rows_of_every_output_layer_stay_in_graphs_of_any_depth(deep: bool) -> None:
    class Unrolled(TwoHeads):
        def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            y = super().forward(x)
            assert isinstance(y, Tensor)
            for _ in range(1200 if deep else 1):
                y = y * 0.999
            return y

    reasons = Surgeon(
        Unrolled(joined=True), inputs_8(), likelihood="bernoulli", options=PruningOptions(pattern="rows")
    ).weights.reasons
    assert [name for name, why in reasons.items() if why and "output layer" in why] == [
        "a.weight",
        "b.weight",
    ]


def test_rows_with_an_attention_whose_projection_is_parametrized() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 4)
            nn.utils.parametrizations.weight_norm(self.attention.out_proj)

        def forward(self, x: Tensor) -> Tensor:
            h = x.unsqueeze(1)
            y: Tensor = self.head(self.attention(h, h, h, need_weights=False)[0].squeeze(1))
            return y

    reasons = Surgeon(Attends(), inputs_8(), options=PruningOptions(pattern="rows")).weights.reasons
    assert "an output layer" in str(reasons["head.weight"])


def test_rows_of_every_output_layer_stay() -> None:
    reasons = Surgeon(
        TwoHeads(joined=True), inputs_8(), likelihood="bernoulli", options=PruningOptions(pattern="rows")
    ).weights.reasons
    assert reasons["f.weight"] is None
    assert all("an output layer" in str(reasons[name]) for name in ("a.weight", "b.weight"))


def test_rows_of_an_attention_that_is_the_output_stay() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            h = self.f(x).unsqueeze(1)
            y: Tensor = self.attention(h, h, h, need_weights=False)[0].squeeze(1)
            return y

    reasons = Surgeon(Attends(), inputs_8(), options=PruningOptions(pattern="rows")).weights.reasons
    assert "an output layer" in str(reasons["attention.out_proj.weight"])
    assert reasons["f.weight"] is None


class TwoOutputs(nn.Module):
    """The outputs that count are not those of the layer that is called last."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.decoder = nn.Linear(6, 16), nn.Linear(16, 4), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.body(x).relu()
        y = self.head(z)
        return y, self.decoder(z)


class ResidualOutput(nn.Module):
    """Both layers write into what becomes the output: the last one is taken for the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x).tanh()
        return x + self.last(x).tanh()


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        (TwoOutputs, "head"),
        (ResidualOutput, "last"),
        (lambda: nn.Sequential(net_6_10_4(nn.Tanh), nn.LogSoftmax(-1)), "0.2"),
    ],
)
def test_rows_of_the_layer_that_makes_the_outputs_stay(model: Callable[[], nn.Module], kept: str) -> None:
    surgeon = Surgeon(model(), inputs_6(), options=PruningOptions(**QUICK, pattern="rows"))
    protected = [name for name, why in surgeon.weights.reasons.items() if why and "output layer" in why]
    assert protected == [f"{kept}.weight"]


def test_all_frozen_but_one_the_last_called_is_the_output_layer() -> None:
    model = TwoOutputs()
    model.requires_grad_(False)
    model.decoder.requires_grad_(True)
    surgeon = Surgeon(model, inputs_6(), options=PruningOptions(**QUICK, pattern="rows", include=["decoder"]))
    assert surgeon.weights.names == ["decoder.weight"]


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body = nn.Embedding(20, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embedding(tokens)))
        return logits


def test_a_tied_head_is_the_output_layer() -> None:
    tokens = [torch.randint(0, 20, (4, 5))]
    surgeon = Surgeon(TiedHead(), tokens, options=PruningOptions(pattern="rows", method="magnitude"))
    assert surgeon.weights.names == ["body.weight"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="needs torch 2.6")
def test_hooks_see_into_compiled_models() -> None:
    class HeadFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.body = nn.Linear(6, 4), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.body(x))
            return logits

    model = torch.compile(HeadFirst(), backend="eager")
    model(inputs_6()[0])
    surgeon = Surgeon(model, inputs_6(), options=PruningOptions(**QUICK, pattern="rows", method="kfac"))
    assert surgeon.weights.names == ["_orig_mod.body.weight"]
    surgeon.prune(0.5)


def test_frozen_norms_and_norms_of_several_layers_are_left_alone() -> None:
    model = conv_net_with_norms()
    for p in model[1].parameters():
        p.requires_grad_(False)
    before = copy.deepcopy(model[1].state_dict())
    Surgeon(
        model, image_batches(), options=PruningOptions(**QUICK_ROWS, pattern="rows", method="magnitude")
    ).prune(0.5)
    assert torch.equal(model[1].weight, before["weight"])
    assert torch.equal(model[1].bias, before["bias"])

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Conv2d(2, 4, 3), nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
            self.last = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last((self.norm(self.a(x)) + self.norm(self.b(x))).mean((2, 3)))

    shared = Shared()
    assert (
        Surgeon(
            shared, image_batches(), options=PruningOptions(**QUICK_ROWS, pattern="rows", method="magnitude")
        ).weights.norms
        == {}
    )


def test_norms_over_other_dimensions_and_norms_that_share_are_left_alone() -> None:
    class Sequence(nn.Module):
        """BatchNorm over the time steps, of which there are as many as features."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.inner(x)).mean(1))

    class TwoNorms(nn.Module):
        def __init__(self, *, tied: bool) -> None:
            super().__init__()
            self.conv, self.other = nn.Conv2d(2, 4, 3), nn.Conv2d(2, 4, 3)
            self.a, self.b = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
            self.tied = tied
            if tied:
                self.b.weight, self.b.bias = self.a.weight, self.a.bias
            self.last = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return self.last((self.a(y) + self.b(input=self.other(x) if self.tied else y)).mean((2, 3)))

    steps = [torch.randn(16, 8, 6) for _ in range(3)]
    chosen: dict[str, Any] = {"pattern": "rows", "method": "magnitude", **QUICK_ROWS}
    assert Surgeon(Sequence(), steps, options=PruningOptions(**chosen)).weights.norms == {}
    Surgeon(model := Sequence(), steps, options=PruningOptions(**chosen)).prune(0.5)
    assert bool((model.norm.weight != 0).all())
    both = Surgeon(TwoNorms(tied=False), image_batches(), options=PruningOptions(**chosen)).weights.norms
    assert both == {"conv.weight": ["a.weight", "a.bias", "b.weight", "b.bias"]}
    assert Surgeon(TwoNorms(tied=True), image_batches(), options=PruningOptions(**chosen)).weights.norms == {
        "conv.weight": [],
        "other.weight": [],
    }
