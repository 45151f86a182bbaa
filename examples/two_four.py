"""2:4: of every four neighbouring inputs two go, in every layer that the pattern fits."""

import torch
from digits import accuracy, loader, network, train

import fishleg
from fishleg import PruningOptions

torch.manual_seed(0)
model = train(network())
surgeon = fishleg.Surgeon(model, loader(labels=False), options=PruningOptions(pattern="2:4"))
print(surgeon.table())  # the first convolution has one input and stays as it is

dense = accuracy(model)
for sparsity in (0.3, 0.5):
    surgeon.prune(sparsity)
for name in surgeon.weights.names:
    weight = model.get_parameter(name)
    fours = weight.movedim(1, -1).reshape(-1, 4)
    assert bool(((fours != 0).sum(1) <= 2).all()), name
print(f"dense {dense:.1f} %, 2:4 {accuracy(model):.1f} %")
