"""Runs in child processes that are killed with SIGKILL, at a moment or in the middle of a write."""

import importlib
import os
import random
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fishleg import runs
from fishleg.runs.directory import read_record
from fishleg.runs.recipe import Recipe, make_recipe

MODES = {
    "staged": {"sparsity": 0.8, "stages": 3, "batchnorm_batches": 2},
    "fishleg": {
        "mode": "gradual", "sparsities": [0.4, 0.7], "steps": 5, "update_every": 2, "refine_steps": 2,
    },
    "sgd": {"mode": "gradual", "sparsities": [0.4, 0.7], "steps": 5, "optimizer": "sgd", "distill": True},
    "baseline": {"mode": "gradual", "sparsities": [0.5, 0.7], "steps": 3, "method": "magnitude"},
    "search": {"max_drop": "20%", "stages": 2, "mode": "gradual", "optimizer": "adam", "steps": 3},
}  # fmt: skip


def recipe_for(mode: str, out: str) -> Recipe:
    common = {
        "model": "killing:make_model", "data": "killing:loader", "samples": 16, "sub_batch": 8, "out": out,
        "checkpoint_minutes": 1e-6,
    }  # fmt: skip
    return make_recipe(common, MODES[mode])


def model_bytes(directory: Path) -> bytes:
    """The final model as written, with its header: files are equal byte by byte."""
    return (directory / "model.safetensors").read_bytes()


TRAINED: dict[str, torch.Tensor] = {}


def make_model() -> nn.Module:
    """BatchNorm, dropout and a convolution: whatever could be forgotten in a checkpoint."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
            nn.Dropout(0.2), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 3),
        )  # fmt: skip
        if not TRAINED:
            optimizer = torch.optim.Adam(model.parameters(), 1e-2)
            for _ in range(30):
                for x, y in loader():
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
            TRAINED.update({name: value.clone() for name, value in model.state_dict().items()})
    model.load_state_dict(TRAINED)
    return model.eval()


def minus_zeros(model: nn.Module, _: object) -> float:
    """A metric that any pruning makes worse."""
    return -float(sum(int((p == 0).sum()) for p in model.parameters()))


class Noisy(TensorDataset):
    """Augmentation with global random numbers, as most people write it."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn_like(x), y


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 1, 4, 4, generator=generator)
    return DataLoader(Noisy(x, x.flatten(1)[:, :3].argmax(1)), batch_size=16, shuffle=True, drop_last=True)


def work(recipe: Recipe, base: Path) -> None:
    """Start the run or go on with it, whichever is due; returns when it is finished."""
    directory = base / recipe.run.out
    if not (directory / "run.json").exists():
        runs.start(recipe, base=base).execute()
    elif read_record(directory)["status"] != "finished":
        runs.resume(directory).execute()


def warm_up() -> None:
    """Import and build once here what every child would otherwise do again (seconds each)."""
    importlib.import_module("fishleg.report")
    importlib.import_module("safetensors.torch")
    torch.set_default_dtype(torch.float32)
    make_model()
    weight = torch.nn.Parameter(torch.zeros(1))
    for make in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        optimizer = make([weight], lr=0.1)
        weight.square().sum().backward()
        optimizer.step()


def kill_often(recipe: Recipe, base: Path, kills: int, seconds: float, source: random.Random) -> list[Path]:
    """Run to the end, again and again, until so many kills have hit; the directories of the finished runs."""
    finished: list[Path] = []
    while kills > 0 or not finished:
        this = recipe.replace(out=f"{recipe.run.out}-{len(finished)}")
        code = -signal.SIGKILL
        while code == -signal.SIGKILL:
            delay = source.uniform(0.02, 0.6) * seconds if kills > 0 else None
            code = in_child(lambda: work(this, base), kill_after=delay)  # noqa: B023
            kills -= code == -signal.SIGKILL
        assert code == 0, f"the run ended with {code}"
        finished.append(base / this.run.out)
    return finished


def in_child(action: Callable[[], None], kill_after: float | None = None) -> int:
    """Do something in a forked process; its exit code, or minus the signal that ended it."""
    child = os.fork()
    if not child:
        code = 1
        try:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            torch.set_default_dtype(torch.float32)
            action()
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)
    if kill_after is not None:
        deadline = time.monotonic() + kill_after
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_in_call(module: object, name: str, at: int, *, half_written: bool = False) -> None:
    """From now on, the at-th call of module.name never returns; a file may be left half written."""
    function, count = getattr(module, name), 0

    def deadly(*arguments: object) -> object:
        nonlocal count
        count += 1
        if count == at:
            if (
                half_written
                and isinstance(arguments[0], int)
                and not stat.S_ISDIR(os.fstat(arguments[0]).st_mode)
            ):
                os.ftruncate(arguments[0], os.fstat(arguments[0]).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)

    setattr(module, name, deadly)
