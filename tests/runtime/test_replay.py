"""A replayable loader yields the same batches after a restart."""

import random
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fishleg.runtime.loaders import cycle
from fishleg.runtime.random_state import get_random_state, set_random_state
from fishleg.runtime.replay import Replayable
from fishleg.runtime.tensors import digest
from fishleg.workloads.digits import Batches


class Augmented(TensorDataset):
    """Draws from torch's and Python's global generators, as augmentations do."""

    def __getitem__(self, index):
        (x,) = super().__getitem__(index)
        return x + torch.randn(()) + random.random()


def shuffled(**options):
    return DataLoader(Augmented(torch.arange(20.0)), batch_size=4, shuffle=True, **options)


LOADERS = {
    "global generator": shuffled,
    "own generator": lambda: shuffled(generator=torch.Generator().manual_seed(5)),
    "two workers": lambda: shuffled(num_workers=2),
    "set_epoch": lambda: Batches(torch.arange(60.0).view(20, 3), torch.zeros(20), 4, normalized=False),
    "list": lambda: [torch.randn(4) for _ in range(5)],
}


@pytest.mark.slow
@pytest.mark.parametrize("taken", [0, 1, 4, 5, 7, 10])
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_stream_goes_on_where_it_was(name, taken):
    if name == "two workers" and taken not in (0, 4, 5):
        pytest.skip("slow to start")
    torch.manual_seed(3)
    loader = LOADERS[name]()
    stream = Replayable(loader, seed=1)
    batches = cycle(stream)
    for _ in range(taken):
        next(batches)
        torch.rand(3)  # something else uses random numbers in between: dropout, say
    state = stream.state_dict()
    expected = [digest(batch) for batch in islice(batches, 8)]

    again = Replayable(loader if name == "list" else LOADERS[name](), seed=1)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert [digest(batch) for batch in islice(cycle(again), 8)] == expected


def test_passes_differ_and_seeds_differ():
    loader = shuffled()
    first, second = (digest(list(Replayable(loader, seed=s))) for s in (1, 2))
    stream = Replayable(loader, seed=1)
    assert digest(list(stream)) == first != second
    assert digest(list(stream)) != first
    assert len(stream) == 5


def test_global_randomness_is_left_alone():
    before = get_random_state()
    list(Replayable(shuffled(), seed=1))
    after = get_random_state()
    assert torch.equal(before["torch"], after["torch"])
    assert before["python"] == after["python"]
    random.random()
    torch.rand(2)
    set_random_state(before)
    assert torch.equal(torch.get_rng_state(), before["torch"])
    assert random.getstate() == before["python"]


def test_a_loader_with_hidden_randomness_gives_a_warning(caplog):
    class Hidden:
        def __init__(self, seed):
            self.generator = random.Random(seed)  # not torch's: nobody can seed it from outside

        def __iter__(self):
            for _ in range(4):
                yield torch.tensor([self.generator.random()])

    stream = Replayable(Hidden(1))
    next(iter(stream))
    other = Replayable(Hidden(2))
    other.load_state_dict(stream.state_dict())
    assert len(list(other)) == 3
    assert "the loader is not reproducible" in caplog.text


def test_unused_batches_come_again():
    stream = Replayable([torch.tensor([i]) for i in range(4)])
    iterator = iter(stream)
    next(iterator), next(iterator)
    state = stream.state_dict(unused=1)
    again = Replayable(stream.loader)
    again.load_state_dict(state)
    assert [int(b) for b in again] == [1, 2, 3]
