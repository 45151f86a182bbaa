"""Your own training loop, two lines more: it prunes at every 20th step, and zeros last in between.

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

torch.manual_seed(0)
SCHEDULE = fishleg.schedule("exponential", 0.95, 6)


def session(model: nn.Module, state: dict | None, first: int, last: int) -> dict:
    """Training steps first ... last; returns what a later session needs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    surgeon = fishleg.Surgeon(model, loader(labels=False), options=PruningOptions(exclude=["0.weight"]))
    if state is not None:
        model.load_state_dict(state["model"])
        surgeon.load_state_dict(state["surgeon"])
        optimizer.load_state_dict(state["optimizer"])
    fishleg.attach(
        surgeon, optimizer, SCHEDULE, every=20, done=first,
        on_prune=lambda step: print(f"pruned to {step.sparsity:.1%}"),
    )  # fmt: skip
    model.train()
    for x, y in islice(cycle(loader()), last - first):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {"model": model.state_dict(), "surgeon": surgeon.state_dict(), "optimizer": optimizer.state_dict()}


model = train(network())
print(f"dense {accuracy(model):.1f} %")
with tempfile.TemporaryDirectory() as folder:
    torch.save(session(model, None, 0, 70), Path(folder) / "state.pt")
    later = network()
    session(later, torch.load(Path(folder) / "state.pt", weights_only=False), 70, 140)
print(f"after the last pruning and 39 steps more {accuracy(later):.1f} %")
