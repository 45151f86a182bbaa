"""Calibration data that do not vary, and networks whose outputs do not, give a warning; others do not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import net_8_16_4
from torch import Tensor, nn

import fishleg
from fishleg import PruningOptions, PruningSession, Surgeon, attach

QUICK = {"samples": 8, "sub_batch": 4, "gamma": 0.1}
ZERO = "every input in the first 2 batches of the calibration loader is zero"
SAME = "all examples in the first 2 batches of the calibration loader are the same"
DEAD = "the model's outputs are the same for all examples in the first 2 batches"
X = torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return self.head((self.embedding(input_ids) * mask[..., None]).mean(1))


def net() -> nn.Module:
    return net_8_16_4().double()


def tokens(ids: Tensor, **others: Any) -> list[dict[str, Any]]:
    return [{"input_ids": part, "attention_mask": torch.ones_like(part), **others} for part in ids.split(8)]


ALIKE: dict[str, tuple[Callable[[], nn.Module], list[Any], str]] = {
    "zero": (net, [torch.zeros(16, 8).double()] * 3, ZERO),
    "zero, with labels": (net, [(torch.zeros(16, 8).double(), torch.arange(16) % 4)] * 3, ZERO),
    "one example": (net, [X[0, :1].expand(16, 8)] * 3, SAME),
    "one example, with labels": (net, [(X[0, :1].expand(16, 8), torch.arange(16) % 4)] * 3, SAME),
    "batches of one, all the same": (net, [X[0, :1]] * 4, SAME),
    "tokens": (Tokens, tokens(torch.arange(5).expand(24, 5)), SAME),
    "tokens alone": (Tokens, [{"input_ids": torch.arange(5).expand(8, 5)}] * 3, SAME),
    "padding": (
        Tokens,
        [{"input_ids": torch.zeros(8, 5, dtype=torch.long), "labels": torch.arange(8) % 4}] * 3,
        ZERO,
    ),
}

VARIED: dict[str, tuple[Callable[[], nn.Module], list[Any]]] = {
    "normal": (net, list(X)),
    "batches of one that differ": (net, list(X[0].split(1))),
    "equal within a batch, differing between": (net, [X[0, i : i + 1].expand(16, 8) for i in range(3)]),
    "one differs": (net, [torch.cat([X[0, :1].expand(15, 8), X[0, 1:2]])] * 3),
    "tokens under one mask": (Tokens, tokens(torch.arange(120).view(24, 5) % 10)),
    "one example in all": (net, [X[0, :1]]),
}


def messages(caplog: pytest.LogCaptureFixture) -> str:
    kinds = ("calibration loader is zero", "are the same", "dead network")
    return "\n".join(r.getMessage() for r in caplog.records if any(kind in r.getMessage() for kind in kinds))


@pytest.mark.parametrize("method", ["fishleg", "magnitude"])
@pytest.mark.parametrize("name", ALIKE)
def test_examples_that_do_not_differ_give_a_warning(
    name: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    build, loader, told = ALIKE[name]
    Surgeon(build(), loader, options=PruningOptions(method=method, **QUICK)).prune(0.3)
    assert messages(caplog).startswith(told)
    assert messages(caplog).count("\n") == 0


@pytest.mark.parametrize("name", VARIED)
def test_examples_that_differ_give_none(name: str, caplog: pytest.LogCaptureFixture) -> None:
    build, loader = VARIED[name]
    batches = 1 if name == "one example in all" else 2
    options = PruningOptions(measure_batches=batches, **QUICK)
    Surgeon(build(), loader, options=options).prune(0.3)
    assert messages(caplog) == ""


def run_prune(loader: Any, options: PruningOptions) -> None:
    fishleg.prune(net(), loader, 0.3, options=options, progress=lambda event: None)


def run_session(loader: Any, options: PruningOptions) -> None:
    list(PruningSession(net(), loader, options=options).run([0.2, 0.3]))


def run_attached(loader: Any, options: PruningOptions) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    attach(model, loader, optimizer, [0.2, 0.3], every=1, options=options)
    for _ in range(2):
        model(X[0]).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("run", [run_prune, run_session, run_attached])
def test_every_way_to_prune_warns_once(
    run: Callable[[Any, PruningOptions], None], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fishleg"):
        run([torch.zeros(16, 8).double()] * 3, PruningOptions(**QUICK))
        assert messages(caplog).count(ZERO) == 1
        caplog.clear()
        run(list(X), PruningOptions(**QUICK))
    assert messages(caplog) == ""


def test_a_dead_network_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    with torch.no_grad():
        model[0].bias.fill_(-1e3)  # type: ignore[index]
    Surgeon(model, list(X), options=PruningOptions(method="magnitude")).prune(0.3)
    assert messages(caplog).startswith(DEAD)


def test_texts_are_not_judged_by_their_form(caplog: pytest.LogCaptureFixture) -> None:
    loader = [[str(i) for i in range(4)], [str(i) for i in range(4, 8)]]
    model = net()
    Surgeon(
        model, loader, options=PruningOptions(method="magnitude"),
        forward=lambda m, batch: m(X[0, [int(text) for text in batch]]),
    ).prune(0.3)  # fmt: skip
    assert messages(caplog) == ""


def test_time_first_outputs_are_not_taken_for_examples(caplog: pytest.LogCaptureFixture) -> None:
    def forward(model: nn.Module, batch: Tensor) -> Tensor:
        f: Tensor = model(batch)
        return f.expand(5, *f.shape)  # the same at every time

    Surgeon(net(), list(X), forward=forward, options=PruningOptions(method="magnitude")).prune(0.3)
    assert messages(caplog) == ""
