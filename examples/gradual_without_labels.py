"""Prune and train in turns without a single label: the dense model is the teacher."""

import torch
from digits import accuracy, loader, network, train

import fishleg
from fishleg import FineTuningOptions

torch.manual_seed(0)
model = train(network())
sparse = fishleg.prune(
    model,
    loader(labels=False),
    0.95,
    mode="gradual",
    stages=5,
    fine_tuning=FineTuningOptions(epochs=1, distill=True),
)
print(f"dense {accuracy(model):.1f} %, 95 % of the weights gone {accuracy(sparse):.1f} %")
