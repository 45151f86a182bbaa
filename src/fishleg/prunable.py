"""Which parameters are pruned, and why the others are not."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fishleg.batches import Forward, iterate, move_batch
from fishleg.fisher import frozen_statistics, uncompiled, undisturbed
from fishleg.options import SurgeonOptions
from fishleg.patterns import Pattern

logger = logging.getLogger(__name__)

Reasons = dict[str, str | None]


def choose(
    model: nn.Module,
    matrices: Collection[str],
    pattern: Pattern,
    options: SurgeonOptions,
    *,
    outputs: Collection[str] = (),
) -> Reasons:
    """For every parameter, None if it will be pruned, else why not.

    `matrices` are those that can be, and the rows of `outputs` are the model's outputs. What is included or
    excluded by the name of a parameter or module is that one alone; all else is a regular expression.
    """
    reasons: Reasons = {}
    parameters = dict(model.named_parameters())
    names = _all_names(model)
    aliases = {alias for several in names.values() for alias in several}
    modules = {name for name, _ in model.named_modules(remove_duplicate=False) if name}

    def matches(expression: str, alias: str) -> bool:
        if expression in aliases:  # as a regular expression, 2.weight would be found in 12.weight, too
            return alias == expression
        if expression in modules:
            return alias.startswith(f"{expression}.")
        return re.search(expression, alias) is not None

    for expression in [*options.include, *options.exclude]:
        if not any(matches(expression, alias) for alias in aliases):
            raise ValueError(f"{expression!r} matches no parameter; there are {', '.join(parameters)}")

    def named_by(expressions: Sequence[str], name: str) -> bool:
        return any(matches(expression, alias) for expression in expressions for alias in names[name])

    tables = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    for name, parameter in parameters.items():
        included = named_by(options.include, name)
        if not parameter.requires_grad:
            reasons[name] = "frozen"
        elif name not in matrices:
            reasons[name] = _why_no_matrix(model, name)
        elif options.include and not included:
            reasons[name] = "not included"
        elif named_by(options.exclude, name):
            reasons[name] = "excluded"
        elif pattern.whole_rows and name in outputs and not included:
            reasons[name] = "rows of an output layer are the model's outputs (include it to prune them)"
        elif pattern.whole_rows and id(parameter) in tables and not included:
            reasons[name] = "rows of an embedding are words (include it to prune them)"
        else:
            reasons[name] = pattern.unsuitable(tuple(parameter.shape))
    return reasons


def _all_names(model: nn.Module) -> dict[str, list[str]]:
    """By the name that a parameter goes by, all names that it has: tied ones have several."""
    names: dict[int, list[str]] = {}
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(alias)
    return {name: names[id(parameter)] for name, parameter in model.named_parameters()}


def _why_no_matrix(model: nn.Module, name: str) -> str:
    if ".parametrizations." in f".{name}" or name.endswith(("_orig", "weight_g", "weight_v")):
        return "parametrized: make it an ordinary weight first (remove_parametrizations, prune.remove)"
    if model.get_parameter(name).dim() < 2:
        return "not a matrix"
    return "not the weight of a linear layer, convolution or embedding (register_layer adds others)"


def output_layers(
    model: nn.Module, matrices: Collection[str], loader: Iterable[Any], forward: Forward
) -> set[str]:
    """Those of these weights whose rows are the model's outputs: there is no other layer in between.

    Of several that are added up, as the blocks of a residual network are, it is the one that is called last.
    Where no gradient tells (all is frozen), the one called last of all; none called: the last of them.
    """
    called = list(matrices)[-1:]
    made: dict[Any, str] = {}  # by node of the graph, the weight of the layer that made it
    batch = next(iterate(loader), None)
    if batch is None:
        return set(called)  # that there are no data is told later

    def note(name: str) -> Callable[..., None]:
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
            for module in model.modules():  # a weight that is tied has several
                if any(p is weight for p in module.parameters(recurse=False)):
                    maker = names.get(id(_last_weight(module, weight)), name)
                    hooks.callback(module.register_forward_hook(note(maker)).remove)
        with uncompiled(), undisturbed(), frozen_statistics(model):
            f = forward(model, move_batch(batch, next(model.parameters()).device))
    direct = _makers(f.grad_fn, made, {name: i for i, name in enumerate(called)})
    return direct or set(called[-1:])


def following_norms(
    model: nn.Module, matrices: Collection[str], loader: Iterable[Any], forward: Forward
) -> dict[str, list[str]]:
    """By weight: the trainable parameters of the BatchNorm that takes its outputs, and nothing else.

    A row that is removed takes its place in that norm along: what would be left is a constant, its shift.
    """
    batch = next(iterate(loader), None)
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    made: list[tuple[str, Tensor]] = []
    taken: dict[_BatchNorm, list[Any]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(module, _BatchNorm):
            taken.setdefault(module, []).append(args[0] if args else kwargs.get("input"))
        elif isinstance(output, Tensor):
            own = [names.get(id(p), "") for p in module.parameters(recurse=False)]
            made.extend((name, output) for name in own if name in matrices)

    if batch is None or not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return {}
    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        with uncompiled(), undisturbed(), frozen_statistics(model):
            forward(model, move_batch(batch, next(model.parameters()).device))
    found: dict[str, list[str]] = {}
    owners = Counter(id(p) for norm in taken for p in norm.parameters())
    for norm, inputs in taken.items():
        makers = [(name, output) for name, output in made if any(x is output for x in inputs)]
        if len(inputs) != 1 or len(makers) != 1:
            continue
        name, output = makers[0]
        weight = model.get_parameter(name)
        rows_are_channels = output.dim() == 2 or weight.dim() > 2  # a sequence's may be its time steps
        if rows_are_channels and norm.num_features == len(weight):
            vectors = [names[id(p)] for p in norm.parameters() if id(p) in names and owners[id(p)] == 1]
            found.setdefault(name, []).extend(vectors)
    return found


def _makers(end: Any, made: Mapping[Any, str], when: Mapping[str, int]) -> set[str]:
    """The layers that make what a node of the graph yields; of the terms of a sum, those of the latest."""
    known: dict[Any, set[str]] = {None: set()}
    left = [end]
    while left:  # a graph may be deeper than Python's stack
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
    """The weight that makes the module's outputs; attention's last one is in a layer that is never called."""
    if isinstance(module, nn.MultiheadAttention) and module.out_proj.weight.requires_grad:
        return module.out_proj.weight
    return weight


def tell_what_is_left_out(model: nn.Module, reasons: Mapping[str, str | None]) -> None:
    """Say so when most of the model cannot be pruned: the sparsity is that of the rest."""
    chosen = ("excluded", "not included")  # that was the user's wish; to freeze is to wish something else
    sizes = {name: model.get_parameter(name).numel() for name, why in reasons.items() if why not in chosen}
    pruned, total = sum(size for name, size in sizes.items() if reasons[name] is None), sum(sizes.values())
    if pruned < total / 2:
        largest = sorted((name for name in sizes if reasons[name]), key=lambda name: -sizes[name])
        logger.warning(
            "only %.1f %% of the model's %d parameters can be pruned, and any sparsity is that of these; "
            "left out are %s%s (Surgeon.table() lists all)",
            100 * pruned / total, total,
            ", ".join(f"{name} ({reasons[name]})" for name in largest[:3]),
            f" and {len(largest) - 3} more" if len(largest) > 3 else "",
        )  # fmt: skip


def table(model: nn.Module, reasons: Mapping[str, str | None]) -> str:
    """For each parameter: its size, sparsity, and whether it is pruned or why not."""
    rows = [f"{'parameter':<36} {'size':>10} {'zeros':>8}  pruned?"]
    for name, parameter in model.named_parameters():
        zeros = 1 - float((parameter != 0).float().mean()) if parameter.numel() else 0.0
        rows.append(f"{name:<36} {parameter.numel():>10,} {zeros:>8.1%}  {reasons[name] or 'yes'}")
    return "\n".join(rows)
