"""Which parameters are pruned, and why the others are not."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from fishleg.options import PruningOptions
from fishleg.pruning.patterns import Pattern

logger = logging.getLogger(__name__)
Reasons = dict[str, str | None]


def choose_prunable(
    model: nn.Module,
    matrices: Collection[str],
    pattern: Pattern,
    options: PruningOptions,
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


def warn_if_mostly_left_out(model: nn.Module, reasons: Mapping[str, str | None]) -> None:
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


def prunable_table(model: nn.Module, reasons: Mapping[str, str | None]) -> str:
    """For each parameter: its size, sparsity, and whether it is pruned or why not."""
    rows = [f"{'parameter':<36} {'size':>10} {'zeros':>8}  pruned?"]
    for name, parameter in model.named_parameters():
        zeros = 1 - float((parameter != 0).float().mean()) if parameter.numel() else 0.0
        rows.append(f"{name:<36} {parameter.numel():>10,} {zeros:>8.1%}  {reasons[name] or 'yes'}")
    return "\n".join(rows)
