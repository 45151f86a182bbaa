"""Whole filters and neurons go, and are then cut out: a smaller network, faster on any hardware."""

import copy
import time

import torch
from digits import TEST_X, accuracy, loader, network, train
from torch import nn

import fishleg
from fishleg import FineTuningOptions


@torch.no_grad()
def seconds(model: nn.Module) -> float:
    started = time.perf_counter()
    for _ in range(20):
        model(TEST_X)
    return time.perf_counter() - started


torch.manual_seed(0)
model = train(network())
sparse = fishleg.prune(
    model, loader(), 0.6, pattern="rows", mode="gradual", stages=6, fine_tuning=FineTuningOptions(epochs=1)
)
small = fishleg.shrink(sparse, next(iter(loader())))
print(small)  # the class is the same, the layers are narrower

# the state dict loads into a plain model that is cut down to it
torch.save(small.state_dict(), "small.pt")
again = fishleg.load_shrunk(network(), torch.load("small.pt"))

sizes = [sum(p.numel() for p in m.parameters()) for m in (model, again)]
times = [min(seconds(m) for _ in range(5)) for m in (model, copy.deepcopy(again).eval())]
print(f"{sizes[1] / sizes[0]:.0%} of the parameters, {times[0] / times[1]:.1f} times as fast")
print(f"dense {accuracy(model):.1f} %, small {accuracy(again):.1f} %")
