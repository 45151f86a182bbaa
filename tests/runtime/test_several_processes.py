"""Several processes: who reports, loaders of different lengths, models that are sharded."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fishleg
from fishleg import FineTuningOptions, FishLeg, PruningOptions, PruningSession, Surgeon, attach, keep_zeros
from fishleg.runtime import is_first_process, world_size

needs_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch with gloo")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))


def batches(rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(count, 16, 6, generator=torch.Generator().manual_seed(1 + rank))
    return [(part, part[:, :3].argmax(1)) for part in x]


class ReadOnce:
    """A loader that yields batches for a number of passes, and then no more."""

    def __init__(self, rank: int, passes: int) -> None:
        self.batches, self.left = batches(rank, 3), passes

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.left -= 1
        return iter(self.batches if self.left >= 0 else [])


QUICK: dict[str, Any] = {"samples": 8, "sub_batch": 4, "refine_steps": 2, "batchnorm_batches": 2}


def train(rank: int, train_loader: Any, **options: Any) -> None:
    session = PruningSession(
        DistributedDataParallel(network()), batches(rank, 4), options=PruningOptions(**QUICK),
        fine_tuning=FineTuningOptions(optimizer="sgd", **options), train_loader=train_loader,
    )  # fmt: skip
    list(session.run([0.3]))


def unequal_lengths(rank: int) -> None:
    train(rank, batches(rank, 4 - rank), epochs=1)


def no_length_in_one(rank: int) -> None:
    train(rank, ReadOnce(rank, 99) if rank else batches(rank, 4), epochs=1)


def ends_in_one(rank: int) -> None:
    train(rank, ReadOnce(rank, 1 if rank else 99), steps=8)


def empty_in_one(rank: int) -> None:
    train(rank, [] if rank else batches(rank, 4), steps=8)


def empty_calibration_in_one(rank: int) -> None:
    Surgeon(
        DistributedDataParallel(network()), [] if rank else batches(rank, 4), options=PruningOptions(**QUICK)
    ).prune(0.5)


def calibration_ends_in_one(rank: int, method: str = "fishleg") -> None:
    options = PruningOptions(**{**QUICK, "samples": 64}, method=method)
    loader = ReadOnce(rank, 2 if rank else 99)  # once for the measured outputs, once for Q
    Surgeon(DistributedDataParallel(network()), loader, options=options).prune(0.5)


def rival_ends_in_one(rank: int) -> None:
    calibration_ends_in_one(rank, "diagonal")


def batches_of_other_sizes(rank: int) -> None:
    loader = [(x[:2], y[:2]) for x, y in batches(rank, 8)] if rank else batches(rank, 4)
    options = PruningOptions(**{**QUICK, "samples": 16})
    Surgeon(DistributedDataParallel(network()), loader, options=options).prune(0.5)


FAILURES: dict[str, tuple[Callable[[int], None], str]] = {
    "unequal lengths": (unequal_lengths, "training steps of a stage .*: rank 0 has 4, rank 1 has 3"),
    "no length": (no_length_in_one, "training steps of a stage .*: rank 0 has 4, rank 1 has -1"),
    "ends": (
        ends_in_one,
        "the training loader gave no further batch on rank 1.*drawn: rank 0 has 4, rank 1 has 3",
    ),
    "empty": (
        empty_in_one,
        "the training loader gave no further batch on rank 1.*drawn: rank 0 has 1, rank 1 has 0",
    ),
    "empty calibration": (
        empty_calibration_in_one,
        "the calibration loader gave no further batch on rank 1.*drawn: rank 0 has 1, rank 1 has 0",
    ),
    "calibration ends": (
        calibration_ends_in_one,
        r"the calibration loader gave no further batch on rank 1.*drawn: rank 0 has \d+, rank 1 has \d+",
    ),
    "calibration of a rival ends": (
        rival_ends_in_one,
        r"the calibration loader gave no further batch on rank 1.*drawn: rank 0 has \d+, rank 1 has \d+",
    ),
    "sizes of batches": (
        batches_of_other_sizes,
        "steps in which Q is learned .*: rank 0 has 4, rank 1 has 8",
    ),
}


def report(rank: int) -> str:
    """Prune with inputs that give a warning; return what this process has printed and logged."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger("fishleg").addHandler(handler)
    model = DistributedDataParallel(network())
    loader = [torch.zeros(8, 6)] * 3
    with contextlib.redirect_stderr(stream):
        options = PruningOptions(**QUICK, gamma=0.1)
        fishleg.prune(model, loader, 0.5, options=options, mode="one-shot", inplace=True)
    logging.getLogger("fishleg").removeHandler(handler)
    return stream.getvalue()


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    found: dict[str, str] = {"report": report(rank)}
    for name, (run, _) in FAILURES.items():
        try:
            run(rank)
            found[name] = "no error"
        except ValueError as error:
            found[name] = str(error)
    train(rank, batches(rank, 4 - rank), steps=5)  # lengths do not matter where the steps are given
    train(rank, batches(rank, 4), epochs=1)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("processes")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", FAILURES)
def test_unequal_loaders_are_told_in_every_process(name: str, reports: list[dict[str, str]]) -> None:
    for report in reports:
        assert re.search(FAILURES[name][1], report[name]), report[name]


@needs_gloo
@pytest.mark.slow
def test_only_the_first_process_reports(reports: list[dict[str, str]]) -> None:
    first, second = (each["report"] for each in reports)
    assert "every input in the first 2 batches of the calibration loader is zero" in first
    assert "sparsity 50.0%" in first
    assert second == ""


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fsdp2(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def fsdp1(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def with_dtensors(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    return distribute_module(model, init_device_mesh("cpu", (1,)))


CALLS: dict[str, Callable[[nn.Module], object]] = {
    "prune": lambda model: fishleg.prune(model, batches(0, 2), 0.5),
    "Surgeon": lambda model: Surgeon(model, batches(0, 2)),
    "session": lambda model: PruningSession(model, batches(0, 2)),
    "attach": lambda model: attach(model, batches(0, 2), torch.optim.SGD(model.parameters()), [0.5], every=1),
    "FishLeg": FishLeg,
}
SHARDED = {
    "FullyShardedDataParallel": (fsdp1, r"sharded by FullyShardedDataParallel \(FSDP\)"),
    "fully_shard": (fsdp2, r"sharded by fully_shard \(FSDP2\)"),
    "DTensor": (with_dtensors, r"sharded by DTensor parameters \(0\.weight\)"),
}


@needs_gloo
@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
@pytest.mark.filterwarnings("ignore:.*NO_SHARD.*deprecated:FutureWarning")
@pytest.mark.parametrize("kind", SHARDED)
@pytest.mark.parametrize("name", CALLS)
def test_sharded_models_are_refused_by_name(name: str, kind: str) -> None:
    shard, told = SHARDED[kind]
    model = shard(network())
    with pytest.raises(ValueError, match=rf"{told}.* wrap it in DistributedDataParallel instead"):
        CALLS[name](model)


@needs_gloo
@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_keep_zeros_works_for_a_sharded_model() -> None:
    model = network()
    with torch.no_grad():
        model[0].weight[:, :3] = 0  # type: ignore[index]
    model = fsdp2(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    keep_zeros(model, optimizer)
    for x, y in batches(0, 3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    whole = model[0].weight.full_tensor()  # type: ignore[index]
    assert not bool(whole[:, :3].any())
    assert bool(whole[:, 3:].all())


@pytest.mark.parametrize(
    ("variables", "size", "first"),
    [
        ({}, 1, True),
        ({"WORLD_SIZE": "1", "RANK": "0"}, 1, True),
        ({"WORLD_SIZE": "4", "RANK": "0"}, 4, True),
        ({"WORLD_SIZE": "4", "RANK": "3"}, 4, False),
        ({"WORLD_SIZE": "four"}, 1, True),
    ],
)
def test_the_launcher_is_seen_in_the_environment(
    variables: dict[str, str], size: int, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (world_size(), is_first_process()) == (size, first)
