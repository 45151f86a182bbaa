"""Which layers make the model's outputs, and which BatchNorm follows which layer.

Row pruning needs both. They are found from one forward pass: with hooks and from the autograd graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fishleg.runtime.batches import Forward, move_batch
from fishleg.runtime.loaders import iterate
from fishleg.runtime.modes import eager_mode, evaluation_mode, gradients_enabled


def output_layers(
    model: nn.Module, matrices: Collection[str], loader: Iterable[Any], forward: Forward
) -> set[str]:
    """Return the weights whose rows are the model's outputs: no other layer lies in between.

    If the outputs are a sum of layers, as in a residual network, the layer that is called last counts. If
    there is no autograd graph (all parameters are frozen), it is the layer that is called last of all. If no
    layer is called, it is the last of `matrices`.

    Args:
        model: The model.
        matrices: The names of the weights to consider.
        loader: Calibration batches; the first one is used.
        forward: How the model is called on a batch.

    Returns:
        The names of the weights.
    """
    called = list(matrices)[-1:]
    made: dict[Any, str] = {}  # by node of the autograd graph, the weight of the layer that made it
    batch = next(iterate(loader), None)
    if batch is None:
        return set(called)  # an empty loader raises an error later

    def record_calls(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            called.append(name)
            node = getattr(output[0] if isinstance(output, tuple) else output, "grad_fn", None)
            if node is not None:
                made[node] = name

        return hook

    names = {id(model.get_parameter(name)): name for name in matrices}
    with ExitStack() as hooks:
        for name in matrices:
            weight = model.get_parameter(name)
            for module in model.modules():  # a tied weight belongs to several
                if any(p is weight for p in module.parameters(recurse=False)):
                    maker = names.get(id(_last_weight(module, weight)), name)
                    hooks.callback(module.register_forward_hook(record_calls(maker)).remove)
        with eager_mode(), gradients_enabled(), evaluation_mode(model):
            f = forward(model, move_batch(batch, next(model.parameters()).device))
    direct = _makers(f.grad_fn, made, {name: i for i, name in enumerate(called)})
    return direct or set(called[-1:])


def following_norms(
    model: nn.Module, matrices: Collection[str], loader: Iterable[Any], forward: Forward
) -> dict[str, list[str]]:
    """Return for each weight the parameters of the BatchNorm that normalises its outputs.

    If a row of the weight is removed, its scale and shift are removed too. Otherwise the channel would still
    output a constant, the shift. A BatchNorm that normalises the outputs of several layers does not count.

    Args:
        model: The model.
        matrices: The names of the weights to consider.
        loader: Calibration batches; the first one is used.
        forward: How the model is called on a batch.

    Returns:
        The names of trainable BatchNorm parameters, by weight name.
    """
    batch = next(iterate(loader), None)
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    made: list[tuple[str, Tensor]] = []
    taken: dict[_BatchNorm, list[Any]] = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(module, _BatchNorm):
            taken.setdefault(module, []).append(args[0] if args else kwargs.get("input"))
        elif isinstance(output, Tensor):
            own = [names.get(id(p), "") for p in module.parameters(recurse=False)]
            made.extend((name, output) for name in own if name in matrices)

    if batch is None or not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return {}
    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_hook(record, with_kwargs=True).remove)
        with eager_mode(), gradients_enabled(), evaluation_mode(model):
            forward(model, move_batch(batch, next(model.parameters()).device))
    found: dict[str, list[str]] = {}
    owners = Counter(id(p) for norm in taken for p in norm.parameters())
    for norm, inputs in taken.items():
        makers = [(name, output) for name, output in made if any(x is output for x in inputs)]
        if len(inputs) != 1 or len(makers) != 1:
            continue
        name, output = makers[0]
        weight = model.get_parameter(name)
        # of a sequence, dimension 1 may be the time steps
        rows_are_channels = output.dim() == 2 or weight.dim() > 2
        if rows_are_channels and norm.num_features == len(weight):
            vectors = [names[id(p)] for p in norm.parameters() if id(p) in names and owners[id(p)] == 1]
            found.setdefault(name, []).extend(vectors)
    return found


def _makers(end: Any, made: Mapping[Any, str], when: Mapping[str, int]) -> set[str]:
    """Return the layers that make the output of a graph node; of a sum, those of the term called last."""
    known: dict[Any, set[str]] = {None: set()}
    left = [end]
    while left:  # no recursion: a graph may be deeper than Python's stack
        node = left[-1]
        if node in made:
            known[node] = {made[node]}
        earlier = [] if node in known else [part for part, _ in node.next_functions]
        if missing := [part for part in earlier if part not in known]:
            left += missing
            continue
        left.pop()
        if node not in known:
            parts = [known[part] for part in earlier] or [set()]
            if node.name().startswith(("AddBackward", "SubBackward")):
                parts = [max(parts, key=lambda names: max(map(when.__getitem__, names), default=-1))]
            known[node] = set().union(*parts)
    return known[end]


def _last_weight(module: nn.Module, weight: Tensor) -> Tensor:
    """Return the weight that makes a module's outputs.

    Attention uses the weight of its layer `out_proj` without calling that layer.
    """
    if isinstance(module, nn.MultiheadAttention) and module.out_proj.weight.requires_grad:
        return module.out_proj.weight
    return weight
