"""Small models with their likelihood and its dense Fisher matrix."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from oracles import bernoulli_fisher, categorical_fisher, dense_fisher, gaussian_fisher
from torch import Tensor, nn

from fishleg import Bernoulli, Categorical, Gaussian, Likelihood


class Tokens(nn.Module):
    """A small transformer with an output for each token, tied to its embedding: [batch, time, classes]."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, 4)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.3, batch_first=True)
        self.readout = nn.Linear(4, classes, bias=False)
        self.readout.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.readout(self.encoder(self.embed(tokens)))


class Case(NamedTuple):
    model: nn.Module
    x: Tensor
    y: Tensor
    likelihood: Likelihood
    output_fisher: Callable[[Tensor], Tensor]
    loss: nn.Module  # the same likelihood for curvlinops ...
    factor: float  # ... whose mean is over units and outputs, and without 1/2σ²

    @property
    def keep(self) -> Tensor | None:
        return self.y != -100 if isinstance(self.likelihood, Categorical) else None

    def dense(self) -> Tensor:
        return dense_fisher(self.model, self.x, self.output_fisher, self.keep)


def mlp(*sizes: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.Tanh(), nn.Linear(sizes[1], sizes[2]))


def conv_net() -> nn.Sequential:
    norm = nn.BatchNorm2d(3)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    body = nn.Conv2d(2, 3, 2), norm, nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(3, 2, 2)
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(8, 2))


def make_case(name: str) -> Case:
    torch.manual_seed(3)
    if name == "mlp":
        y = torch.tensor([0, 2, 1, 1])
        return Case(
            mlp(3, 4, 3), torch.randn(4, 3), y, Categorical(), categorical_fisher, nn.CrossEntropyLoss(), 1
        )
    if name == "mlp-gaussian":
        fisher = partial(gaussian_fisher, sigma=0.5)
        y = torch.randn(4, 2)
        return Case(mlp(3, 4, 2), torch.randn(4, 3), y, Gaussian(0.5), fisher, nn.MSELoss(), 2 / 2 / 0.5**2)
    if name == "conv":
        y = torch.randint(2, (3, 2)).double()
        x = torch.randn(3, 2, 4, 4)
        return Case(conv_net(), x, y, Bernoulli(), bernoulli_fisher, nn.BCEWithLogitsLoss(), 2)
    y = torch.tensor([[0, 2, -100, 1], [1, -100, -100, 0]])
    x = torch.tensor([[0, 1, 2, 2], [2, 0, 0, 1]])
    return Case(Tokens(), x, y, Categorical(), categorical_fisher, nn.CrossEntropyLoss(), 1)


CASES = ("mlp", "mlp-gaussian", "conv", "transformer")


cases = pytest.mark.parametrize("name", CASES)
