"""fishleg: a learned inverse Fisher for PyTorch models, and what it is good for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fishleg.curvature.layers import register_layer
    from fishleg.curvature.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
    from fishleg.inverse.auxiliary import Auxiliary, AuxiliaryStats
    from fishleg.inverse.inverse_fisher import InverseFisher
    from fishleg.inverse.options import AuxiliaryOptions
    from fishleg.optim.fishleg import FishLeg
    from fishleg.pruning.api import prune
    from fishleg.pruning.attach import attach
    from fishleg.pruning.gradual import Gradual, gradual
    from fishleg.pruning.keep_zeros import keep_zeros
    from fishleg.pruning.masks import masks_of
    from fishleg.pruning.options import PruningOptions
    from fishleg.pruning.schedules import schedule
    from fishleg.pruning.surgeon import PruneStep, Surgeon
    from fishleg.pruning.tuning import FineTuningOptions
    from fishleg.shrinking.shrink import load_shrunk, shrink

# Names are imported when they are first used: `fishleg --help` must not wait for torch.
_HOMES = {
    "AuxiliaryStats": "inverse.auxiliary",
    "Auxiliary": "inverse.auxiliary",
    "AuxiliaryOptions": "inverse.options",
    "Bernoulli": "curvature.likelihoods",
    "Categorical": "curvature.likelihoods",
    "FineTuningOptions": "pruning.tuning",
    "FishLeg": "optim.fishleg",
    "Gaussian": "curvature.likelihoods",
    "Gradual": "pruning.gradual",
    "InverseFisher": "inverse.inverse_fisher",
    "Likelihood": "curvature.likelihoods",
    "PruneStep": "pruning.surgeon",
    "Surgeon": "pruning.surgeon",
    "PruningOptions": "pruning.options",
    "attach": "pruning.attach",
    "gradual": "pruning.gradual",
    "keep_zeros": "pruning.keep_zeros",
    "load_shrunk": "shrinking.shrink",
    "masks_of": "pruning.masks",
    "prune": "pruning.api",
    "register_layer": "curvature.layers",
    "schedule": "pruning.schedules",
    "shrink": "shrinking.shrink",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fishleg' has no attribute {name!r}")
    return getattr(import_module(f"fishleg.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


__all__ = [
    "AuxiliaryStats",
    "Auxiliary",
    "AuxiliaryOptions",
    "Bernoulli",
    "Categorical",
    "FineTuningOptions",
    "FishLeg",
    "Gaussian",
    "Gradual",
    "InverseFisher",
    "Likelihood",
    "PruneStep",
    "Surgeon",
    "PruningOptions",
    "attach",
    "gradual",
    "keep_zeros",
    "load_shrunk",
    "masks_of",
    "prune",
    "register_layer",
    "schedule",
    "shrink",
]
