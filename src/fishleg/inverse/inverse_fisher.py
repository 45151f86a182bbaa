"""InverseFisher: one operator per layer, together the block-diagonal Q of the whole model."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.curvature.layers import Layer, find_layers
from fishleg.inverse.operators import (
    Gram,
    Masked,
    Operator,
)
from fishleg.inverse.structures import (
    DEFAULT_STRUCTURE,
    STRUCTURES,
    Structure,
    StructureBuilder,
    structure_name,
)

logger = logging.getLogger(__name__)


class InverseFisher(nn.Module):
    """Q ≈ (F+γI)⁻¹ for a model, block-diagonal over layers, keyed by parameter name.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> q = InverseFisher.from_model(model)
    >>> sorted(q.diag()) == sorted(name for name, _ in model.named_parameters())
    True
    """

    def __init__(self, layers: list[Layer], operators: Mapping[str, Operator]) -> None:
        super().__init__()
        self.layers = {layer.name: layer for layer in layers}
        # The leading slash keeps a layer called `keys` or `values` apart from the methods of ModuleDict.
        self._keys = {name: "/" + name.replace(".", "/") for name in self.layers}
        self._operators = nn.ModuleDict({self._keys[name]: operators[name] for name in self.layers})
        self._masks: dict[str, Tensor] = {}
        self._seen: dict[str, Tensor] = {}  # by layer that is a table: rows that have had a gradient sample
        self.notes: dict[str, str] = {}

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        structure: Structure = DEFAULT_STRUCTURE,
        *,
        scale: float | None = None,
        block_size: int = 50,
        max_factor_dim: int = 2048,
        split_conv: bool = False,
    ) -> InverseFisher:
        """One operator per layer of the model, Q = scale · I (default: I).

        `structure` is one of `STRUCTURES`, or a function from Layer to Operator, whose operators start as it
        made them unless a scale is given. A factor larger than
        `max_factor_dim` is split (convolutions), cut in blocks, or made diagonal, and the log says so;
        `split_conv` splits every convolution's input side into channel ⊗ kernel.
        """
        if scale is not None and not (scale > 0 and math.isfinite(scale)):
            raise ValueError(f"scale must be > 0 and finite, got {scale}")
        if isinstance(structure, str) and structure not in STRUCTURES:
            raise ValueError(f"structure must be one of {', '.join(STRUCTURES)}, got {structure!r}")
        if block_size < 1 or max_factor_dim < 1:
            raise ValueError(
                f"block_size and max_factor_dim must be >= 1, got {block_size} and {max_factor_dim}"
            )
        layers = find_layers(model)
        if not layers:
            raise ValueError("the model has no trainable parameters (requires_grad is False for all of them)")
        builder = StructureBuilder(structure, block_size, max_factor_dim, split_conv)
        parameters = dict(model.named_parameters())
        operators = {}
        for layer in layers:
            weight = parameters[layer.weight]
            dtype = weight.dtype if weight.dtype in (torch.float32, torch.float64) else torch.float32
            operators[layer.name] = builder.build(layer).to(device=weight.device, dtype=dtype)
        inverse = cls(layers, operators)
        inverse.notes = builder.notes
        for name, note in builder.notes.items():
            logger.warning("%s: %s", name, note)
        if scale is not None:
            inverse.set_scale_(scale)
        return inverse

    def operator(self, name: str) -> Operator:
        """The Q block of a layer, restricted to its mask if it has one."""
        inner = self.unmasked(name)
        return Masked(inner, self._masks[name]) if name in self._masks else inner

    def unmasked(self, name: str) -> Operator:
        """The Q block of a layer before any restriction."""
        operator = self._operators[self._keys[name]]
        assert isinstance(operator, Operator)
        return operator

    def mask(self, name: str) -> Tensor | None:
        """The packed mask of a layer (True = kept), or None."""
        return self._masks.get(name)

    def pack(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameter-shaped tensors by parameter name → packed tensors by layer name, in Q's dtype.

        Samples [groups, *shape] of a table tell which of its rows occur, see `unseen`.
        """
        packed = {}
        for name, layer in self.layers.items():
            if all(part in tensors for part in layer.names):
                value = layer.pack(tensors)
                packed[name] = value.to(self.reference(name).dtype) if value.is_floating_point() else value
                if layer.is_embedding and value.dim() == 3:
                    rows = (value != 0).any(2).any(0)
                    self._seen[name] = rows | self._seen[name] if name in self._seen else rows
        return packed

    def unseen(self, name: str) -> Tensor | None:
        """Rows of an embedding that Q knows nothing of, as none of its samples looked them up; None: no such.

        Padding is not among them: it never has a gradient.
        """
        if name not in self._seen:
            return None
        rows = ~self._seen[name]
        rows[list(self.layers[name].padding)] = False
        return rows if bool(rows.any()) else None

    def unpack(self, packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `pack`."""
        tensors: dict[str, Tensor] = {}
        for name, value in packed.items():
            tensors.update(self.layers[name].unpack(value))
        return tensors

    def matvec(self, tensors: Mapping[str, Tensor], *, extra: float = 0.0) -> dict[str, Tensor]:
        """Q v for parameter-shaped v by name; layers that v does not cover are left out.

        `extra` > 0 asks for (Q⁻¹ + extra·I)⁻¹ v instead, a Q of more damping.
        """
        packed = self.pack(tensors)
        operators = {name: self.operator(name) for name in packed}
        products = {
            name: operators[name].damped_matvec(v, extra) if extra else operators[name].matvec(v)
            for name, v in packed.items()
        }
        for name, product in products.items():
            if (still := self.layers[name].padding_rows(product.device)) is not None:
                # padding has no gradient, and Q must not lend it that of other rows
                products[name] = product.masked_fill(still & (packed[name] == 0), 0)
        result = self.unpack(products)
        return {name: value.to(tensors[name].dtype) for name, value in result.items()}

    def diag(self) -> dict[str, Tensor]:
        """diag(Q), parameter-shaped, by parameter name."""
        return self.unpack({name: self.operator(name).diag() for name in self.layers})

    def trace(self) -> Tensor:
        """Tr(Q) over all layers."""
        return torch.stack([self.operator(name).trace() for name in self.layers]).sum()

    def set_scale_(self, scale: float) -> None:
        """Set every block to scale · I."""
        for name in self.layers:
            self.unmasked(name).set_scale_(scale)

    def restrict(self, masks: Mapping[str, Tensor]) -> None:
        """Restrict Q to M Q M; masks are parameter-shaped and boolean, True where a weight is kept.

        A full factor is downdated exactly to (F_MM+γI)⁻¹; other structures come close and are then
        refined by auxiliary steps, which converge to it. An empty mapping lifts the restriction.
        """
        known = {part for layer in self.layers.values() for part in layer.names}
        for name, mask in masks.items():
            if name not in known:
                raise ValueError(f"mask for unknown parameter {name!r}")
            if mask.dtype != torch.bool:
                raise ValueError(f"masks must be boolean (True = kept), got {mask.dtype} for {name!r}")
        packed: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            if not any(part in masks for part in layer.names):
                continue
            diagonal = layer.unpack(self.unmasked(name).diag().detach())
            full = {
                part: masks.get(part, torch.ones_like(diagonal[part], dtype=torch.bool)).to(
                    diagonal[part].device
                )
                for part in layer.names
            }
            for part in layer.names:
                if full[part].shape != diagonal[part].shape:
                    shapes = tuple(full[part].shape), tuple(diagonal[part].shape)
                    raise ValueError(f"mask of {part!r} has shape {shapes[0]}, the parameter {shapes[1]}")
            packed[name] = layer.pack(full)
        old, self._masks = self._masks, packed
        for name, mask in packed.items():
            operator = self.unmasked(name)
            newly = ~mask & old.get(name, torch.ones_like(mask))
            if isinstance(operator, Gram) and operator.can_remove and bool(newly.any()):
                operator.remove_(newly)

    def describe(self) -> str:
        """A table of layers: shape, structure, size of λ, and what was simplified."""
        rows = [f"{'layer':<32} {'shape':>14} {'structure':<28} {'λ':>10}"]
        for name, layer in self.layers.items():
            operator = self.unmasked(name)
            count = sum(p.numel() for p in operator.parameters())
            shape = "×".join(map(str, layer.shape))
            note = self.notes.get(name, "")
            rows.append(f"{name:<32} {shape:>14} {structure_name(operator):<28} {count:>10,} {note}")
        return "\n".join(rows)

    def get_extra_state(self) -> dict[str, Any]:
        return {"masks": dict(self._masks), "seen": dict(self._seen)}

    def set_extra_state(self, state: Any) -> None:
        self._masks, self._seen = dict(state["masks"]), dict(state.get("seen", {}))
        self._follow()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> InverseFisher:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._follow()
        return self

    def _follow(self) -> None:
        """Put what is no tensor of a module where Q is."""
        for found in (self._masks, self._seen):
            found.update({name: rows.to(self.reference(name).device) for name, rows in found.items()})

    def reference(self, name: str) -> Tensor:
        """A tensor of the layer's Q block, for its dtype and device."""
        operator = self.unmasked(name)
        tensors = chain(operator.parameters(), operator.buffers())
        return next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0))
