"""Models with zero rows, and what must hold for their shrunk copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fishleg import load_shrunk, shrink


def sizes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters() if p.dim() > 1}


@torch.no_grad()
def remove(model: nn.Module, name: str, rows: list[int]) -> None:
    """Zero rows of a layer's weight and bias."""
    layer: Any = model.get_submodule(name)
    layer.weight[rows] = 0
    if layer.bias is not None:
        layer.bias[rows] = 0


def check_shrunk(model: nn.Module, batch: Any, expected: dict[str, tuple[int, ...]]) -> nn.Module:
    """Shrink in float64: same outputs, these sizes (others unchanged), and a state that loads."""
    model = model.double().eval()
    small = shrink(model, batch)
    assert sizes(small) == {**sizes(model), **expected}
    x = batch if isinstance(batch, tuple) else (batch,)
    with torch.no_grad():
        assert torch.allclose(small(*x), model(*x), atol=1e-12)
        assert torch.equal(load_shrunk(copy.deepcopy(model), small.state_dict())(*x), small(*x))
    return small


class Residual(nn.Module):
    """Two layers that are added up, and one that reads the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(5, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.relu(self.first(x) + self.second(x)))


class Lambda(nn.Module):
    """Two layers of eight and one that reads, put together by a function."""

    def __init__(self, f: Callable[[Any, Tensor], Any], wide: int = 8) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(6, 8), nn.Linear(6, wide), nn.Linear(8, 3)
        self.g = nn.Parameter(torch.ones(8))
        self.f = f

    def forward(self, x: Tensor) -> Any:
        return self.f(self, x)
