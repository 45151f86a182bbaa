"""What the examples share: real digits in ordinary DataLoaders, a small network trained on them, accuracy."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fishleg.workloads.digits import split_digits

TRAIN_X, TRAIN_Y, TEST_X, TEST_Y = split_digits()


def loader(*, labels: bool = True) -> DataLoader:
    tensors = (TRAIN_X, TRAIN_Y) if labels else (TRAIN_X,)
    return DataLoader(TensorDataset(*tensors), batch_size=64, shuffle=True, drop_last=True)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def train(model: nn.Module, epochs: int = 8) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(epochs):
        for x, y in loader():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor = TEST_X, labels: Tensor = TEST_Y) -> float:
    return 100 * (model.eval()(images).argmax(1) == labels).float().mean().item()
