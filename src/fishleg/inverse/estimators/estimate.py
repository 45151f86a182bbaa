"""Estimate Q by the named method."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.curvature.layers import Layer, find_layers
from fishleg.curvature.likelihoods import Likelihood, as_likelihood
from fishleg.inverse.estimators.learned import learn_inverse
from fishleg.inverse.estimators.problem import EstimationProblem
from fishleg.inverse.estimators.registry import find_method
from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.options import PruningOptions
from fishleg.options.pruning import DAMPING
from fishleg.runtime.batches import Forward, default_forward


def make_problem(
    model: nn.Module,
    loader: Iterable[Any],
    likelihood: Likelihood | str = "categorical",
    *,
    options: PruningOptions | None = None,
    forward: Forward = default_forward,
    generator: torch.Generator | None = None,
    layers: list[Layer] | None = None,
    only: Collection[str] | None = None,
    masks: Mapping[str, Tensor] | None = None,
) -> EstimationProblem:
    """Gather what an estimator needs.

    Args:
        model: The model at which F is taken.
        loader: Batches; inputs suffice unless the Fisher is empirical.
        likelihood: The distribution of the outputs, or its name.
        options: Samples, blocks, true or empirical Fisher; default: `PruningOptions()`.
        forward: How the model is called on a batch.
        generator: The source of random numbers; default: seed 0.
        layers: The layers of the model; default: they are looked for.
        only: Names of the weights whose layers are wanted; default: all. Q of the rest, for instance of
            embeddings, can take more memory than all of these.
        masks: What is removed already, by parameter; True = kept.

    Returns:
        The problem.
    """
    layers = find_layers(model) if layers is None else layers
    return EstimationProblem(
        model=model,
        loader=loader,
        likelihood=as_likelihood(likelihood),
        options=options or PruningOptions(),
        forward=forward,
        generator=generator or torch.Generator().manual_seed(0),
        layers=[layer for layer in layers if only is None or layer.weight in only],
        all_layers=layers,
        masks=masks or {},
    )


def estimate_inverse(problem: EstimationProblem) -> tuple[InverseFisher, float]:
    """Estimate Q by the method of the problem's options from about `samples` gradients.

    Args:
        problem: The model, its data and the options; see `make_problem`.

    Returns:
        Q and its damping γ (1 for a method without damping).

    Raises:
        ValueError: A layer is beyond the method, or γ cannot be chosen because F is zero.
    """
    options = problem.options
    relative = DAMPING if options.relative_damping is None else options.relative_damping
    method = find_method(options.method)
    if method.learns:
        auxiliary = learn_inverse(problem, relative_damping=relative, gamma=options.gamma)
        assert auxiliary.gamma is not None
        return auxiliary.inverse, auxiliary.gamma
    if method.check is not None:
        method.check(problem.layers)
    gamma = options.gamma
    if gamma is None:
        gamma = problem.choose_gamma(relative) if method.needs_gamma else 1.0
    operators = method.build(replace(problem, gamma=gamma))
    return InverseFisher(problem.layers, operators), gamma
