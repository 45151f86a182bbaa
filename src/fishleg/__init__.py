"""fishleg: a learned inverse Fisher for PyTorch models, and what it is good for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fishleg.api import prune
    from fishleg.attachment import attach
    from fishleg.auxiliary import Auxiliary, AuxStats
    from fishleg.cutting import load_shrunk, shrink
    from fishleg.inverse import InverseFisher
    from fishleg.layers import register_layer
    from fishleg.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
    from fishleg.loop import Gradual, gradual
    from fishleg.masking import keep_zeros, masks_of
    from fishleg.optimizer import FishLeg
    from fishleg.options import SurgeonOptions
    from fishleg.patterns import schedule
    from fishleg.surgeon import PruneStep, Surgeon
    from fishleg.tuning import FineTuning
    from fishleg.warmstart import AuxiliaryOptions

# Names are imported when they are first used: `fishleg --help` must not wait for torch.
_HOMES = {
    "AuxStats": "auxiliary",
    "Auxiliary": "auxiliary",
    "AuxiliaryOptions": "warmstart",
    "Bernoulli": "likelihoods",
    "Categorical": "likelihoods",
    "FineTuning": "tuning",
    "FishLeg": "optimizer",
    "Gaussian": "likelihoods",
    "Gradual": "loop",
    "InverseFisher": "inverse",
    "Likelihood": "likelihoods",
    "PruneStep": "surgeon",
    "Surgeon": "surgeon",
    "SurgeonOptions": "options",
    "attach": "attachment",
    "gradual": "loop",
    "keep_zeros": "masking",
    "load_shrunk": "cutting",
    "masks_of": "masking",
    "prune": "api",
    "register_layer": "layers",
    "schedule": "patterns",
    "shrink": "cutting",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fishleg' has no attribute {name!r}")
    return getattr(import_module(f"fishleg.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


__all__ = [
    "AuxStats",
    "Auxiliary",
    "AuxiliaryOptions",
    "Bernoulli",
    "Categorical",
    "FineTuning",
    "FishLeg",
    "Gaussian",
    "Gradual",
    "InverseFisher",
    "Likelihood",
    "PruneStep",
    "Surgeon",
    "SurgeonOptions",
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
