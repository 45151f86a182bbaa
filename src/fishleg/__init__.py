"""fishleg: a learned inverse Fisher for PyTorch models, and what it is good for."""

from fishleg.api import prune
from fishleg.auxiliary import Auxiliary, AuxStats
from fishleg.gradual import FineTuning, attach, gradual
from fishleg.inverse import InverseFisher
from fishleg.layers import register_layer
from fishleg.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from fishleg.masking import keep_zeros, masks_of
from fishleg.optimizer import FishLeg
from fishleg.patterns import schedule
from fishleg.surgeon import PruneStep, Surgeon, SurgeonOptions
from fishleg.warmstart import AuxiliaryOptions

__all__ = [
    "AuxStats",
    "Auxiliary",
    "AuxiliaryOptions",
    "Bernoulli",
    "Categorical",
    "FineTuning",
    "FishLeg",
    "Gaussian",
    "InverseFisher",
    "Likelihood",
    "PruneStep",
    "Surgeon",
    "SurgeonOptions",
    "attach",
    "gradual",
    "keep_zeros",
    "masks_of",
    "prune",
    "register_layer",
    "schedule",
]
