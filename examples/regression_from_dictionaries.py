"""Regression, with batches that are dictionaries and outputs in a dictionary: say how to call the model."""

import torch
from digits import TEST_X, TRAIN_X, loader
from torch import Tensor, nn

import fishleg


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))

    def forward(self, noisy: Tensor) -> dict[str, Tensor]:
        return {"clean": self.layers(noisy)}


def damaged(images: Tensor) -> dict[str, Tensor]:
    x = images.flatten(1)
    return {"noisy": x + 0.3 * torch.randn_like(x), "labels": x}


def error(model: Denoiser, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["noisy"])["clean"] - batch["labels"]).square().mean()


torch.manual_seed(0)
model = Denoiser()
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
for _ in range(20):
    for x, _ in loader():
        optimizer.zero_grad()
        error(model, damaged(x)).backward()
        optimizer.step()

batches = [damaged(part) for part in TRAIN_X.split(64)]
sparse = fishleg.prune(
    model, batches, 0.8, likelihood="gaussian", forward=lambda model, batch: model(batch["noisy"])["clean"]
)
test = damaged(TEST_X)
with torch.no_grad():
    print(
        f"squared error: dense {error(model, test):.4f}, 80 % of the weights gone {error(sparse, test):.4f}"
    )
