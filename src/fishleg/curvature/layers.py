"""Which parameters form a block of Q, and how a weight and its bias become one matrix.

This is the only place in the library where parameters are reshaped. A matrix layer is packed as
[n_out, n_in (+1)], the bias as the last column; all other parameters are packed into one vector, which
gets a diagonal Q.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized


@dataclass(frozen=True)
class Layer:
    """One block of Q: a weight matrix with its bias, or all parameters that are not matrices together."""

    name: str
    names: tuple[str, ...]  # (weight,), (weight, bias), or every vector parameter
    shapes: tuple[tuple[int, ...], ...]
    is_matrix: bool
    is_embedding: bool = False  # rows are looked up, and by embeddings alone: others have no gradient
    padding: tuple[int, ...] = ()  # rows that nothing may move: an embedding's padding

    @property
    def weight(self) -> str:
        """The name of a matrix layer's weight."""
        return self.names[0]

    @property
    def bias(self) -> str | None:
        """The name of a matrix layer's bias, if it has one."""
        return self.names[1] if self.is_matrix and len(self.names) == 2 else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that this layer's Q acts on: [n_out, n_in (+1)], or [n] for vectors."""
        if not self.is_matrix:
            return (sum(torch.Size(shape).numel() for shape in self.shapes),)
        return self.shapes[0][0], torch.Size(self.shapes[0][1:]).numel() + len(self.names) - 1

    @property
    def channels(self) -> int:
        """Input channels of a matrix layer."""
        return self.shapes[0][1]

    @property
    def kernel(self) -> int:
        """Kernel positions of a convolution; 1 for a linear layer."""
        return torch.Size(self.shapes[0][2:]).numel()

    def padding_rows(self, device: torch.device) -> Tensor | None:
        """[n_out, 1], True for the rows that are held; None where there are none."""
        if not self.padding:
            return None
        rows = torch.zeros(self.shape[0], 1, dtype=torch.bool, device=device)
        rows[list(self.padding)] = True
        return rows

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Gather this layer's tensors into [..., *shape]; leading batch dimensions are kept."""
        parts = [tensors[name] for name in self.names]
        batch = parts[0].dim() - len(self.shapes[0])
        if not self.is_matrix:
            flat = [part.reshape(*part.shape[:batch], -1) for part in parts]
            return torch.cat(flat, dim=-1)
        matrix = parts[0].flatten(batch + 1)
        return matrix if len(parts) == 1 else torch.cat([matrix, parts[1].unsqueeze(-1)], dim=-1)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        """The inverse of `pack`."""
        if not self.is_matrix:
            sizes = [torch.Size(shape).numel() for shape in self.shapes]
            parts = packed.split(sizes, dim=-1)
        else:
            n_in = torch.Size(self.shapes[0][1:]).numel()
            parts = (packed[..., :n_in], packed[..., n_in])[: len(self.names)] if self.bias else (packed,)
        batch = packed.shape[: packed.dim() - len(self.shape)]
        return {
            name: part.reshape(*batch, *shape)
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }


# (weight attribute, bias attribute) of the matrices inside a module type, searched by isinstance.
_MATRICES: dict[type[nn.Module], list[tuple[str, str | None]]] = {
    nn.Linear: [("weight", "bias")],
    nn.Conv1d: [("weight", "bias")],
    nn.Conv2d: [("weight", "bias")],
    nn.Conv3d: [("weight", "bias")],
    nn.MultiheadAttention: [("in_proj_weight", "in_proj_bias")],
    nn.Embedding: [("weight", None)],
}


def register_layer(module_type: type[nn.Module], matrices: list[tuple[str, str | None]]) -> None:
    """Teach fishleg the matrices of your own module: `register_layer(MyLinear, [("weight", "bias")])`.

    Each weight must have its outputs first: [n_out, n_in, *kernel].
    """
    _MATRICES[module_type] = matrices


def removed_rows(layers: Iterable[Layer], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By parameter: rows of a weight of which masks keep nothing, and what they remove of a vector."""
    found = {}
    for layer in layers:
        for name in layer.names:
            if name in masks:
                gone = ~masks[name].flatten(1).any(1) if masks[name].dim() > 1 else ~masks[name]
                if bool(gone.any()):
                    found[name] = gone
    return found


def zero_rows_(vectors: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> None:
    """Set such rows to zero in vectors of the model's parameters, [groups, *shape] each."""
    for name in rows.keys() & vectors.keys():
        vectors[name][:, rows[name].to(vectors[name].device)] = 0


def _users(model: nn.Module) -> dict[int, list[nn.Module]]:
    """The modules that have each parameter as their own, by its id."""
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            users.setdefault(id(p), []).append(module)
    return users


def find_layers(model: nn.Module) -> list[Layer]:
    """Every trainable parameter of the model in exactly one layer; shared parameters are counted once.

    Matrices come first, in the model's order; all other parameters form one layer per device and dtype.
    """
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    users = _users(model)
    claimed: set[int] = set()
    layers: list[Layer] = []
    for module_name, module in model.named_modules():
        matrices = next((m for t, m in reversed(_MATRICES.items()) if isinstance(module, t)), [])
        for weight_attribute, bias_attribute in matrices:
            if is_parametrized(module, weight_attribute):
                continue  # no parameter; to read it would compute it, and move what spectral_norm remembers
            weight: Any = getattr(module, weight_attribute, None)
            if id(weight) not in names or id(weight) in claimed:
                continue
            bias: Any = getattr(module, bias_attribute, None) if bias_attribute else None
            parts = [weight]
            if id(bias) in names and id(bias) not in claimed and len(bias) == len(weight):
                parts.append(bias)
            claimed.update(map(id, parts))
            # A module of one matrix lends its name; of several, the weights' own names tell them apart.
            name = module_name if module_name and len(matrices) == 1 else names[id(weight)]
            shapes = tuple(tuple(part.shape) for part in parts)
            tables = [user for user in users[id(weight)] if isinstance(user, (nn.Embedding, nn.EmbeddingBag))]
            padding = {user.padding_idx for user in tables if user.padding_idx is not None}
            layers.append(
                Layer(
                    name,
                    tuple(names[id(part)] for part in parts),
                    shapes,
                    is_matrix=True,
                    is_embedding=len(tables) == len(users[id(weight)]),
                    padding=tuple(sorted(padding)),
                )
            )
    rest: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for p in model.parameters():
        if id(p) in names and id(p) not in claimed:
            rest.setdefault((p.device, p.dtype), []).append(p)
    for i, group in enumerate(rest.values()):
        shapes = tuple(tuple(p.shape) for p in group)
        layers.append(Layer(f"vectors:{i}", tuple(names[id(p)] for p in group), shapes, is_matrix=False))
    return layers
