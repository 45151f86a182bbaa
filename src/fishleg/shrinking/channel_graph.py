"""Which channels of a model are needed: what can be removed from it without changing its outputs.

The model is traced with `torch.export`, and the channels of each tensor are followed through the graph. A
channel is needed if it reaches the outputs, if it enters an operation without a rule, or if it is not zero
and is read by a weight that is not zero. In case of doubt a channel is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fishleg.shrinking.channels import Channels, ChannelState, fits
from fishleg.shrinking.operations import as_list, operation, overwritten, run_on
from fishleg.shrinking.rules import rule_for


class ChannelGraph:
    """The channels of a traced model, and which of them are needed.

    Args:
        graph: The traced graph.
        names: By placeholder of the graph, the name of its parameter or buffer.
        tensors: The parameters and buffers by name, on the CPU.
        fixed: Parameters and buffers of which nothing may be removed.
    """

    def __init__(
        self,
        graph: Graph,
        names: Mapping[str, str],
        tensors: Mapping[str, Tensor],
        fixed: Collection[str] = (),
    ) -> None:
        self._state = ChannelState(names, tensors, fixed)
        self._overwritten = overwritten(graph)
        with torch.no_grad():
            for node in graph.nodes:
                self._visit(node)
            self._state.pin_fixed()
            self._needed = self._find_needed()

    @property
    def places(self) -> Mapping[str, Mapping[int, Tensor]]:
        """By parameter name and dimension, the channels of its indices."""
        return self._state.places

    def keep(self, name: str, dim: int) -> Tensor:
        """Return which indices of a parameter are needed.

        Args:
            name: The name of the parameter or buffer.
            dim: The dimension.

        Returns:
            A boolean tensor [size].
        """
        return self._needed[self._state.places[name][dim]]

    def _visit(self, node: Node) -> None:
        """Record the channels of an operation's result; pin those it reads if it has no rule."""
        if node.op == "placeholder":
            return
        state, inplace = self._state, operation(node)[1]
        rule = rule_for(node)
        if node.op == "call_function" and rule is None and not node.users and not inplace:
            return  # an assertion, or a result that is not used
        result = None if rule is None else rule(state, node)
        if isinstance(result, Channels) and not fits(result, node):
            result = None
        if result is None or node in self._overwritten:
            state.pin_inputs(node)
            if isinstance(result, Channels):
                state.pin(result.ids)
            result = None
        state.known[node] = result
        if inplace and isinstance(node.args[0], Node):
            state.known[node.args[0]] = result

    def _find_needed(self) -> Tensor:
        """Return which channels are needed, [channels + 1]; the last entry is that of `PINNED`."""
        state = self._state
        while True:
            needed = self._needed_by_readers()
            wrong = [node for node in state.moves if state.known[node] and not self._commutes(node, needed)]
            if not wrong:
                return needed
            for node in wrong:  # this ends, because each time a node is removed from the moves
                state.pin_inputs(node)
                state.moves.remove(node)

    def _needed_by_readers(self) -> Tensor:
        """Return the channels that are pinned, or needed to compute needed channels, [channels + 1]."""
        state = self._state
        pinned, roots = state.pinned_and_roots()
        needed = torch.zeros(len(roots), dtype=torch.bool)
        needed[-1] = True
        needed[roots[pinned]] = True
        while True:
            before = int(needed.sum())
            for reader in state.readers:
                read = reader.nonzero[needed[roots[reader.rows]]].any(0) & ~reader.columns.zero
                needed[roots[reader.columns.ids[read]]] = True
            if int(needed.sum()) > before:
                continue
            empty = [ids for places in state.places.values() for ids in places.values()]
            empty = [ids for ids in empty if not bool(needed[roots[ids]].any())]
            if not empty:
                return needed[roots]
            needed[roots[empty[0][0]]] = True  # every layer keeps at least one channel

    def _commutes(self, node: Node, needed: Tensor) -> bool:
        """Return whether a move gives the same entries before and after the removal of channels.

        For example, `x[:, 2:4]` may select other channels of the smaller model.
        """
        state = self._state

        def reduced(ids: Tensor, dim: int) -> Tensor:
            return ids.index_select(dim, needed[ids.movedim(dim, 0).flatten(1)[:, 0]].nonzero().flatten())

        def reduced_input(source: Node) -> Tensor:
            ids, known = state.spread_ids(source), state.of(source)
            return ids if known is None else reduced(ids, known.dim)

        try:
            after = as_list(run_on(node, reduced_input))
        except (RuntimeError, IndexError):
            return False
        before = as_list(run_on(node, state.spread_ids))
        known = as_list(state.known[node])
        return len(after) == len(before) and all(
            k is not None and torch.equal(a, reduced(b, k.dim))
            for a, b, k in zip(after, before, known, strict=True)
        )
