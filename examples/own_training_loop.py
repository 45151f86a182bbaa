"""Your own training loop, one call more: it prunes at every 20th step, and removed weights stay zero.

Halfway the script saves its state and goes on from the file, as after a crash.
"""

import tempfile
from itertools import cycle, islice
from pathlib import Path

import torch
from digits import accuracy, loader, network, train
from torch import nn

import fishleg
from fishleg import PruningOptions
from fishleg.pruning import Pruned

torch.manual_seed(0)
SCHEDULE = fishleg.schedule("exponential", 0.95, 6)


def show(event: object) -> None:
    if isinstance(event, Pruned):
        print(f"pruned to {event.step.sparsity:.1%}")


def session(model: nn.Module, state: dict | None, steps: int) -> dict:
    """Train for some steps; return what a later session needs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    pruning = fishleg.attach(
        model, loader(labels=False), optimizer, SCHEDULE, every=20, on_event=show,
        options=PruningOptions(exclude=["0.weight"]), state=None if state is None else state["pruning"],
    )  # fmt: skip
    model.train()
    for x, y in islice(cycle(loader()), steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {"model": model.state_dict(), "pruning": pruning.state_dict(), "optimizer": optimizer.state_dict()}


model = train(network())
print(f"dense {accuracy(model):.1f} %")
with tempfile.TemporaryDirectory() as folder:
    torch.save(session(model, None, 70), Path(folder) / "state.pt")
    later = network()
    session(later, torch.load(Path(folder) / "state.pt", weights_only=False), 70)
print(f"after the last pruning and 39 steps more {accuracy(later):.1f} %")
