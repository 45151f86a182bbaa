"""The one call: a trained model and unlabelled data in, a sparse model out; saved, and loaded again."""

import tempfile
from pathlib import Path

import torch
from digits import accuracy, loader, network, train

import fishleg

torch.manual_seed(0)
model = train(network())
sparse = fishleg.prune(model, loader(labels=False), sparsity=0.9)

with tempfile.TemporaryDirectory() as folder:
    torch.save(sparse.state_dict(), Path(folder) / "sparse.pt")
    plain = network()  # nothing of fishleg is needed to use the result
    plain.load_state_dict(torch.load(Path(folder) / "sparse.pt"))

zeros = sum(int((p == 0).sum()) for p in plain.parameters() if p.dim() > 1)
weights = sum(p.numel() for p in plain.parameters() if p.dim() > 1)
print(f"dense {accuracy(model):.1f} %, with {zeros / weights:.1%} zeros {accuracy(plain):.1f} %")
