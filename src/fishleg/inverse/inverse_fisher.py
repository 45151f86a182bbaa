"""InverseFisher: one operator per layer, together the block-diagonal Q of a whole model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.curvature.layers import Layer, find_layers
from fishleg.inverse.operators import Gram, Masked, Operator
from fishleg.inverse.structures import (
    DEFAULT_STRUCTURE,
    STRUCTURES,
    Structure,
    StructureLimits,
    build_operator,
    structure_name,
)
from fishleg.runtime.process_group import get_logger

logger = get_logger(__name__)


class InverseFisher(nn.Module):
    """Q ≈ (F+γI)⁻¹ of a model, block-diagonal over layers.

    Tensors go in and out by parameter name, in the shapes of the parameters. Inside, the weight and bias of
    a layer are packed into one matrix, by layer name.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> q = InverseFisher.from_model(model)
    >>> sorted(q.diag()) == sorted(name for name, _ in model.named_parameters())
    True

    Args:
        layers: The layers that Q covers.
        operators: The operator of each layer, by layer name.

    Attributes:
        layers: The layers by name.
        notes: How the structure of a layer was simplified, by layer name; only layers where it was.
    """

    def __init__(self, layers: list[Layer], operators: Mapping[str, Operator]) -> None:
        super().__init__()
        self.layers = {layer.name: layer for layer in layers}
        # The leading slash prevents a clash of a layer called `keys` or `values` with methods of ModuleDict.
        self._keys = {name: "/" + name.replace(".", "/") for name in self.layers}
        self._operators = nn.ModuleDict({self._keys[name]: operators[name] for name in self.layers})
        self.notes = {name: operators[name].note for name in self.layers if operators[name].note}
        self._masks: dict[str, Tensor] = {}
        self._sampled_rows: dict[str, Tensor] = {}  # by embedding: rows with a gradient in some sample

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
        layers: list[Layer] | None = None,
    ) -> InverseFisher:
        """Make one operator per layer of a model, with Q = scale · I.

        Args:
            model: The model. Its frozen parameters are not covered.
            structure: One of `STRUCTURES`, or a function from a layer to its operator.
            scale: The multiple of the identity. None: Q = I, or the operators as the function built them.
            block_size: The size of the blocks of a block-diagonal Q.
            max_factor_dim: The largest dimension of a full factor. A larger side is split (convolutions), cut
                into blocks or made diagonal, with a warning in the log.
            split_conv: Whether every convolution's input side is split into channel ⊗ kernel.
            layers: The layers of the model; default: they are looked for.

        Returns:
            The inverse Fisher matrix, on the devices of the parameters, in float32 or float64.

        Raises:
            ValueError: An argument is out of its range, or the model has no trainable parameters.
        """
        if scale is not None and not (scale > 0 and math.isfinite(scale)):
            raise ValueError(f"scale must be > 0 and finite, got {scale}")
        if isinstance(structure, str) and structure not in STRUCTURES:
            raise ValueError(f"structure must be one of {', '.join(STRUCTURES)}, got {structure!r}")
        if block_size < 1 or max_factor_dim < 1:
            raise ValueError(
                f"block_size and max_factor_dim must be >= 1, got {block_size} and {max_factor_dim}"
            )
        layers = find_layers(model) if layers is None else layers
        if not layers:
            raise ValueError("the model has no trainable parameters (requires_grad is False for all of them)")
        limits = StructureLimits(block_size, max_factor_dim, split_conv)
        parameters = dict(model.named_parameters())
        operators = {}
        for layer in layers:
            weight = parameters[layer.weight]
            dtype = weight.dtype if weight.dtype in (torch.float32, torch.float64) else torch.float32
            operators[layer.name] = build_operator(structure, layer, limits).to(weight.device, dtype)
        inverse = cls(layers, operators)
        for name, note in inverse.notes.items():
            logger.warning("%s: %s", name, note)
        if scale is not None:
            inverse.set_scale_(scale)
        return inverse

    def operator(self, name: str) -> Operator:
        """Return the Q block of a layer, restricted to its mask if it has one.

        Args:
            name: The name of the layer.

        Returns:
            The operator.
        """
        inner = self.unmasked(name)
        return Masked(inner, self._masks[name]) if name in self._masks else inner

    def unmasked(self, name: str) -> Operator:
        """Return the Q block of a layer before any restriction.

        Args:
            name: The name of the layer.

        Returns:
            The operator.
        """
        operator = self._operators[self._keys[name]]
        assert isinstance(operator, Operator)
        return operator

    def mask(self, name: str) -> Tensor | None:
        """Return the packed mask of a layer.

        Args:
            name: The name of the layer.

        Returns:
            The mask, boolean, True = kept, [*layer.shape]; None where the layer is not restricted.
        """
        return self._masks.get(name)

    def pack(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Pack tensors by parameter into tensors by layer, in the dtype of Q.

        Args:
            tensors: Tensors by parameter name, [..., *parameter.shape].

        Returns:
            Tensors by layer name, [..., *layer.shape]. A layer is left out unless all its parameters are
            given.
        """
        packed = {}
        for name, layer in self.layers.items():
            if all(part in tensors for part in layer.names):
                value = layer.pack(tensors)
                packed[name] = value.to(self.reference(name).dtype) if value.is_floating_point() else value
        return packed

    def unpack(self, packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Unpack tensors by layer into tensors by parameter. This is the inverse of `pack`.

        Args:
            packed: Tensors by layer name, [..., *layer.shape].

        Returns:
            Tensors by parameter name, [..., *parameter.shape].
        """
        tensors: dict[str, Tensor] = {}
        for name, value in packed.items():
            tensors.update(self.layers[name].unpack(value))
        return tensors

    def record_sampled_rows(self, samples: Mapping[str, Tensor]) -> None:
        """Record which rows of each embedding have a gradient in the samples that Q learns from.

        Args:
            samples: Packed samples h by layer name, [groups, *layer.shape].
        """
        for name, value in samples.items():
            if self.layers[name].is_embedding:
                rows = (value != 0).any(2).any(0)
                self._sampled_rows[name] = (
                    rows | self._sampled_rows[name] if name in self._sampled_rows else rows
                )

    def unseen(self, name: str) -> Tensor | None:
        """Return the rows of an embedding that no sample has looked up. Q knows nothing of them.

        Padding rows do not count as unseen: they never have a gradient.

        Args:
            name: The name of the layer.

        Returns:
            Boolean, True = unseen, [n_out]; None where no row is unseen, no sample was recorded, or the layer
            is not an embedding.
        """
        if name not in self._sampled_rows:
            return None
        rows = ~self._sampled_rows[name]
        rows[list(self.layers[name].padding)] = False
        return rows if bool(rows.any()) else None

    def matvec(self, tensors: Mapping[str, Tensor], *, extra_damping: float = 0.0) -> dict[str, Tensor]:
        """Compute Q v, or (Q⁻¹ + extra_damping·I)⁻¹ v.

        Args:
            tensors: v by parameter name, [..., *parameter.shape].
            extra_damping: Additional damping, ≥ 0.

        Returns:
            The products by parameter name. Layers that v does not cover are left out.
        """
        packed = self.pack(tensors)
        operators = {name: self.operator(name) for name in packed}
        products = {
            name: operators[name].damped_matvec(v, extra_damping)
            if extra_damping
            else operators[name].matvec(v)
            for name, v in packed.items()
        }
        for name, product in products.items():
            if (padding := self.layers[name].padding_rows(product.device)) is not None:
                # Padding has no gradient. Q must not move it by the gradients of other rows.
                products[name] = product.masked_fill(padding & (packed[name] == 0), 0)
        result = self.unpack(products)
        return {name: value.to(tensors[name].dtype) for name, value in result.items()}

    def diag(self) -> dict[str, Tensor]:
        """Compute the diagonal of Q.

        Returns:
            The diagonal by parameter name, [*parameter.shape].
        """
        return self.unpack({name: self.operator(name).diag() for name in self.layers})

    def trace(self) -> Tensor:
        """Compute Tr(Q) over all layers.

        Returns:
            The trace, a scalar tensor.
        """
        return torch.stack([self.operator(name).trace() for name in self.layers]).sum()

    def set_scale_(self, scale: float) -> None:
        """Set every block to scale · I.

        Args:
            scale: The multiple of the identity, > 0.
        """
        for name in self.layers:
            self.unmasked(name).set_scale_(scale)

    def restrict(self, masks: Mapping[str, Tensor]) -> None:
        """Restrict Q to M Q M, with M = diag(masks).

        A full factor is updated exactly to (F_MM+γI)⁻¹. Other structures become an approximation of it, which
        auxiliary steps then refine.

        Args:
            masks: Masks by parameter name, boolean, True = kept, [*parameter.shape]. They replace all earlier
                ones. An empty mapping removes the restriction.

        Raises:
            ValueError: A mask has an unknown name, is not boolean, or has another shape than its parameter.
        """
        packed = self._pack_masks(masks)
        old, self._masks = self._masks, packed
        for name, mask in packed.items():
            operator = self.unmasked(name)
            newly = ~mask & old.get(name, torch.ones_like(mask))
            if isinstance(operator, Gram) and operator.can_remove and bool(newly.any()):
                operator.remove_(newly)

    def _pack_masks(self, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
        return packed

    def describe(self) -> str:
        """Describe the layers in a table: shape, structure, number of parameters λ, and simplifications.

        Returns:
            The table, one line per layer.
        """
        rows = [f"{'layer':<32} {'shape':>14} {'structure':<28} {'λ':>10}"]
        for name, layer in self.layers.items():
            operator = self.unmasked(name)
            count = sum(p.numel() for p in operator.parameters())
            shape = "×".join(map(str, layer.shape))
            rows.append(f"{name:<32} {shape:>14} {structure_name(operator):<28} {count:>10,} {operator.note}")
        return "\n".join(rows)

    def reference(self, name: str) -> Tensor:
        """Return a tensor that has the dtype and the device of a layer's Q block.

        Args:
            name: The name of the layer.

        Returns:
            The first floating-point tensor of the operator.
        """
        operator = self.unmasked(name)
        tensors = chain(operator.parameters(), operator.buffers())
        return next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0))

    def get_extra_state(self) -> dict[str, Any]:
        """Return the masks and the sampled rows, for `state_dict`."""
        return {"masks": dict(self._masks), "seen": dict(self._sampled_rows)}

    def set_extra_state(self, state: Any) -> None:
        """Restore what `get_extra_state` returned.

        Args:
            state: The masks and the sampled rows.
        """
        self._masks, self._sampled_rows = dict(state["masks"]), dict(state.get("seen", {}))
        self._move_extra_state()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> InverseFisher:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._move_extra_state()
        return self

    def _move_extra_state(self) -> None:
        """Move the masks and the sampled rows to the devices of the operators."""
        for tensors in (self._masks, self._sampled_rows):
            tensors.update({name: value.to(self.reference(name).device) for name, value in tensors.items()})
