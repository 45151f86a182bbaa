"""Endless and single passes over loaders."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fishleg.runtime.loaders import cycle, sub_batches
from fishleg.runtime.replay import Replayable


def test_sub_batches_keep_the_order_and_start_again() -> None:
    pieces = sub_batches([torch.arange(5), torch.arange(10, 12)], 2)
    assert [next(pieces).tolist() for _ in range(5)] == [[0, 1], [2, 3], [10, 11], [0, 1], [2, 3]]
    assert next(sub_batches([torch.arange(3)], 8)).tolist() == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_persistent_workers_are_not_rewound_by_another_pass() -> None:
    loader = DataLoader(TensorDataset(torch.arange(8.0)), num_workers=1, persistent_workers=True)
    running = iter(loader)  # a training loop in the middle of an epoch
    seen = [int(next(running)[0]) for _ in range(2)]
    ours, replayed = cycle(loader), iter(Replayable(loader))
    mixed = [[int(next(stream)[0]) for stream in (ours, replayed, running)] for _ in range(3)]
    assert seen + [row[2] for row in mixed] == [0, 1, 2, 3, 4]
    assert [row[0] for row in mixed] == [row[1] for row in mixed] == [0, 1, 2]
    assert loader.persistent_workers


def test_an_iterator_that_runs_out_is_named():
    with pytest.raises(ValueError, match="exhausted after one pass: it is an iterator"):
        list(cycle(iter([1, 2])))
