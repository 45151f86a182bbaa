"""What is known about the channels of a traced model, while its operations are visited one after another.

A *channel* is a set of indices that can only be removed together: a row of a weight, the entries of the
BatchNorm that it passes through, the columns that read it, and the same of every row that is added to it.
Channels have numbers. Channels that turn out to belong together are joined (union-find). A channel that must
not be removed is pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fishleg.shrinking.operations import shape_of

PINNED = -1
"""The number in place of a channel for an index that cannot be removed."""


@dataclass(frozen=True)
class Channels:
    """The channels of a tensor along one of its dimensions.

    Args:
        dim: The dimension, counted from the end (negative).
        ids: The channel of each index, [size].
        zero: Whether all entries at an index are zero for every input of the model, [size].
    """

    dim: int
    ids: Tensor
    zero: Tensor


KnownChannels = Channels | list[Channels | None] | None
"""The channels of an operation's result: of one tensor, or of each of several; None if not known."""


@dataclass(frozen=True)
class Reader:
    """A weight and the channels that it reads.

    Args:
        rows: The channels that it produces, [out].
        columns: The channels that it reads.
        nonzero: Which of its entries (kernels of a convolution) are not zero, [out, in].
    """

    rows: Tensor
    columns: Channels
    nonzero: Tensor


class ChannelState:
    """The channels found so far: their numbers, the parameters they belong to, and who reads them.

    Args:
        names: By placeholder of the traced graph, the name of its parameter or buffer.
        tensors: The parameters and buffers by name.
        fixed: Parameters and buffers of which nothing may be removed.

    Attributes:
        known: The channels of each node.
        places: By parameter name and dimension, the channels of its indices.
        readers: All weights that read channels.
        moves: Nodes that move entries, and must be checked on the smaller model.
    """

    def __init__(
        self, names: Mapping[str, str], tensors: Mapping[str, Tensor], fixed: Collection[str]
    ) -> None:
        self._names, self._tensors = names, tensors
        self._parents: list[int] = []  # union-find: joined channels have the same root
        self._pinned: set[int] = set()
        self._fixed = set(fixed)
        self.known: dict[Node, KnownChannels] = {}
        self.places: dict[str, dict[int, Tensor]] = {}
        self.readers: list[Reader] = []
        self.moves: list[Node] = []

    def new(self, count: int) -> Tensor:
        """Create new channels.

        Args:
            count: How many.

        Returns:
            Their numbers, [count].
        """
        first = len(self._parents)
        self._parents += range(first, first + count)
        return torch.arange(first, first + count)

    def join(self, first: Tensor, second: Tensor) -> Tensor:
        """Join channels index by index: they can only be removed together.

        Args:
            first: Channels, [size].
            second: Channels, [size].

        Returns:
            The joined channels, [size]; `PINNED` where either is pinned by this number.
        """
        for a, b in zip(first.tolist(), second.tolist(), strict=True):
            if PINNED in (a, b):
                self._pinned |= {max(a, b)} - {PINNED}
            else:
                self._parents[self._root(a)] = self._root(b)
        return torch.where(first == PINNED, first, second)

    def pin(self, ids: Tensor) -> None:
        """Mark channels as not removable.

        Args:
            ids: The channels, [size].
        """
        self._pinned |= set(ids.tolist()) - {PINNED}

    def pin_inputs(self, node: Node) -> None:
        """Mark all channels that an operation reads as not removable, and fix its parameters.

        Args:
            node: The operation.
        """
        for source in node.all_input_nodes:
            known = self.known.get(source)
            for channels in known if isinstance(known, list) else [known]:
                if channels is not None:
                    self.pin(channels.ids)
            if self.is_parameter(source):
                self._fixed.add(self._names[source.name])

    def pin_fixed(self) -> None:
        """Pin the channels of all parameters of which nothing may be removed."""
        for name in self._fixed & self.places.keys():
            for ids in self.places[name].values():
                self.pin(ids)

    def pinned_and_roots(self) -> tuple[list[int], Tensor]:
        """Return the pinned channels, and the channel that represents each set of joined channels.

        Returns:
            The numbers of the pinned channels; and the representatives [channels + 1], of which the last one
            stands for `PINNED`.
        """
        count = len(self._parents)
        return list(self._pinned), torch.tensor([self._root(i) for i in range(count)] + [count])

    def place(self, node: Any, dim: int, ids: Tensor) -> None:
        """Record the channels of a parameter along one dimension.

        Args:
            node: The placeholder of the parameter; None (a missing bias) is ignored.
            dim: The dimension.
            ids: The channels of its indices, [size].
        """
        if node is None:
            return
        places = self.places.setdefault(self._names[node.name], {})
        places[dim] = self.join(places[dim], ids) if dim in places else ids

    def places_of(self, node: Node) -> dict[int, Tensor]:
        """Return the recorded channels of a parameter, by dimension.

        Args:
            node: The placeholder of the parameter.

        Returns:
            The channels of its indices; empty if none are recorded.
        """
        return self.places.get(self._names[node.name], {})

    def of(self, node: Any) -> Channels | None:
        """Return the channels of a node that is a single tensor.

        Args:
            node: A node, or a constant argument.

        Returns:
            The channels, or None if they are not known.
        """
        found = self.known.get(node) if isinstance(node, Node) else None
        return found if isinstance(found, Channels) else None

    def tensor(self, node: Any) -> Tensor | None:
        """Return the parameter or buffer that a node stands for.

        Args:
            node: A node, or a constant argument.

        Returns:
            The tensor, or None if the node is no placeholder of one.
        """
        return self._tensors[self._names[node.name]] if self.is_parameter(node) else None

    def is_parameter(self, node: Any) -> bool:
        """Return whether a node stands for a parameter or buffer.

        Args:
            node: A node, or a constant argument.

        Returns:
            True for a placeholder of one.
        """
        return isinstance(node, Node) and node.name in self._names

    def are_parameters(self, *nodes: Any) -> bool:
        """Return whether all nodes are parameters, buffers or None.

        Args:
            *nodes: Arguments of an operation.

        Returns:
            False if one of them is computed by the model.
        """
        return all(node is None or self.is_parameter(node) for node in nodes)

    def spread(self, node: Node, part: Callable[[Channels], Tensor], default: Any) -> Tensor:
        """Expand a property of channels to every entry of a tensor.

        Args:
            node: The tensor.
            part: Selects `ids` or `zero` of its channels.
            default: The value if the channels are not known.

        Returns:
            A tensor of the shape of the node.
        """
        shape, known = shape_of(node), self.of(node)
        if known is None:
            return torch.full(shape, default)
        return part(known).view([-1, *[1] * (-known.dim - 1)]).expand(shape).contiguous()

    def spread_ids(self, node: Node) -> Tensor:
        """Return the channel of every entry of a tensor.

        Args:
            node: The tensor.

        Returns:
            A tensor of the shape of the node; `PINNED` if its channels are not known.
        """
        return self.spread(node, lambda channels: channels.ids, PINNED)

    def _root(self, i: int) -> int:
        """Return the representative of a channel, and shorten the path to it."""
        while self._parents[i] != i:
            self._parents[i] = self._parents[self._parents[i]]
            i = self._parents[i]
        return i


def fits(channels: Channels, node: Node) -> bool:
    """Return whether channels agree with the shape of a tensor.

    Args:
        channels: The channels.
        node: The tensor.

    Returns:
        True if there is one channel for each index.
    """
    shape = shape_of(node)
    return len(shape) >= -channels.dim and shape[channels.dim] == len(channels.ids) == len(channels.zero)


def along_one_dimension(ids: Tensor, zero: Tensor) -> Channels | None:
    """Collect the channels of single entries into channels along one dimension.

    Args:
        ids: The channel of every entry of a tensor.
        zero: Whether the entry is zero for every input, of the same shape.

    Returns:
        The channels, or None if the channels of the entries do not differ along exactly one dimension.
    """
    if not ids.numel():
        return None
    differ = [d for d in range(ids.dim()) if bool((ids != ids.narrow(d, 0, 1)).any())]
    if len(differ) != 1:
        return None
    dim = differ[0]
    return Channels(
        dim - ids.dim(),
        ids.movedim(dim, 0).flatten(1)[:, 0].clone() if ids.dim() > 1 else ids,
        zero.movedim(dim, 0).flatten(1).all(1) if zero.dim() > 1 else zero,
    )
