"""Which parameters are pruned, and why the others are not."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from fishleg.batches import Forward, move_batch
from fishleg.fisher import frozen_statistics, uncompiled
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
    output: str | None = None,
) -> Reasons:
    """For every parameter, None if it will be pruned, else why not.

    `matrices` are those that can be, and the rows of `output` are the model's outputs.
    """
    reasons: Reasons = {}
    parameters = dict(model.named_parameters())
    for expression in [*options.include, *options.exclude]:
        if not any(re.search(expression, name) for name in parameters):
            raise ValueError(f"{expression!r} matches no parameter; there are {', '.join(parameters)}")
    for name, parameter in parameters.items():
        included = any(re.search(expression, name) for expression in options.include)
        if not parameter.requires_grad:
            reasons[name] = "frozen"
        elif name not in matrices:
            reasons[name] = "not the weight of a linear layer or convolution"
        elif options.include and not included:
            reasons[name] = "not included"
        elif any(re.search(expression, name) for expression in options.exclude):
            reasons[name] = "excluded"
        elif pattern.whole_rows and name == output and not included:
            reasons[name] = "rows of the output layer are the model's outputs (include it to prune them)"
        else:
            reasons[name] = pattern.unsuitable(tuple(parameter.shape))
    return reasons


@torch.no_grad()
def last_called(
    model: nn.Module, matrices: Collection[str], loader: Iterable[Any], forward: Forward
) -> str | None:
    """The one of these weights whose layer a forward pass calls last; none called: the last of them."""
    called = list(matrices)[-1:]
    batch = next(iter(loader), None)
    if batch is None:
        return called[-1] if called else None  # that there are no data is told later
    with ExitStack() as hooks:
        for name in matrices:
            weight = model.get_parameter(name)
            for module in model.modules():  # a weight that is tied has several
                if any(p is weight for p in module.parameters(recurse=False)):
                    note = module.register_forward_hook(lambda *_, name=name: called.append(name))
                    hooks.callback(note.remove)
        with uncompiled(), frozen_statistics(model):
            forward(model, move_batch(batch, next(model.parameters()).device))
    return called[-1] if called else None


def tell_what_is_left_out(model: nn.Module, reasons: Mapping[str, str | None]) -> None:
    """Say so when most of the model cannot be pruned: the sparsity is that of the rest."""
    chosen = ("frozen", "excluded", "not included")  # that was the user's wish
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
