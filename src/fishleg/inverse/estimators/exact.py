"""The exact inverse of each layer's dense Fisher block."""

from __future__ import annotations

import torch
from torch import Tensor

from fishleg.curvature.layers import Layer
from fishleg.curvature.products import fisher_product
from fishleg.inverse.estimators.problem import LOADER, EstimationProblem
from fishleg.inverse.estimators.registry import Method
from fishleg.inverse.estimators.roots import inverse_root
from fishleg.inverse.operators import FullFactor, Gram, Operator
from fishleg.runtime.batch_errors import naming_the_batch
from fishleg.runtime.process_group import get_logger
from fishleg.runtime.tensors import at_least_float32

logger = get_logger(__name__)

MAX_PARAMETERS = 4096  # of a layer: its dense Fisher block has the square of that


def check_sizes(layers: list[Layer]) -> None:
    """Raise where a layer is too large for a dense inverse.

    Args:
        layers: The layers whose Q is wanted.

    Raises:
        ValueError: A layer has more than `MAX_PARAMETERS` parameters.
    """
    for layer in layers:
        size = torch.Size(layer.shape).numel()
        if size > MAX_PARAMETERS:
            raise ValueError(
                f"method 'exact' needs layers of at most {MAX_PARAMETERS} parameters, "
                f"{layer.name!r} has {size}"
            )


def estimate_exact(problem: EstimationProblem) -> dict[str, Operator]:
    """Return Q = (F + γI)⁻¹ of each layer, F by one exact product per parameter over one pass of the loader.

    Args:
        problem: The model and its data.

    Returns:
        The operator of each layer.

    Raises:
        ValueError: A layer is too large.
    """
    batches = problem.one_pass()
    check_sizes(problem.layers)
    operators: dict[str, Operator] = {}
    for done, layer in enumerate(problem.layers):
        n = torch.Size(layer.shape).numel()
        logger.info(
            "exact: layer %d of %d, %s: %d products with F",
            done + 1, len(problem.layers), layer.name, n * len(batches),
        )  # fmt: skip
        F = _dense_fisher(problem, layer, batches)
        factor = FullFactor(n)
        operator = Gram(layer.shape, factor).to(F)
        with torch.no_grad():
            factor.matrix.copy_(inverse_root(0.5 * (F + F.mT) + problem.gamma * torch.eye(n).to(F)))
        operators[layer.name] = operator
    return operators


def _dense_fisher(problem: EstimationProblem, layer: Layer, batches: list[object]) -> Tensor:
    """Return the layer's Fisher block, [n, n]; it is zero for removed rows."""
    n = torch.Size(layer.shape).numel()
    columns = []
    for i in range(n):
        unit = next(problem.model.parameters()).new_zeros(n)
        unit[i] = 1
        v = layer.unpack(unit.view(layer.shape))
        column = sum(_fisher_column(problem, layer, v, number, b) for number, b in enumerate(batches, 1))
        assert torch.is_tensor(column)
        columns.append(column.flatten() / len(batches))
    F = at_least_float32(torch.stack(columns))
    rows = {name: torch.zeros(shape) for name, shape in zip(layer.names, layer.shapes, strict=True)}
    for name in problem.removed_rows.keys() & rows.keys():
        rows[name][problem.removed_rows[name].cpu()] = 1
    removed = layer.pack(rows).flatten().bool().to(F.device)
    F[removed], F[:, removed] = 0, 0
    return F


def _fisher_column(
    problem: EstimationProblem, layer: Layer, v: dict[str, Tensor], number: int, batch: object
) -> Tensor:
    """Return F v on one batch, packed."""
    size = problem.options.sub_batch
    with naming_the_batch(f"part {number}, of up to {size} examples, of one pass over {LOADER}"):
        F_v = fisher_product(problem.model, batch, problem.likelihood, v, forward=problem.forward)
        return layer.pack(F_v)


METHOD = Method(estimate_exact, check=check_sizes)
