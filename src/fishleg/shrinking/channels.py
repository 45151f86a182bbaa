"""Which channels of a model nobody needs: what can be cut out of it without changing its outputs.

The model is traced (torch.export) and each tensor in it is followed along the dimension of its channels. A
*channel* is all that has to go together: a row of a weight, the places in BatchNorm that it passes through,
the columns that read it, and the same of every other row that is added to it. A channel is needed if it
reaches the outputs, goes somewhere that is not understood, or is read by a weight that is not zero while it
is not zero itself. Whatever is in doubt is needed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fishleg.shrinking.operations import (
    BINARY,
    ELEMENTWISE,
    MOVES,
    POOLS,
    REDUCTIONS,
    SIZED,
    arguments,
    as_list,
    operation,
    overwritten,
    run_on,
    shape_of,
    without_device,
)

_STAYS = -1  # in place of a channel's number: an index that cannot be cut


@dataclass(frozen=True)
class Channels:
    """What is known of a tensor along one of its dimensions."""

    dim: int  # counted from the end
    ids: Tensor  # [size]: the channel of each index
    zero: Tensor  # [size]: whether all entries are zero there, whatever the model's input


@dataclass(frozen=True)
class _Reader:
    """A weight and the channels that it reads."""

    rows: Tensor  # [out]: channels that it makes
    columns: Channels
    nonzero: Tensor  # [out, in]


class ChannelGraph:
    """The channels of a traced model, and which of them are needed."""

    def __init__(
        self,
        graph: Graph,
        names: Mapping[str, str],
        tensors: Mapping[str, Tensor],
        fixed: Collection[str] = (),
    ) -> None:
        """`names`: the parameter or buffer that each placeholder stands for; `tensors` by those names.

        Nothing is cut out of those that are `fixed`.
        """
        self._names, self._tensors = names, tensors
        self._parents: list[int] = []  # of each channel: those that were joined are one tree
        self._stays: set[int] = set()
        self._fixed = set(fixed)  # and parameters that are used in ways that are not understood
        self._known: dict[Node, Channels | list[Channels | None] | None] = {}
        self._readers: list[_Reader] = []
        self._moves: list[Node] = []
        self._overwritten = overwritten(graph)
        self.places: dict[str, dict[int, Tensor]] = {}  # by parameter and dimension: channels of its indices
        with torch.no_grad():
            for node in graph.nodes:
                self._visit(node)
            for name in self._fixed & self.places.keys():
                for ids in self.places[name].values():
                    self._pin(ids)
            self.needed = self._find_needed()

    def keep(self, name: str, dim: int) -> Tensor:
        """Which indices of a parameter must stay."""
        return self.needed[self.places[name][dim]]

    # -- channels

    def _new(self, count: int) -> Tensor:
        first = len(self._parents)
        self._parents += range(first, first + count)
        return torch.arange(first, first + count)

    def _root(self, i: int) -> int:
        while self._parents[i] != i:
            self._parents[i] = self._parents[self._parents[i]]
            i = self._parents[i]
        return i

    def _join(self, first: Tensor, second: Tensor) -> Tensor:
        """The two go together from now on, index by index."""
        for a, b in zip(first.tolist(), second.tolist(), strict=True):
            if _STAYS in (a, b):
                self._stays |= {max(a, b)} - {_STAYS}
            else:
                self._parents[self._root(a)] = self._root(b)
        return torch.where(first == _STAYS, first, second)

    def _pin(self, ids: Tensor) -> None:
        self._stays |= set(ids.tolist()) - {_STAYS}

    def _place(self, node: Any, dim: int, ids: Tensor) -> None:
        """These are the channels of a parameter's indices; None, for a bias that is not there, has none."""
        if node is None:
            return
        places = self.places.setdefault(self._names[node.name], {})
        places[dim] = self._join(places[dim], ids) if dim in places else ids

    def _tensor(self, node: Any) -> Tensor | None:
        """The parameter or buffer that a node stands for."""
        return self._tensors[self._names[node.name]] if self._is_parameter(node) else None

    def _is_parameter(self, node: Any) -> bool:
        return isinstance(node, Node) and node.name in self._names

    def _of(self, node: Any) -> Channels | None:
        found = self._known.get(node) if isinstance(node, Node) else None
        return found if isinstance(found, Channels) else None

    # -- the walk

    def _visit(self, node: Node) -> None:
        if node.op == "placeholder":
            return
        name, inplace = operation(node)
        rule = self._rule(name, node)
        if node.op == "call_function" and rule is None and not node.users and not inplace:
            return  # an assertion, or a result that nobody wants
        result = None if rule is None else rule(node)
        if isinstance(result, Channels) and not _fits(result, node):
            result = None
        if result is None or node in self._overwritten:
            self._pin_inputs(node)
            if isinstance(result, Channels):
                self._pin(result.ids)
            result = None
        self._known[node] = result
        if inplace and isinstance(node.args[0], Node):
            self._known[node.args[0]] = result

    def _rule(
        self, name: str, node: Node
    ) -> Callable[[Node], Channels | list[Channels | None] | None] | None:
        """How channels go through an operation; a rule returns None where it does not understand."""
        if node.op != "call_function":
            return None
        if node.target is operator.getitem:
            return self._item
        special = {
            "linear": self._linear, "conv1d": self._conv, "conv2d": self._conv, "conv3d": self._conv,
            "batch_norm": self._batch_norm, "prelu": self._prelu, "pad": self._pad,
            "constant_pad_nd": self._pad,
        }  # fmt: skip
        if name in special:
            return special[name]
        groups = (
            (ELEMENTWISE, self._elementwise), (POOLS, self._pool),
            (REDUCTIONS, self._reduction), (BINARY, self._binary), (MOVES, self._move),
        )  # fmt: skip
        return next((rule for names, rule in groups if name in names), None)

    def _pin_inputs(self, node: Node) -> None:
        for source in node.all_input_nodes:
            known = self._known.get(source)
            for channels in known if isinstance(known, list) else [known]:
                if channels is not None:
                    self._pin(channels.ids)
            if self._is_parameter(source):
                self._fixed.add(self._names[source.name])

    # -- rules

    def _linear(self, node: Node) -> Channels | None:
        return self._matrix(node, dim=-1)

    def _conv(self, node: Node) -> Channels | None:
        x, weight, bias = arguments(node, "input", "weight", "bias")
        w, known = self._tensor(weight), self._of(x)
        if w is None:
            return None
        dim = 1 - w.dim()
        if shape_of(x)[dim] == w.shape[1]:
            return self._matrix(node, dim)
        depthwise = w.shape[1] == 1 and w.shape[0] == shape_of(x)[dim]
        if not depthwise or known is None or known.dim != dim or not self._usable(weight, bias):
            return None
        self._place(weight, 0, known.ids)
        self._place(bias, 0, known.ids)
        silent = known.zero | (w.flatten(1) == 0).all(1)
        return replace(known, zero=silent & self._is_zero(bias, silent))

    def _matrix(self, node: Node, dim: int) -> Channels | None:
        """A weight [out, in, ...] that reads channels along `dim` and makes new ones."""
        x, weight, bias = arguments(node, "input", "weight", "bias")
        w, known = self._tensor(weight), self._of(x)
        if w is None or w.dim() < 2 or not self._usable(weight, bias):
            return None
        nonzero = (w.flatten(2) != 0).any(2) if w.dim() > 2 else w != 0
        if known is not None and known.dim != dim:
            self._pin(known.ids)
            known = None
        rows = self.places.get(self._names[weight.name], {}).get(0)
        rows = self._new(w.shape[0]) if rows is None else rows
        self._place(weight, 0, rows)
        self._place(bias, 0, rows)
        if known is None:  # also what it read before must stay, where it is used twice
            self._place(weight, 1, torch.full((w.shape[1],), _STAYS))
            silent = ~nonzero.any(1)
        else:
            self._place(weight, 1, known.ids)
            self._readers.append(_Reader(rows, known, nonzero))
            silent = ~(nonzero & ~known.zero).any(1)
        if not node.users:  # nobody wants this now; in training somebody may
            self._pin(rows)
        return Channels(dim, rows, silent & self._is_zero(bias, silent))

    def _usable(self, *nodes: Any) -> bool:
        return all(node is None or self._is_parameter(node) for node in nodes)

    def _is_zero(self, node: Any, like: Tensor) -> Tensor:
        value = self._tensor(node)
        return torch.ones_like(like) if value is None else value == 0

    def _batch_norm(self, node: Node) -> Channels | None:
        x, *parts = arguments(node, "input", "weight", "bias", "running_mean", "running_var")
        known = self._of(x)
        if known is None or known.dim != 1 - len(shape_of(x)) or not self._usable(*parts):
            return None
        for part in parts:
            self._place(part, 0, known.ids)
        weight, bias, mean, _ = (self._tensor(part) for part in parts)
        shift = torch.zeros_like(known.zero) if bias is None else bias != 0
        moved = torch.zeros_like(known.zero) if mean is None else mean != 0  # what was zero is not any more
        flat = torch.zeros_like(known.zero) if weight is None else weight == 0
        return replace(known, zero=~shift & (flat | (known.zero & ~moved)))

    def _prelu(self, node: Node) -> Channels | None:
        known, slopes = self._of(node.args[0]), self._tensor(node.args[1])
        if known is None or slopes is None or (slopes.numel() > 1 and known.dim != 1 - len(shape_of(node))):
            return None
        if slopes.numel() > 1:
            self._place(node.args[1], 0, known.ids)
        return known

    def _elementwise(self, node: Node) -> Channels | None:
        known = self._of(node.args[0])
        if known is None or any(isinstance(other, Node) for other in node.args[1:]):
            return known if known is not None and node.target is torch.ops.aten.type_as.default else None
        assert callable(node.target)
        preserved = not bool(node.target(torch.zeros(1), *node.args[1:], **without_device(node)).any())
        return known if preserved else replace(known, zero=torch.zeros_like(known.zero))

    def _pool(self, node: Node) -> Channels | None:
        known, (name, _) = self._of(node.args[0]), operation(node)
        spatial = int(name[-2])
        return known if known is not None and known.dim < -spatial else None

    def _reduction(self, node: Node) -> Channels | None:
        known = self._of(node.args[0])
        dims, keepdim = arguments(node, "self", "dim", "keepdim")[1:]
        if known is None or dims is None:
            return None
        rank = len(shape_of(node.args[0]))
        gone = sorted({d % rank for d in ([dims] if isinstance(dims, int) else dims)} or range(rank))
        place = known.dim % rank
        if place in gone:
            return None
        return known if keepdim else replace(known, dim=known.dim + sum(d > place for d in gone))

    def _binary(self, node: Node) -> Channels | None:
        product = str(node.target).split(".")[1].startswith(("mul", "div"))
        quotient = "div" in str(node.target)
        sides = [self._of(side) for side in node.args[:2]]
        known = next((side for side in sides if side is not None), None)
        if known is None or any(side is not None and side.dim != known.dim for side in sides):
            return None
        if len(known.ids) == 1 and all(side is not None for side in sides):  # spread over the other's
            known = max((side for side in sides if side is not None), key=lambda side: len(side.ids))
        zeros: list[Tensor] = []
        ids = known.ids
        for side, argument in zip(sides, node.args[:2], strict=True):
            if side is not None and len(side.ids) == len(ids):
                ids = self._join(ids, side.ids)
                zeros.append(side.zero)
                continue
            if side is not None:
                self._pin(side.ids)
            zero = self._zeros_of_other(argument, known.dim, ids)
            if zero is None:
                return None
            zeros.append(zero)
        zero = zeros[0] if quotient else zeros[0] | zeros[1] if product else zeros[0] & zeros[1]
        return Channels(known.dim, ids, zero)

    def _zeros_of_other(self, argument: Any, dim: int, ids: Tensor) -> Tensor | None:
        """Where the other operand is zero, along a dimension; None if it has channels that cannot be cut."""
        if not isinstance(argument, Node):
            return torch.full((len(ids),), argument == 0)
        shape = shape_of(argument)
        if len(shape) < -dim or shape[dim] == 1:
            return torch.zeros(len(ids), dtype=torch.bool)
        value = self._tensor(argument)
        if value is None or shape[dim] != len(ids):
            return None
        self._place(argument, value.dim() + dim, ids)
        return (value == 0).movedim(dim, 0).reshape(len(ids), -1).all(1)

    def _pad(self, node: Node) -> Channels | None:
        known = self._of(node.args[0])
        widths: Any = node.args[1]
        rest = [*node.args[2:], *node.kwargs.values()]
        if known is None or any(isinstance(extra, str) and extra != "constant" for extra in rest):
            return None
        value = next((extra for extra in rest if isinstance(extra, (int, float))), 0)
        place = 2 * (-known.dim - 1)
        before, after = widths[place : place + 2] if len(widths) > place else (0, 0)
        if min(before, after) < 0:
            return None
        zero = known.zero if value == 0 else torch.zeros_like(known.zero)
        edges = [torch.full((n,), _STAYS) for n in (before, after)]
        blanks = [torch.full((n,), value == 0) for n in (before, after)]
        return Channels(
            known.dim, torch.cat([edges[0], known.ids, edges[1]]), torch.cat([blanks[0], zero, blanks[1]])
        )

    def _move(self, node: Node) -> Channels | list[Channels | None] | None:
        """Move the channels' numbers as the entries are moved, and see along which dimension they lie."""
        if not any(self._of(source) for source in node.all_input_nodes):
            return None
        ids = run_on(node, lambda source: self._spread(source, lambda c: c.ids, _STAYS))
        zero = run_on(node, lambda source: self._spread(source, lambda c: c.zero, False))
        if operation(node)[0] not in SIZED:
            self._moves.append(node)
        if isinstance(ids, Tensor):
            return _along_one(ids, zero)
        found = [_along_one(i, z) for i, z in zip(ids, zero, strict=True)]
        return None if any(part is None for part in found) else found

    def _spread(self, source: Node, part: Callable[[Channels], Tensor], other: Any) -> Tensor:
        """What is known of a tensor's channels, for each of its entries."""
        shape, known = shape_of(source), self._of(source)
        if known is None:
            return torch.full(shape, other)
        return part(known).view([-1, *[1] * (-known.dim - 1)]).expand(shape).contiguous()

    def _commutes(self, node: Node, needed: Tensor) -> bool:
        """Whether a move does in the cut model what it did: x[:, 2:4] of fewer channels may be others."""

        def cut(ids: Tensor, dim: int) -> Tensor:
            return ids.index_select(dim, needed[ids.movedim(dim, 0).flatten(1)[:, 0]].nonzero().flatten())

        def of(source: Node) -> Tensor:
            ids, known = self._spread(source, lambda c: c.ids, _STAYS), self._of(source)
            return ids if known is None else cut(ids, known.dim)

        try:
            after = as_list(run_on(node, of))
        except (RuntimeError, IndexError):
            return False
        before = as_list(run_on(node, lambda source: self._spread(source, lambda c: c.ids, _STAYS)))
        known = as_list(self._known[node])
        return len(after) == len(before) and all(
            k is not None and torch.equal(a, cut(b, k.dim))
            for a, b, k in zip(after, before, known, strict=True)
        )

    def _item(self, node: Node) -> Channels | None:
        known, index = self._known.get(node.args[0]), node.args[1]  # type: ignore[arg-type]
        return known[index] if isinstance(known, list) and isinstance(index, int) else None

    # -- who needs whom

    def _find_needed(self) -> Tensor:
        """[channels + 1], the last one for indices that stay."""
        while True:
            needed = self._needed_now()
            wrong = [node for node in self._moves if self._known[node] and not self._commutes(node, needed)]
            if not wrong:
                return needed
            for node in wrong:  # each pins what it was not before: this ends
                self._pin_inputs(node)
                self._moves.remove(node)

    def _needed_now(self) -> Tensor:
        roots = torch.tensor([self._root(i) for i in range(len(self._parents))] + [len(self._parents)])
        needed = torch.zeros(len(roots), dtype=torch.bool)
        needed[_STAYS] = True
        needed[roots[list(self._stays)]] = True
        while True:
            before = int(needed.sum())
            for reader in self._readers:
                wanted = reader.nonzero[needed[roots[reader.rows]]].any(0) & ~reader.columns.zero
                needed[roots[reader.columns.ids[wanted]]] = True
            if int(needed.sum()) > before:
                continue
            empty = [ids for places in self.places.values() for ids in places.values()]
            empty = [ids for ids in empty if not bool(needed[roots[ids]].any())]
            if not empty:
                return needed[roots]
            needed[roots[empty[0][0]]] = True  # no layer is emptied


def _fits(channels: Channels, node: Node) -> bool:
    """As many channels as there are places for them."""
    shape = shape_of(node)
    return len(shape) >= -channels.dim and shape[channels.dim] == len(channels.ids) == len(channels.zero)


def _along_one(ids: Tensor, zero: Tensor) -> Channels | None:
    """Channels from the number of each entry, if these differ along one dimension only."""
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
