"""Other Qs: every rival of the learned inverse Fisher, as operators in the same InverseFisher.

Each is one pass (or two) over batches, streamed: no matrix of all gradients is ever stored, except for
M-FAC, which by definition keeps its m gradients. All use the true Fisher unless `empirical` is set.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.curvature.kronecker_factors import kronecker_factors
from fishleg.curvature.layers import Layer, find_layers, removed_rows, zero_rows_
from fishleg.curvature.likelihoods import Likelihood, as_likelihood
from fishleg.curvature.outputs import AllIgnoredError
from fishleg.curvature.products import fisher_product
from fishleg.curvature.samples import empirical_h, mean_diagonal, sample_h
from fishleg.inverse.auxiliary import AuxiliaryStats
from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.inverse.learned import learner
from fishleg.inverse.operators import BlockFactor, Diagonal, FullFactor, Gram, Kronecker, LowRank, Operator
from fishleg.inverse.options import DAMPING, EMPIRICAL, METHODS, AuxiliaryOptions
from fishleg.inverse.structures import DEFAULT_STRUCTURE, Structure
from fishleg.runtime.batches import Forward, default_forward, move_batch
from fishleg.runtime.batchnorm import can_use_batch_statistics
from fishleg.runtime.loaders import one_pass, sub_batches
from fishleg.runtime.tensors import at_least_float32

logger = logging.getLogger(__name__)


def estimate(
    method: str,
    model: nn.Module,
    loader: Iterable[Any],
    likelihood: Likelihood | str = "categorical",
    *,
    gamma: float | None = None,
    relative_damping: float = DAMPING,
    samples: int = 256,
    sub_batch: int = 16,
    empirical: bool = False,
    block_size: int = 50,
    structure: Structure = DEFAULT_STRUCTURE,
    scale: float | None = None,
    options: AuxiliaryOptions | None = None,
    forward: Forward = default_forward,
    generator: torch.Generator | None = None,
    callback: Callable[[AuxiliaryStats], None] | None = None,
    only: Collection[str] | None = None,
    batch_statistics: bool = False,
    masks: Mapping[str, Tensor] | None = None,
) -> tuple[InverseFisher, float]:
    """(Q, γ) by the named method from about `samples` gradients of `sub_batch` examples each.

    fishleg learns Q; magnitude is Q = I; diagonal; obert is WoodFisher/oBERT (blocks of `block_size`);
    mfac is M-FAC (low rank, per layer); kfac; ekfac; exact inverts each layer's dense Fisher. `only` names
    the weights whose layers are wanted: Q of the rest (embeddings, say) can take more room than all of these.
    Learned Qs cover the whole model, for they may have to precondition steps of all of it.
    `batch_statistics`: BatchNorms that are in training mode normalise by the batch (not for exact).
    `masks` say what is removed: rows that are gone as a whole have no curvature (see `Auxiliary.ignore_removed_rows`).
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if samples < 1 or sub_batch < 1:
        raise ValueError(f"samples and sub_batch must be >= 1, got {samples} and {sub_batch}")
    if batch_statistics and method == "exact":
        raise ValueError("batch_statistics=True needs a method other than exact")
    if gamma is not None and not gamma > 0:
        raise ValueError(f"gamma must be > 0, got {gamma}")
    if empirical and method not in EMPIRICAL:
        raise ValueError(f"empirical needs one of the methods {', '.join(EMPIRICAL)}, got {method!r}")
    likelihood = as_likelihood(likelihood)
    generator = generator or torch.Generator().manual_seed(0)
    whole_model = find_layers(model)
    layers = [layer for layer in whole_model if only is None or layer.weight in only]
    gone = removed_rows(whole_model, masks or {})
    if method == "magnitude":
        return InverseFisher.from_model(model, "identity"), gamma or 1.0
    if method == "fishleg":
        auxiliary = learner(
            model, loader, likelihood, gamma=gamma, relative_damping=relative_damping, samples=samples,
            sub_batch=sub_batch, structure=structure, block_size=block_size, scale=scale, options=options,
            forward=forward, generator=generator, callback=callback, batch_statistics=batch_statistics,
            masks=masks,
        )  # fmt: skip
        assert auxiliary.gamma is not None
        return auxiliary.inverse, auxiliary.gamma

    def pieces(count: int) -> Iterator[Any]:
        device = next(model.parameters()).device
        return (move_batch(part, device) for part in islice(sub_batches(loader, sub_batch), count))

    def by_batch(part: Any) -> bool:
        return batch_statistics and can_use_batch_statistics(model, part)

    def draw(count: int, layers: list[Layer] = layers) -> Iterator[dict[str, Tensor]]:
        """`count` vectors h at most, one at a time, packed by layer, in float32 at least."""
        drawn = 0
        for part in pieces(count):
            try:
                if empirical:
                    h = empirical_h(model, part, likelihood, forward, by_batch(part))
                else:
                    h = sample_h(
                        model, part, likelihood, generator=generator, forward=forward,
                        batch_statistics=by_batch(part),
                    )  # fmt: skip
            except AllIgnoredError:
                continue
            drawn += 1
            zero_rows_(h, gone)
            yield {layer.name: at_least_float32(layer.pack(h)[0]) for layer in layers}
        if not drawn:
            raise AllIgnoredError(f"none of {count} batches has a label that counts: no Q can be had")

    if gamma is None:
        first = draw(min(samples, 32), whole_model)
        diagonals = [mean_diagonal({name: h.unsqueeze(0) for name, h in one.items()}) for one in first]
        gamma = relative_damping * sum(diagonals) / len(diagonals)
        if not gamma > 0:
            raise ValueError("cannot choose gamma: the Fisher matrix is zero on these batches; pass gamma")
    build = {"diagonal": _diagonal, "obert": _blocks, "mfac": _low_rank}
    if method in build:
        operators = build[method](layers, draw(samples), gamma, block_size)
    elif method == "exact":
        # all that the loader has once over: what comes after it is the same again
        once = [
            move_batch(part, next(model.parameters()).device) for part in one_pass(loader, sub_batch, samples)
        ]
        operators = _exact(model, layers, once, likelihood, gamma, forward, gone)
    else:
        factors = kronecker_factors(
            model, layers, pieces(samples), likelihood, forward=forward, generator=generator,
            batch_statistics=batch_statistics, gone=gone,
        )  # fmt: skip
        others = [layer for layer in layers if layer.name not in factors]
        if unknown := [layer.name for layer in others if layer.is_matrix]:
            logger.warning("%s has no factors for %s: Q is diagonal there", method, ", ".join(unknown))
        operators = _diagonal(others, draw(samples), gamma, block_size)
        for layer in layers:
            if layer.name in factors:
                operators[layer.name] = _kfac(*factors[layer.name], gamma)
        if method == "ekfac":
            for layer in layers:
                if layer.name in factors:
                    operators[layer.name] = _ekfac_basis(*factors[layer.name], gamma)
            for t, h in enumerate(draw(samples)):
                for name in factors:
                    operators[name].natural_step_(h[name].unsqueeze(0), gamma, 1 / (t + 1))
    inverse = InverseFisher(layers, operators)
    return inverse, gamma


def _diagonal(
    layers: list[Layer], draws: Iterator[dict[str, Tensor]], gamma: float, block_size: int
) -> dict[str, Operator]:
    operators: dict[str, Operator] = {layer.name: Diagonal(layer.shape) for layer in layers}
    if not layers:
        return operators
    for t, h in enumerate(draws):
        for name, operator in operators.items():
            operator.to(h[name]).natural_step_(h[name].unsqueeze(0), gamma, 1 / (t + 1))
    return operators


def _blocks(
    layers: list[Layer], draws: Iterator[dict[str, Tensor]], gamma: float, block_size: int
) -> dict[str, Operator]:
    """(γI + mean g gᵀ)⁻¹ within each block: what the Woodbury recursion of WoodFisher and oBERT yields."""
    operators: dict[str, Operator] = {
        layer.name: Gram(layer.shape, BlockFactor(torch.Size(layer.shape).numel(), block_size))
        for layer in layers
    }
    moments: dict[str, Tensor] = {}
    count = 0
    for h in draws:
        count += 1
        for name, operator in operators.items():
            assert isinstance(operator, Gram)
            (moment,) = operator.factor.moment(h[name].reshape(1, -1))
            moments[name] = moments[name].add_(moment) if name in moments else moment
    for name, operator in operators.items():
        assert isinstance(operator, Gram)
        assert isinstance(operator.factor, BlockFactor)
        damped = moments.pop(name).div_(count)
        damped.diagonal(dim1=-2, dim2=-1).add_(gamma)
        operator.to(damped)
        with torch.no_grad():  # in pieces: float64 copies of all blocks would take several times their room
            for part, root in zip(damped.split(4096), operator.factor.matrix.split(4096), strict=True):
                root.copy_(_inverse_root(part))
    return operators


def _low_rank(
    layers: list[Layer], draws: Iterator[dict[str, Tensor]], gamma: float, block_size: int
) -> dict[str, Operator]:
    stored = list(draws)
    return {
        layer.name: LowRank(layer.shape, torch.stack([h[layer.name] for h in stored]), gamma)
        for layer in layers
    }


def _exact(
    model: nn.Module,
    layers: list[Layer],
    batches: list[Any],
    likelihood: Likelihood,
    gamma: float,
    forward: Forward,
    gone: Mapping[str, Tensor],
) -> dict[str, Operator]:
    sizes = {layer.name: torch.Size(layer.shape).numel() for layer in layers}
    for name, n in sizes.items():  # before the first of them takes minutes
        if n > 4096:
            raise ValueError(f"method 'exact' needs layers of at most 4096 parameters, {name!r} has {n}")
    operators: dict[str, Operator] = {}
    for done, layer in enumerate(layers):
        n = sizes[layer.name]
        logger.info(
            "exact: layer %d of %d, %s: %d products with F",
            done + 1,
            len(layers),
            layer.name,
            n * len(batches),
        )
        columns = []
        for i in range(n):
            unit = next(model.parameters()).new_zeros(n)
            unit[i] = 1
            v = layer.unpack(unit.view(layer.shape))
            column = sum(
                layer.pack(fisher_product(model, b, likelihood, v, forward=forward)) for b in batches
            )
            assert torch.is_tensor(column)
            columns.append(column.flatten() / len(batches))
        F = at_least_float32(torch.stack(columns))
        rows = {name: torch.zeros(shape) for name, shape in zip(layer.names, layer.shapes, strict=True)}
        for name in gone.keys() & rows.keys():
            rows[name][gone[name].cpu()] = 1
        dead = layer.pack(rows).flatten().bool().to(F.device)
        F[dead], F[:, dead] = 0, 0
        factor = FullFactor(n)
        operator = Gram(layer.shape, factor).to(F)
        with torch.no_grad():
            factor.matrix.copy_(_inverse_root(0.5 * (F + F.mT) + gamma * torch.eye(n).to(F)))
        operators[layer.name] = operator
    return operators


def _kfac(output_side: Tensor, input_side: Tensor, gamma: float) -> Kronecker:
    """(G + √γ/π)⁻¹ ⊗ (A + √γ·π)⁻¹ with π² the ratio of the factors' mean eigenvalues (Martens and Grosse)."""
    operator = _full_kronecker(output_side, input_side, inner=False)
    pi = float(((input_side.diagonal().mean()) / output_side.diagonal().mean().clamp(min=1e-30)).sqrt())
    pi = min(max(pi, 1e-6), 1e6)
    with torch.no_grad():
        for factor, matrix, damping in (
            (operator.L, output_side, gamma**0.5 / pi),
            (operator.R, input_side, gamma**0.5 * pi),
        ):
            assert isinstance(factor, FullFactor)
            factor.matrix.copy_(_inverse_root(matrix + damping * torch.eye(len(matrix)).to(matrix)))
    return operator


def _ekfac_basis(output_side: Tensor, input_side: Tensor, gamma: float) -> Kronecker:
    operator = _full_kronecker(output_side, input_side, inner=True)
    operator.eigenbasis_((output_side,), (input_side,), gamma)
    return operator


def _full_kronecker(output_side: Tensor, input_side: Tensor, *, inner: bool) -> Kronecker:
    sides = FullFactor(len(output_side)), FullFactor(len(input_side))
    return Kronecker(*sides, outer=False, inner=inner).to(output_side)


def _inverse_root(matrix: Tensor) -> Tensor:
    """matrix^(−½), symmetric, from the eigendecomposition: no failure on a nearly singular matrix.

    Symmetry matters for a ragged last block: its padding stays apart from its weights.
    """
    values, vectors = torch.linalg.eigh(matrix.double())
    top = values[..., -1:].clamp(min=1e-300)
    root: Tensor = (vectors * values.clamp(min=top * 1e-14).rsqrt().unsqueeze(-2)) @ vectors.mT
    return root.to(matrix.dtype)
