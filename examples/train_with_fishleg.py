"""FishLeg as an optimizer, next to Adam: a deep autoencoder, which is small and hard to train."""

from collections.abc import Callable
from itertools import pairwise

import torch
from digits import TEST_X, loader
from torch import nn

from fishleg import FishLeg

WIDTHS = [64, 48, 24, 8, 24, 48, 64]


def autoencoder() -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def trained_by(make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], epochs: int = 10) -> nn.Module:
    torch.manual_seed(0)
    model = autoencoder()
    optimizer = make_optimizer(model)
    for _ in range(epochs):
        for x, _ in loader():
            pixels = x.flatten(1)
            optimizer.zero_grad()
            error(model, pixels).backward()
            optimizer.step()
    return model


def error(model: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """Minus the log-likelihood of a picture, its pixels being independent shades between black and white."""
    return nn.functional.binary_cross_entropy_with_logits(model(pixels), pixels, reduction="sum") / len(
        pixels
    )


for name, make in {
    "Adam": lambda model: torch.optim.Adam(model.parameters(), 1e-2),
    "FishLeg": lambda model: FishLeg(model, "bernoulli", max_kl=0.03),
}.items():
    model = trained_by(make)
    with torch.no_grad():
        print(f"{name:<8} test error {error(model, TEST_X.flatten(1)):.2f}")
