"""How channels pass through each operation: one function for each kind of operation.

A rule takes the state and a node, and returns the channels of the node's result. It returns None if it
cannot follow the channels; the channels that the node reads are then pinned. To support another operation,
write a rule and add it to `_RULES`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fishleg.shrinking.channels import (
    PINNED,
    Channels,
    ChannelState,
    KnownChannels,
    Reader,
    along_one_dimension,
)
from fishleg.shrinking.operations import (
    BINARY,
    ELEMENTWISE,
    MOVES,
    POOLS,
    REDUCTIONS,
    SIZED,
    arguments,
    operation,
    run_on,
    shape_of,
    without_device,
)

Rule = Callable[[ChannelState, Node], KnownChannels]
"""A rule: (state, node) → channels of the node's result, or None."""


def rule_for(node: Node) -> Rule | None:
    """Return the rule for an operation.

    Args:
        node: A node of the traced graph.

    Returns:
        The rule, or None if there is none.
    """
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return _item
    return _RULES.get(operation(node)[0])


def _linear(state: ChannelState, node: Node) -> Channels | None:
    """Return the channels after a linear layer, which are the last dimension."""
    return _matrix(state, node, dim=-1)


def _conv(state: ChannelState, node: Node) -> Channels | None:
    """Return the channels after a convolution; of grouped ones only depthwise convolutions are supported."""
    x, weight, bias = arguments(node, "input", "weight", "bias")
    w, known = state.tensor(weight), state.of(x)
    if w is None:
        return None
    dim = 1 - w.dim()
    if shape_of(x)[dim] == w.shape[1]:
        return _matrix(state, node, dim)
    depthwise = w.shape[1] == 1 and w.shape[0] == shape_of(x)[dim]
    if not depthwise or known is None or known.dim != dim or not state.are_parameters(weight, bias):
        return None
    state.place(weight, 0, known.ids)
    state.place(bias, 0, known.ids)
    zero = known.zero | (w.flatten(1) == 0).all(1)
    return replace(known, zero=zero & _is_zero(state, bias, zero))


def _matrix(state: ChannelState, node: Node, dim: int) -> Channels | None:
    """Return the channels after a weight [out, in, ...], which reads and produces channels along `dim`."""
    x, weight, bias = arguments(node, "input", "weight", "bias")
    w, known = state.tensor(weight), state.of(x)
    if w is None or w.dim() < 2 or not state.are_parameters(weight, bias):
        return None
    nonzero = (w.flatten(2) != 0).any(2) if w.dim() > 2 else w != 0
    if known is not None and known.dim != dim:
        state.pin(known.ids)
        known = None
    rows = state.places_of(weight).get(0)
    rows = state.new(w.shape[0]) if rows is None else rows
    state.place(weight, 0, rows)
    state.place(bias, 0, rows)
    if known is None:  # this also pins the channels of an earlier use of the same weight
        state.place(weight, 1, torch.full((w.shape[1],), PINNED))
        zero = ~nonzero.any(1)
    else:
        state.place(weight, 1, known.ids)
        state.readers.append(Reader(rows, known, nonzero))
        zero = ~(nonzero & ~known.zero).any(1)
    if not node.users:  # the result is not used in evaluation mode, but may be used in training
        state.pin(rows)
    return Channels(dim, rows, zero & _is_zero(state, bias, zero))


def _is_zero(state: ChannelState, node: Any, like: Tensor) -> Tensor:
    """Return which entries of a bias are zero; a missing bias is zero."""
    value = state.tensor(node)
    return torch.ones_like(like) if value is None else value == 0


def _batch_norm(state: ChannelState, node: Node) -> Channels | None:
    """Return the channels after BatchNorm.

    A channel is zero afterwards if its bias is zero, and either its weight is zero, or its input and its
    running mean are.
    """
    x, *parts = arguments(node, "input", "weight", "bias", "running_mean", "running_var")
    known = state.of(x)
    if known is None or known.dim != 1 - len(shape_of(x)) or not state.are_parameters(*parts):
        return None
    for part in parts:
        state.place(part, 0, known.ids)
    weight, bias, mean, _ = (state.tensor(part) for part in parts)
    no = torch.zeros_like(known.zero)
    has_bias = no if bias is None else bias != 0
    has_mean = no if mean is None else mean != 0  # subtracting the mean makes zeros non-zero
    scaled_to_zero = no if weight is None else weight == 0
    return replace(known, zero=~has_bias & (scaled_to_zero | (known.zero & ~has_mean)))


def _prelu(state: ChannelState, node: Node) -> Channels | None:
    """Return the channels after PReLU, with one slope for all channels or one for each."""
    known, slopes = state.of(node.args[0]), state.tensor(node.args[1])
    if known is None or slopes is None or (slopes.numel() > 1 and known.dim != 1 - len(shape_of(node))):
        return None
    if slopes.numel() > 1:
        state.place(node.args[1], 0, known.ids)
    return known


def _elementwise(state: ChannelState, node: Node) -> Channels | None:
    """Return the channels after f(x), computed entry by entry: zeros stay zeros if f(0) = 0."""
    known = state.of(node.args[0])
    if known is None or any(isinstance(other, Node) for other in node.args[1:]):
        return known if known is not None and node.target is torch.ops.aten.type_as.default else None
    assert callable(node.target)
    preserved = not bool(node.target(torch.zeros(1), *node.args[1:], **without_device(node)).any())
    return known if preserved else replace(known, zero=torch.zeros_like(known.zero))


def _pool(state: ChannelState, node: Node) -> Channels | None:
    """Return the channels after pooling or upsampling, which keep channels separate."""
    known, (name, _) = state.of(node.args[0]), operation(node)
    spatial = int(name[-2])
    return known if known is not None and known.dim < -spatial else None


def _reduction(state: ChannelState, node: Node) -> Channels | None:
    """Return the channels after a reduction over dimensions other than that of the channels."""
    known = state.of(node.args[0])
    dims, keepdim = arguments(node, "self", "dim", "keepdim")[1:]
    if known is None or dims is None:
        return None
    rank = len(shape_of(node.args[0]))
    reduced = sorted({d % rank for d in ([dims] if isinstance(dims, int) else dims)} or range(rank))
    dim = known.dim % rank
    if dim in reduced:
        return None
    return known if keepdim else replace(known, dim=known.dim + sum(d > dim for d in reduced))


def _binary(state: ChannelState, node: Node) -> Channels | None:
    """Return the channels after arithmetic on two operands: channels at the same index are joined."""
    product = str(node.target).split(".")[1].startswith(("mul", "div"))
    quotient = "div" in str(node.target)
    sides = [state.of(side) for side in node.args[:2]]
    known = next((side for side in sides if side is not None), None)
    if known is None or any(side is not None and side.dim != known.dim for side in sides):
        return None
    if len(known.ids) == 1 and all(side is not None for side in sides):  # broadcast to the other operand
        known = max((side for side in sides if side is not None), key=lambda side: len(side.ids))
    zeros: list[Tensor] = []
    ids = known.ids
    for side, argument in zip(sides, node.args[:2], strict=True):
        if side is not None and len(side.ids) == len(ids):
            ids = state.join(ids, side.ids)
            zeros.append(side.zero)
            continue
        if side is not None:
            state.pin(side.ids)
        zero = _zeros_of_operand(state, argument, known.dim, ids)
        if zero is None:
            return None
        zeros.append(zero)
    zero = zeros[0] if quotient else zeros[0] | zeros[1] if product else zeros[0] & zeros[1]
    return Channels(known.dim, ids, zero)


def _zeros_of_operand(state: ChannelState, argument: Any, dim: int, ids: Tensor) -> Tensor | None:
    """Return where an operand without known channels is zero along `dim`; None if it cannot be cut there."""
    if not isinstance(argument, Node):
        return torch.full((len(ids),), argument == 0)
    shape = shape_of(argument)
    if len(shape) < -dim or shape[dim] == 1:
        return torch.zeros(len(ids), dtype=torch.bool)
    value = state.tensor(argument)
    if value is None or shape[dim] != len(ids):
        return None
    state.place(argument, value.dim() + dim, ids)
    return (value == 0).movedim(dim, 0).reshape(len(ids), -1).all(1)


def _pad(state: ChannelState, node: Node) -> Channels | None:
    """Return the channels after padding with a constant; indices that it adds cannot be removed."""
    known = state.of(node.args[0])
    widths: Any = node.args[1]
    rest = [*node.args[2:], *node.kwargs.values()]
    if known is None or any(isinstance(extra, str) and extra != "constant" for extra in rest):
        return None
    value = next((extra for extra in rest if isinstance(extra, (int, float))), 0)
    position = 2 * (-known.dim - 1)
    before, after = widths[position : position + 2] if len(widths) > position else (0, 0)
    if min(before, after) < 0:
        return None
    zero = known.zero if value == 0 else torch.zeros_like(known.zero)
    pinned = [torch.full((n,), PINNED) for n in (before, after)]
    padding_zero = [torch.full((n,), value == 0) for n in (before, after)]
    return Channels(
        known.dim,
        torch.cat([pinned[0], known.ids, pinned[1]]),
        torch.cat([padding_zero[0], zero, padding_zero[1]]),
    )


def _move(state: ChannelState, node: Node) -> KnownChannels:
    """Return the channels after an operation that only moves entries: it moves their channel numbers, too."""
    if not any(state.of(source) for source in node.all_input_nodes):
        return None
    ids = run_on(node, state.spread_ids)
    zero = run_on(node, lambda source: state.spread(source, lambda channels: channels.zero, False))
    if operation(node)[0] not in SIZED:
        state.moves.append(node)
    if isinstance(ids, Tensor):
        return along_one_dimension(ids, zero)
    found = [along_one_dimension(i, z) for i, z in zip(ids, zero, strict=True)]
    return None if any(part is None for part in found) else found


def _item(state: ChannelState, node: Node) -> Channels | None:
    """Return the channels of one of several results."""
    known, index = state.known.get(node.args[0]), node.args[1]  # type: ignore[arg-type]
    return known[index] if isinstance(known, list) and isinstance(index, int) else None


_RULES: dict[str, Rule] = {
    **dict.fromkeys(MOVES, _move),
    **dict.fromkeys(BINARY, _binary),
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(POOLS, _pool),
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _conv),
    **dict.fromkeys(("pad", "constant_pad_nd"), _pad),
    "linear": _linear,
    "batch_norm": _batch_norm,
    "prelu": _prelu,
}
