"""Errors name the batch at which they were raised, and keep their type and message."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from fishleg.runtime import LoaderError, Replayable, cycle, naming_the_batch, refresh_batchnorm, sub_batches
from fishleg.runtime.loaders import one_pass


class Failing:
    """A loader that raises at its fourth batch."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __iter__(self) -> Iterator[Tensor]:
        for i in range(6):
            if i == 3:
                raise self.error
            yield torch.randn(4, 3)


READERS: dict[str, Callable[[Any], object]] = {
    "cycle": lambda loader: list(islice(cycle(loader, "my loader"), 9)),
    "sub-batches": lambda loader: list(islice(sub_batches(loader, 2, "my loader"), 9)),
    "one pass": lambda loader: one_pass(loader, 2, 99, "my loader"),
    "replayable": lambda loader: list(Replayable(loader, name="my loader")),
}


@pytest.mark.parametrize("name", READERS)
def test_a_loader_that_fails_is_named_with_its_batch(name: str) -> None:
    told = r"^my loader failed at batch 4 of pass 1: KeyError: 'image\.png'$"
    with pytest.raises(LoaderError, match=told) as caught:
        READERS[name](Failing(KeyError("image.png")))
    assert isinstance(caught.value.__cause__, KeyError)


def test_every_line_of_a_loaders_message_is_shown() -> None:
    with pytest.raises(LoaderError, match=r"ValueError: first line\nsecond line$"):
        list(Replayable(Failing(ValueError("first line\nsecond line"))))


class Files(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        if index == 5:
            raise ValueError("file 5 is damaged\nwrite it again")
        return torch.zeros(3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_the_traceback_of_a_worker_is_left_out() -> None:
    loader = DataLoader(Files(), batch_size=2, num_workers=1)
    told = r"^the loader failed at batch 3 of pass 1: ValueError: file 5 is damaged\nwrite it again$"
    with pytest.raises(LoaderError, match=told):
        list(Replayable(loader))


def test_passes_are_counted_and_a_resumed_loader_knows_its_place() -> None:
    stream = cycle([1, 2, 3], "my loader")
    drawn = [(next(stream), stream.place) for _ in range(5)]
    assert drawn[1] == (2, "batch 2 of pass 1 of my loader")
    assert drawn[4] == (2, "batch 2 of pass 2 of my loader")
    before = Replayable([1, 2, 3])
    list(islice(cycle(before), 5))
    resumed = Replayable([1, 2, 3])
    resumed.load_state_dict(before.state_dict())
    stream = cycle(resumed, "my loader")
    assert (next(stream), stream.place) == (3, "batch 3 of pass 2 of my loader")


class Custom(Exception):
    def __str__(self) -> str:
        return "words of its own"


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (ValueError("a"), ValueError, r"^at batch 7 of x: a$"),
        (RuntimeError("a\nb"), RuntimeError, r"^at batch 7 of x: a\nb$"),
        (TypeError("a"), TypeError, r"^at batch 7 of x: TypeError: a$"),
        (KeyError("a"), KeyError, r"at batch 7 of x: KeyError: 'a'"),
        (torch.OutOfMemoryError("a"), torch.OutOfMemoryError, r"^at batch 7 of x: a$"),
        (OSError(errno.ENOENT, "gone"), RuntimeError, r"^at batch 7 of x: FileNotFoundError: .*gone$"),
        (Custom(), RuntimeError, r"^at batch 7 of x: Custom: words of its own$"),
    ],
)
def test_an_error_keeps_its_type_and_message(error: Exception, kind: type, told: str) -> None:
    with pytest.raises(kind, match=told) as caught, naming_the_batch("batch 7 of x"):
        raise error
    assert caught.value is error or caught.value.__cause__ is error


def test_an_error_is_named_once() -> None:
    with (
        pytest.raises(ValueError, match=r"^at batch 7 of x: a$"),
        naming_the_batch("batch 7 of x"),
        naming_the_batch("batch 7 of x"),
    ):
        raise ValueError("a")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_refresh_of_batchnorm_names_a_batch_that_is_not_finite(value: float) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    data = [torch.randn(8, 3) for _ in range(5)]
    data[3][2, 1] = value
    told = r"at batch 4 of pass 1 of my loader: the statistics of a BatchNorm are not finite"
    with pytest.raises(ValueError, match=told):
        refresh_batchnorm(model, data, 5, name="my loader")
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert refresh_batchnorm(model, data, 3) == 1  # the bad batch is not among these


def test_a_refresh_of_batchnorm_names_a_batch_that_the_model_refuses() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    data = [torch.randn(8, 3), torch.randn(8, 5)]
    with pytest.raises(RuntimeError, match=r"at batch 2 of pass 1 of the loader: .*8x5"):
        refresh_batchnorm(model, data, 5)
