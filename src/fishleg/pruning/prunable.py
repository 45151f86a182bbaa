"""Choose the parameters that are pruned, and give the reason for every other one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from fishleg.options import PruningOptions
from fishleg.pruning.patterns import Pattern
from fishleg.runtime.models import abbreviate
from fishleg.runtime.process_group import get_logger

logger = get_logger(__name__)
ZERO_EVERYWHERE = "zero everywhere from the beginning: not trained yet, or removed before"


def choose_prunable(
    model: nn.Module,
    matrices: Collection[str],
    pattern: Pattern,
    options: PruningOptions,
    *,
    outputs: Collection[str] = (),
) -> dict[str, str | None]:
    """Return for every parameter whether it is pruned or why not.

    Each entry of `options.include` and `options.exclude` is the name of a parameter, the name of a module,
    or a regular expression, in this order.

    Args:
        model: The model.
        matrices: The names of the weights that can be pruned.
        pattern: The sparsity pattern.
        options: `include` and `exclude`.
        outputs: The names of the weights whose rows are the model's outputs.

    Returns:
        By parameter name, None if it is pruned, else the reason why not.

    Raises:
        ValueError: An entry of `include` or `exclude` matches no parameter.
    """
    reasons: dict[str, str | None] = {}
    parameters = dict(model.named_parameters())
    names = _all_names(model)
    aliases = {alias for several in names.values() for alias in several}
    modules = {name for name, _ in model.named_modules(remove_duplicate=False) if name}

    def matches(expression: str, alias: str) -> bool:
        if expression in aliases:  # as a regular expression, 2.weight would also match 12.weight
            return alias == expression
        if expression in modules:
            return alias.startswith(f"{expression}.")
        return re.search(expression, alias) is not None

    for expression in [*options.include, *options.exclude]:
        if not any(matches(expression, alias) for alias in aliases):
            raise ValueError(f"{expression!r} matches no parameter; the model has {', '.join(parameters)}")

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
            reasons[name] = "an output layer: its rows are the model's outputs (include it to prune them)"
        elif pattern.whole_rows and id(parameter) in tables and not included:
            reasons[name] = "an embedding: its rows are words (include it to prune them)"
        else:
            zero = None if bool(parameter.any()) else ZERO_EVERYWHERE
            reasons[name] = pattern.unsuitable(tuple(parameter.shape)) or zero
    return reasons


def _all_names(model: nn.Module) -> dict[str, list[str]]:
    """Return by a parameter's first name all its names: tied parameters have several."""
    names: dict[int, list[str]] = {}
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(alias)
    return {name: names[id(parameter)] for name, parameter in model.named_parameters()}


def _why_no_matrix(model: nn.Module, name: str) -> str:
    if ".parametrizations." in f".{name}" or name.endswith(("_orig", "weight_g", "weight_v")):
        return "parametrized: make it an ordinary weight first (remove_parametrizations or prune.remove)"
    if model.get_parameter(name).dim() < 2:
        return "not a matrix"
    return "not the weight of a linear layer, convolution or embedding (register_layer adds others)"


def warn_about_zero_matrices(reasons: Mapping[str, str | None]) -> None:
    """Warn about matrices that are zero everywhere: to prune them would be to freeze them at their start.

    Args:
        reasons: What `choose_prunable` returned.
    """
    if zero := [name for name, reason in reasons.items() if reason == ZERO_EVERYWHERE]:
        logger.warning(
            "not pruned, because zero everywhere from the beginning: %s. Such a matrix was not trained yet, "
            "as the B of LoRA or a zero-initialised head, or was removed before; the sparsity does not count "
            "it. Train it first if it is to be pruned",
            abbreviate(zero),
        )


def warn_if_mostly_left_out(model: nn.Module, reasons: Mapping[str, str | None]) -> None:
    """Warn if less than half of the model can be pruned: the sparsity refers to that part only.

    Args:
        model: The model.
        reasons: What `choose_prunable` returned.
    """
    chosen = ("excluded", "not included")  # by the user. Frozen parameters count: they have other reasons.
    sizes = {name: model.get_parameter(name).numel() for name, why in reasons.items() if why not in chosen}
    pruned, total = sum(size for name, size in sizes.items() if reasons[name] is None), sum(sizes.values())
    if pruned < total / 2:
        largest = sorted((name for name in sizes if reasons[name]), key=lambda name: -sizes[name])
        logger.warning(
            "only %.1f %% of the model's %d parameters can be pruned, and the sparsity refers to these only; "
            "not pruned are %s%s (Surgeon.table() lists all)",
            100 * pruned / total, total,
            ", ".join(f"{name} ({reasons[name]})" for name in largest[:3]),
            f" and {len(largest) - 3} more" if len(largest) > 3 else "",
        )  # fmt: skip


def prunable_table(model: nn.Module, reasons: Mapping[str, str | None]) -> str:
    """Return a table of all parameters for the terminal.

    Args:
        model: The model.
        reasons: What `choose_prunable` returned.

    Returns:
        A line for each parameter: its size, its share of zeros, and whether it is pruned or why not.
    """
    rows = [f"{'parameter':<36} {'size':>10} {'zeros':>8}  pruned?"]
    for name, parameter in model.named_parameters():
        zeros = 1 - float((parameter != 0).float().mean()) if parameter.numel() else 0.0
        rows.append(f"{name:<36} {parameter.numel():>10,} {zeros:>8.1%}  {reasons[name] or 'yes'}")
    return "\n".join(rows)
