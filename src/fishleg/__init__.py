"""fishleg: prune PyTorch models with a learned inverse Fisher matrix."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fishleg.curvature import (
        Bernoulli,
        Categorical,
        Gaussian,
        Likelihood,
        register_layer,
        register_likelihood,
    )
    from fishleg.inverse import (
        Auxiliary,
        AuxiliaryStats,
        InverseFisher,
        register_method,
        register_structure,
    )
    from fishleg.optim import FishLeg
    from fishleg.options import AuxiliaryOptions, FineTuningOptions, PruningOptions
    from fishleg.pruning import (
        PruneStep,
        PruningSession,
        Surgeon,
        attach,
        keep_zeros,
        masks_of,
        prune,
        register_pattern,
        schedule,
    )
    from fishleg.shrinking import load_shrunk, shrink

__version__ = "0.2.0"

# Names are imported when they are first used: `fishleg --help` must not wait for torch.
_ROOMS = {
    "curvature": (
        "Bernoulli",
        "Categorical",
        "Gaussian",
        "Likelihood",
        "register_layer",
        "register_likelihood",
    ),
    "inverse": ("Auxiliary", "AuxiliaryStats", "InverseFisher", "register_method", "register_structure"),
    "optim": ("FishLeg",),
    "options": ("AuxiliaryOptions", "FineTuningOptions", "PruningOptions"),
    "pruning": (
        "PruneStep",
        "PruningSession",
        "Surgeon",
        "attach",
        "keep_zeros",
        "masks_of",
        "prune",
        "register_pattern",
        "schedule",
    ),
    "shrinking": ("load_shrunk", "shrink"),
}
_HOMES = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fishleg' has no attribute {name!r}")
    return getattr(import_module(f"fishleg.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


__all__ = [
    "Auxiliary",
    "AuxiliaryOptions",
    "AuxiliaryStats",
    "Bernoulli",
    "Categorical",
    "FineTuningOptions",
    "FishLeg",
    "Gaussian",
    "InverseFisher",
    "Likelihood",
    "PruneStep",
    "PruningOptions",
    "PruningSession",
    "Surgeon",
    "__version__",
    "attach",
    "keep_zeros",
    "load_shrunk",
    "masks_of",
    "prune",
    "register_layer",
    "register_likelihood",
    "register_method",
    "register_pattern",
    "register_structure",
    "schedule",
    "shrink",
]
