"""The operations of a traced model: their kinds, their arguments, and which results share memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

# f(x) for each entry x; whether f(0) = 0 is computed.
ELEMENTWISE = frozenset((
    "relu", "relu6", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "elu", "celu", "selu", "hardswish",
    "hardsigmoid", "hardtanh", "mish", "softplus", "sin", "softshrink", "hardshrink", "threshold",
    "dropout", "feature_dropout", "alpha_dropout", "abs", "neg", "sqrt", "square", "exp", "clamp",
    "clamp_min", "clamp_max", "pow", "clone", "contiguous", "detach", "alias", "to", "_to_copy",
    "type_as", "lift_fresh_copy",
))  # fmt: skip
# Pooling and upsampling: channels stay separate, zeros stay zeros, and the number of dimensions stays.
POOLS = frozenset(
    f"{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for n in (1, 2, 3)
) | frozenset(
    f"upsample_{kind}" for kind in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d")
)
# Entries are moved, and nothing is computed.
MOVES = frozenset((
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "permute", "transpose", "t", "squeeze",
    "unsqueeze", "select", "slice", "narrow", "expand", "repeat", "cat", "concat", "stack", "split",
    "split_with_sizes", "chunk", "unbind", "movedim", "swapaxes", "flip", "roll",
))  # fmt: skip
# Moves whose result shares no memory with its source.
_COPIES = frozenset(("cat", "concat", "stack", "repeat", "flip", "roll"))
# Moves with sizes as arguments, which cannot be tried with fewer channels.
SIZED = frozenset(("view", "reshape", "_unsafe_view", "unflatten", "expand", "repeat"))
# Operations whose result may share memory with its source.
_ALIASES = (MOVES - _COPIES) | frozenset(("contiguous", "to", "detach", "alias", "dropout", "type_as"))
# In-place operations that are allowed on shared memory: zeros stay zeros.
_ZERO_PRESERVING = frozenset(("relu", "leaky_relu", "elu", "silu", "tanh", "hardswish", "dropout"))
REDUCTIONS = frozenset(("mean", "sum", "amax", "amin"))
BINARY = frozenset(("add", "sub", "mul", "div", "maximum", "minimum"))


def arguments(node: Node, *names: str) -> list[Any]:
    """Return the first arguments of a call, given by position or by name.

    Args:
        node: The call.
        *names: The names of the arguments in the order of their positions.

    Returns:
        Their values; None for an argument that is not given.
    """
    given = dict(zip(names, node.args, strict=False))
    return [given.get(name, node.kwargs.get(name)) for name in names]


def operation(node: Node) -> tuple[str, bool]:
    """Return the name of an operation, and whether it works in place.

    Args:
        node: A node of the traced graph.

    Returns:
        The name without a trailing underscore, and True if the operation overwrites its first argument.
    """
    name = str(getattr(node.target, "_opname", node.target))
    inplace = name.endswith("_") and not name.endswith("__")
    return (name[:-1] if inplace else name), inplace


def as_list(value: Any) -> list[Any]:
    """Return the results of an operation as a list.

    Args:
        value: One result, or a list or tuple of several.

    Returns:
        The list.
    """
    return list(value) if isinstance(value, (list, tuple)) else [value]


def run_on(node: Node, of: Callable[[Node], Tensor]) -> Any:
    """Call an operation on other tensors.

    Args:
        node: The operation.
        of: Returns the tensor to use in place of each argument that is a node.

    Returns:
        The result of the operation.
    """
    assert callable(node.target)
    return node.target(*map_arg(node.args, of), **map_arg(node.kwargs, of))


def overwritten(graph: Graph) -> set[Node]:
    """Find the tensors that share memory with a view that is overwritten.

    What is known about one of them may not hold for the others.

    Args:
        graph: The traced graph.

    Returns:
        All nodes of the groups that share memory, if the group has a view and is written to by an operation
        that does not preserve zeros.
    """
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
        if inplace and name not in _ZERO_PRESERVING:
            written.add(owner)
    views = {
        owner: any(not operation(node)[1] for node in nodes if node is not owner)
        for owner, nodes in members.items()
    }
    return {node for owner in written if views[owner] for node in members[owner]}


def without_device(node: Node) -> dict[str, Any]:
    """Return the keyword arguments of a call without those that select a device.

    Args:
        node: The call.

    Returns:
        The keyword arguments for a call on the CPU.
    """
    return {key: value for key, value in node.kwargs.items() if key not in ("device", "layout", "pin_memory")}


def shape_of(node: Any) -> Sequence[int]:
    """Return the shape of a node's result.

    Args:
        node: A node of the traced graph.

    Returns:
        The shape; () if the result is not a tensor.
    """
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()
