"""TODO."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.curvature.likelihoods import Likelihood
from fishleg.inverse.auxiliary import Auxiliary, AuxiliaryStats
from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.inverse.options import DAMPING, AuxiliaryOptions
from fishleg.inverse.structures import DEFAULT_STRUCTURE, Structure
from fishleg.runtime.batches import Forward, batch_size, default_forward
from fishleg.runtime.loaders import sub_batches


def learner(
    model: nn.Module,
    loader: Iterable[Any],
    likelihood: Likelihood | str = "categorical",
    *,
    gamma: float | None = None,
    relative_damping: float = DAMPING,
    samples: int = 256,
    sub_batch: int = 16,
    block_size: int = 50,
    structure: Structure = DEFAULT_STRUCTURE,
    scale: float | None = None,
    options: AuxiliaryOptions | None = None,
    forward: Forward = default_forward,
    generator: torch.Generator | None = None,
    callback: Callable[[AuxiliaryStats], None] | None = None,
    untaught: bool = False,
    batch_statistics: bool = False,
    masks: Mapping[str, Tensor] | None = None,
) -> Auxiliary:
    """A Q learned from about `samples` gradients, with the learning that can go on refining it.

    `untaught` leaves it at its start, for a saved state to be loaded.
    """
    inverse = InverseFisher.from_model(model, structure, scale=scale, block_size=block_size)
    groups = 4 if options is None else options.groups
    batches: Iterable[Any] = ()
    if not untaught:  # batches of few examples hold fewer groups, and more of them are needed
        stream = sub_batches(loader, groups * sub_batch)
        first = next(stream)
        groups, batches = min(groups, batch_size(first)), chain([first], stream)
    steps = max(samples // groups, 4)
    most = max(steps // 2, 2)  # a warm start that has not come to its end leaves Q a multiple of I
    options = options or AuxiliaryOptions(groups=groups, warm_start=most)
    options = replace(options, warm_start=min(options.warm_start, most))
    by_batch = options.batch_statistics or (batch_statistics and not options.vectorize)
    options = replace(options, batch_statistics=by_batch)
    auxiliary = Auxiliary(
        model, inverse, likelihood, gamma=gamma, relative_damping=relative_damping,
        options=options, forward=forward, generator=generator,
    )  # fmt: skip
    auxiliary.ignore_removed_rows(masks or {})
    if not untaught:
        auxiliary.learn(batches, steps, min_steps=steps, callback=callback)
    return auxiliary
