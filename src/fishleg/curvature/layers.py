"""Layers: which parameters form a block of Q, and how a weight and its bias become one matrix.

This is the only module of the library that reshapes parameters. A matrix layer is packed as
[n_out, n_in (+1)], with the bias as the last column. All other parameters are packed into one vector, which
gets a diagonal Q. Paper: eq. (block_linear).
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
    """One block of Q: a weight matrix with its bias, or all parameters that are not part of a matrix.

    Args:
        name: The name of the layer.
        names: The names of its parameters: (weight,), (weight, bias), or those of all vector parameters.
        shapes: The shapes of these parameters.
        is_matrix: Whether the layer is a weight matrix.
        is_embedding: Whether the weight is used by embeddings only. Rows that are not looked up in a batch
            then have no gradient.
        padding: The rows of an embedding that are its padding, and must not change.
    """

    name: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_matrix: bool
    is_embedding: bool = False
    padding: tuple[int, ...] = ()

    @property
    def weight(self) -> str:
        """The name of a matrix layer's weight."""
        return self.names[0]

    @property
    def bias(self) -> str | None:
        """The name of a matrix layer's bias; None if it has none."""
        return self.names[1] if self.is_matrix and len(self.names) == 2 else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that this layer's Q acts on: [n_out, n_in (+1)], or [n] for vectors."""
        if not self.is_matrix:
            return (sum(torch.Size(shape).numel() for shape in self.shapes),)
        return self.shapes[0][0], torch.Size(self.shapes[0][1:]).numel() + len(self.names) - 1

    @property
    def channels(self) -> int:
        """The number of input channels of a matrix layer."""
        return self.shapes[0][1]

    @property
    def kernel(self) -> int:
        """The number of kernel positions of a convolution; 1 for a linear layer."""
        return torch.Size(self.shapes[0][2:]).numel()

    def padding_rows(self, device: torch.device) -> Tensor | None:
        """Return a mask of the padding rows.

        Args:
            device: The device of the mask.

        Returns:
            A boolean tensor [n_out, 1], True for padding rows; None if there are none.
        """
        if not self.padding:
            return None
        rows = torch.zeros(self.shape[0], 1, dtype=torch.bool, device=device)
        rows[list(self.padding)] = True
        return rows

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Pack the tensors of this layer into one.

        Args:
            tensors: By parameter name, tensors [..., *parameter shape] with common leading dimensions.

        Returns:
            A tensor [..., *shape].
        """
        parts = [tensors[name] for name in self.names]
        batch = parts[0].dim() - len(self.shapes[0])
        if not self.is_matrix:
            flat = [part.reshape(*part.shape[:batch], -1) for part in parts]
            return torch.cat(flat, dim=-1)
        matrix = parts[0].flatten(batch + 1)
        return matrix if len(parts) == 1 else torch.cat([matrix, parts[1].unsqueeze(-1)], dim=-1)

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        """Split a packed tensor into those of the parameters; the inverse of `pack`.

        Args:
            packed: A tensor [..., *shape].

        Returns:
            Tensors [..., *parameter shape] by parameter name.
        """
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


# By module type: (weight attribute, bias attribute) of its matrices. Types are compared with isinstance.
_MATRICES: dict[type[nn.Module], list[tuple[str, str | None]]] = {
    nn.Linear: [("weight", "bias")],
    nn.Conv1d: [("weight", "bias")],
    nn.Conv2d: [("weight", "bias")],
    nn.Conv3d: [("weight", "bias")],
    nn.MultiheadAttention: [("in_proj_weight", "in_proj_bias")],
    nn.Embedding: [("weight", None)],
}


def register_layer(module_type: type[nn.Module], matrices: list[tuple[str, str | None]]) -> None:
    """Register a kind of layer: declare which parameters of a module type are weight matrices.

    Each matrix becomes one layer, and gets a block of Q with the structure of a matrix. Parameters of an
    unregistered module type are treated as vectors, get a diagonal Q, and are not pruned. A module belongs to
    the type that was registered last, of all types of which it is an instance. So a subclass is covered by
    the entry of its base class until it is registered itself. Registering a type again replaces its entry.

    Args:
        module_type: The class of the module.
        matrices: One pair for each matrix: the attribute of the weight, and that of its bias or None. A
            weight has its outputs first, [n_out, n_in, *kernel]; a bias has the shape [n_out].

    Example:
        >>> class Scaled(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.matrix = nn.Parameter(torch.zeros(2, 3))
        ...         self.offset = nn.Parameter(torch.zeros(2))
        >>> register_layer(Scaled, [("matrix", "offset")])
        >>> [layer] = find_layers(nn.Sequential(Scaled()))
        >>> layer.names, layer.shape
        (('0.matrix', '0.offset'), (2, 4))
    """
    _MATRICES[module_type] = matrices


def find_layers(model: nn.Module) -> list[Layer]:
    """Assign every trainable parameter of a model to exactly one layer.

    Args:
        model: The model. A shared parameter counts once.

    Returns:
        The matrix layers in the model's order, followed by one vector layer for each device and dtype.

    Example:
        >>> layers = find_layers(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
        >>> [(layer.name, layer.shape) for layer in layers]
        [('0', (2, 4)), ('vectors:0', (4,))]
    """
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    layers = _matrix_layers(model, names)
    assigned = {name for layer in layers for name in layer.names}
    groups: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for p in model.parameters():
        if id(p) in names and names[id(p)] not in assigned:
            groups.setdefault((p.device, p.dtype), []).append(p)
    for i, group in enumerate(groups.values()):
        shapes = tuple(tuple(p.shape) for p in group)
        layers.append(Layer(f"vectors:{i}", tuple(names[id(p)] for p in group), shapes, is_matrix=False))
    return layers


def _matrix_layers(model: nn.Module, names: Mapping[int, str]) -> list[Layer]:
    """Return the matrix layers in the model's order; `names` are those of the parameters, by id."""
    users = _users(model)
    assigned: set[int] = set()
    layers: list[Layer] = []
    for module_name, module in model.named_modules():
        matrices = next((m for t, m in reversed(_MATRICES.items()) if isinstance(module, t)), [])
        for weight_attribute, bias_attribute in matrices:
            if is_parametrized(module, weight_attribute):
                continue  # not a parameter; reading it would compute it, and change spectral_norm's state
            weight: Any = getattr(module, weight_attribute, None)
            if id(weight) not in names or id(weight) in assigned:
                continue
            bias: Any = getattr(module, bias_attribute, None) if bias_attribute else None
            parts = [weight]
            if id(bias) in names and id(bias) not in assigned and len(bias) == len(weight):
                parts.append(bias)
            assigned.update(map(id, parts))
            # A layer has the name of its module; if the module has several matrices, that of its weight.
            name = module_name if module_name and len(matrices) == 1 else names[id(weight)]
            tables = [user for user in users[id(weight)] if isinstance(user, (nn.Embedding, nn.EmbeddingBag))]
            padding = {user.padding_idx for user in tables if user.padding_idx is not None}
            layers.append(
                Layer(
                    name,
                    tuple(names[id(part)] for part in parts),
                    tuple(tuple(part.shape) for part in parts),
                    is_matrix=True,
                    is_embedding=len(tables) == len(users[id(weight)]),
                    padding=tuple(sorted(padding)),
                )
            )
    return layers


def _users(model: nn.Module) -> dict[int, list[nn.Module]]:
    """Return the modules that own each parameter directly, by the id of the parameter."""
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            users.setdefault(id(p), []).append(module)
    return users


def removed_rows(layers: Iterable[Layer], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the rows that masks remove completely.

    Args:
        layers: The layers to look at.
        masks: Boolean masks by parameter name, of the parameter's shape; True is kept.

    Returns:
        By parameter name, a boolean tensor over the first dimension: True for a row of a weight of which
        nothing is kept, and for a removed entry of a vector. Parameters without such rows are left out.
    """
    removed = {}
    for layer in layers:
        for name in layer.names:
            if name in masks:
                rows = ~masks[name].flatten(1).any(1) if masks[name].dim() > 1 else ~masks[name]
                if bool(rows.any()):
                    removed[name] = rows
    return removed


def zero_rows_(vectors: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> None:
    """Set rows to zero in place.

    Args:
        vectors: Vectors in the parameter space, [groups, *shape] by parameter name.
        rows: The result of `removed_rows`.
    """
    for name in rows.keys() & vectors.keys():
        vectors[name][:, rows[name].to(vectors[name].device)] = 0
