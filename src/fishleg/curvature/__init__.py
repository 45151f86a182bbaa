"""The curvature of a model: likelihoods, the Fisher matrix F as samples h or products F·v, and its layers.

`likelihoods` define F, `samples` draws vectors h with E[hhᵀ] = F, `products` computes F·v,
`kronecker_factors` the statistics of KFAC, and `layers` which parameters form a block.
"""

from fishleg.curvature.kronecker_factors import Factors, kronecker_factors
from fishleg.curvature.layers import Layer, find_layers, register_layer, removed_rows, zero_rows_
from fishleg.curvature.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    as_likelihood,
    register_likelihood,
    unregister_likelihood,
)
from fishleg.curvature.outputs import AllIgnoredError
from fishleg.curvature.products import fisher_product, sampled_product
from fishleg.curvature.samples import empirical_h, mean_diagonal, sample_h

__all__ = [
    "AllIgnoredError",
    "Bernoulli",
    "Categorical",
    "Factors",
    "Gaussian",
    "Layer",
    "Likelihood",
    "as_likelihood",
    "empirical_h",
    "find_layers",
    "fisher_product",
    "kronecker_factors",
    "mean_diagonal",
    "register_layer",
    "register_likelihood",
    "removed_rows",
    "sample_h",
    "sampled_product",
    "unregister_likelihood",
    "zero_rows_",
]
