"""Two processes with different data train and prune one model and end with the same weights."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from fishleg import FineTuningOptions, FishLeg, PruningOptions, PruningSession, Surgeon
from fishleg.optim.fishleg import ONLINE

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch with gloo")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3))


def batches(rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1 + rank)
    inputs = torch.randn(count, 16, 6, generator=generator) * (1 + 2 * rank)
    return [(x, x[:, :3].argmax(1)) for x in inputs]


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found: dict[str, Tensor] = {}

    def keep(stage: str, model: nn.Module) -> None:
        found.update({f"{stage}.{name}": p.detach().clone() for name, p in model.named_parameters()})

    model = DistributedDataParallel(network())
    optimizer = FishLeg(model, auxiliary=replace(ONLINE, warm_start=2), warmup=8)
    for x, y in batches(rank, 8):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    keep("trained", model)
    found["q"] = torch.cat([d.flatten() for d in optimizer.inverse.diag().values()])

    loader = batches(rank, 4)
    for method in ("fishleg", "diagonal"):
        pruned = DistributedDataParallel(network())
        surgeon = Surgeon(
            pruned,
            loader,
            options=PruningOptions(samples=16, sub_batch=8, method=method, compensation="joint"),
        )
        surgeon.prune(0.5)
        keep(method, pruned)
        found.update({f"{method} mask.{name}": mask.clone() for name, mask in surgeon.masks.items()})
    for optimizer_name in ("fishleg", "sgd"):
        tuned = DistributedDataParallel(network())
        session = PruningSession(
            tuned,
            loader,
            options=PruningOptions(samples=16, sub_batch=8, refine_steps=2),
            fine_tuning=FineTuningOptions(optimizer=optimizer_name, steps=3, update_every=1),
        )
        list(session.run([0.3, 0.6]))
        keep(f"gradual {optimizer_name}", tuned)
        found[f"{optimizer_name} zeros"] = torch.tensor(session.surgeon.sparsity)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_processes_end_with_the_same_model(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(work, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert float(first["sgd zeros"]) == pytest.approx(0.6, abs=0.01)


def test_a_model_that_is_not_shared_gives_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from fishleg.runtime import process_group as distributed

    distributed._warn_once.cache_clear()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 3)
    monkeypatch.setattr(dist, "get_rank", lambda *_: 0)
    with caplog.at_level(logging.WARNING, "fishleg"):
        Surgeon(network(), batches(0, 1), options=PruningOptions(method="magnitude"))
    assert "3 processes are running, and the model is not wrapped" in caplog.text
