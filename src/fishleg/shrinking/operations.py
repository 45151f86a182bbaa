"""A traced model, operation by operation: kinds of operations, their arguments, and who shares memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

# f(x) entry by entry; whether f(0) = 0 is tried out.
ELEMENTWISE = frozenset((
    "relu", "relu6", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "elu", "celu", "selu", "hardswish",
    "hardsigmoid", "hardtanh", "mish", "softplus", "sin", "softshrink", "hardshrink", "threshold",
    "dropout", "feature_dropout", "alpha_dropout", "abs", "neg", "sqrt", "square", "exp", "clamp",
    "clamp_min", "clamp_max", "pow", "clone", "contiguous", "detach", "alias", "to", "_to_copy",
    "type_as", "lift_fresh_copy",
))  # fmt: skip
# Each channel by itself, zeros to zeros, and the number of dimensions stays.
POOLS = frozenset(
    f"{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for n in (1, 2, 3)
) | frozenset(
    f"upsample_{kind}" for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d")
)
# Entries change places and nothing is computed.
MOVES = frozenset((
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "permute", "transpose", "t", "squeeze",
    "unsqueeze", "select", "slice", "narrow", "expand", "repeat", "cat", "concat", "stack", "split",
    "split_with_sizes", "chunk", "unbind", "movedim", "swapaxes", "flip", "roll",
))  # fmt: skip
# Of those: what copies, so that the result shares no memory with its source; what has sizes written into
# it, so that it cannot be tried out on the cut model; and what shares memory besides them.
_COPIES = frozenset(("cat", "concat", "stack", "repeat", "flip", "roll"))
SIZED = frozenset(("view", "reshape", "_unsafe_view", "unflatten", "expand", "repeat"))
_ALIASES = (MOVES - _COPIES) | frozenset(("contiguous", "to", "detach", "alias", "dropout", "type_as"))
# What may overwrite a tensor that others share: zeros stay zeros.
_HARMLESS = frozenset(("relu", "leaky_relu", "elu", "silu", "tanh", "hardswish", "dropout"))
REDUCTIONS = frozenset(("mean", "sum", "amax", "amin"))
BINARY = frozenset(("add", "sub", "mul", "div", "maximum", "minimum"))


def arguments(node: Node, *names: str) -> list[Any]:
    """The first arguments of a call, by position or by name; None where not given."""
    given = dict(zip(names, node.args, strict=False))
    return [given.get(name, node.kwargs.get(name)) for name in names]


def operation(node: Node) -> tuple[str, bool]:
    """The name of an operation, and whether it overwrites its first argument."""
    name = str(getattr(node.target, "_opname", node.target))
    inplace = name.endswith("_") and not name.endswith("__")
    return (name[:-1] if inplace else name), inplace


def as_list(value: Any) -> list[Any]:
    """Results of an operation, one or several."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def run_on(node: Node, of: Callable[[Node], Tensor]) -> Any:
    """Call an operation on other tensors than its own."""
    assert callable(node.target)
    return node.target(*map_arg(node.args, of), **map_arg(node.kwargs, of))


def overwritten(graph: Graph) -> set[Node]:
    """Tensors that share memory, one of which is written to: what holds for one may not for the others."""
    owners: dict[Node, Node] = {}
    members: dict[Node, list[Node]] = {}
    written: set[Node] = set()
    for node in graph.nodes:
        name, inplace = operation(node)
        source = node.args[0] if node.args else None
        shares = node.op == "call_function" and (
            inplace or name in _ALIASES or node.target is operator.getitem
        )
        owner = owners.get(source, source) if shares and isinstance(source, Node) else node
        owners[node] = owner
        members.setdefault(owner, []).append(node)
        if inplace and name not in _HARMLESS:
            written.add(owner)
    views = {
        owner: any(not operation(node)[1] for node in nodes if node is not owner)
        for owner, nodes in members.items()
    }
    return {node for owner in written if views[owner] for node in members[owner]}


def without_device(node: Node) -> dict[str, Any]:
    """The keywords of a call, so that it can be made on the CPU."""
    return {key: value for key, value in node.kwargs.items() if key not in ("device", "layout", "pin_memory")}


def shape_of(node: Any) -> Sequence[int]:
    """Of the tensor that a node yields; () where it is none."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()
