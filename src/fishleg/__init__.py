"""fishleg: a learned inverse Fisher for PyTorch models, and what it is good for."""

from fishleg.auxiliary import Auxiliary, AuxStats
from fishleg.inverse import InverseFisher
from fishleg.layers import register_layer
from fishleg.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from fishleg.optimizer import FishLeg
from fishleg.surgeon import PruneStep, Surgeon, SurgeonOptions
from fishleg.warmstart import AuxiliaryOptions

__all__ = [
    "AuxStats",
    "Auxiliary",
    "AuxiliaryOptions",
    "Bernoulli",
    "Categorical",
    "FishLeg",
    "Gaussian",
    "InverseFisher",
    "Likelihood",
    "PruneStep",
    "Surgeon",
    "SurgeonOptions",
    "register_layer",
]
