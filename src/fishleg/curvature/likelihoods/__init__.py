"""The distribution p(y|f) of targets given model outputs, which defines the loss and the Fisher matrix.

A *unit* is one independent prediction: an example, or one token of a sequence. Losses and Fisher matrices
are means over units. A new likelihood is one subclass of `Likelihood` and one line of the registry.
"""

from fishleg.curvature.likelihoods.base import Likelihood
from fishleg.curvature.likelihoods.bernoulli import Bernoulli
from fishleg.curvature.likelihoods.categorical import Categorical
from fishleg.curvature.likelihoods.gaussian import Gaussian
from fishleg.curvature.likelihoods.registry import (
    as_likelihood,
    register_likelihood,
    unregister_likelihood,
)

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Likelihood",
    "as_likelihood",
    "register_likelihood",
    "unregister_likelihood",
]
