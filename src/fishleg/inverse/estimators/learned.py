"""The learned Q of the paper, and the learning that can go on refining it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fishleg.inverse.auxiliary import Auxiliary, AuxiliaryStats
from fishleg.inverse.estimators.problem import LOADER, EstimationProblem
from fishleg.inverse.estimators.registry import Method
from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.inverse.operators import Operator
from fishleg.options import AuxiliaryOptions
from fishleg.options.pruning import DAMPING
from fishleg.runtime.batches import batch_size
from fishleg.runtime.loaders import SubBatchStream, sub_batches
from fishleg.runtime.process_group import agree_on_batch, check_equal_numbers

GROUPS = 4  # independent samples h per batch of an estimate
_LEAST_STEPS = 4


def learn_inverse(
    problem: EstimationProblem,
    *,
    relative_damping: float,
    gamma: float | None = None,
    on_step: Callable[[AuxiliaryStats], None] | None = None,
    learn: bool = True,
) -> Auxiliary:
    """Learn Q from about `samples` gradients; return it with the learning that can go on refining it.

    A learned Q covers the whole model, because it may also precondition training steps of all of it.

    Args:
        problem: The model, its data and the options.
        relative_damping: γ in units of the mean diagonal of F, where `gamma` is None.
        gamma: The damping; None: chosen on the first batch.
        on_step: Receives the statistics of every auxiliary step.
        learn: False leaves Q at its start, for a saved state to be loaded.

    Returns:
        The auxiliary learning; its `inverse` is Q.
    """
    options = problem.options
    inverse = InverseFisher.from_model(
        problem.model, options.structure, scale=options.scale, block_size=options.block_size,
        max_factor_dim=options.max_factor_dim, layers=problem.all_layers,
    )  # fmt: skip
    chosen = options.auxiliary or AuxiliaryOptions()
    groups = chosen.groups or GROUPS
    batches = sub_batches(problem.loader, groups * options.sub_batch, LOADER)
    if learn:  # a batch of few examples holds fewer groups, and more batches are needed
        groups = min(groups, _size_of_first(problem, batches))
    steps = max(options.samples // groups, _LEAST_STEPS)
    if learn:
        check_equal_numbers(
            problem.model, steps, "steps in which Q is learned (samples / examples of the first batch)",
            "give every process batches of one size",
        )  # fmt: skip
    longest = max(steps // 2, 2)  # an unfinished warm start would leave Q a multiple of I
    resolved = chosen.resolved(groups=groups, warm_start=longest)
    by_batch = chosen.batch_statistics or (options.learns_by_batch and not chosen.vectorize)
    assert resolved.warm_start is not None
    resolved = replace(resolved, warm_start=min(resolved.warm_start, longest), batch_statistics=by_batch)
    auxiliary = Auxiliary(
        problem.model, inverse, problem.likelihood, gamma=gamma, relative_damping=relative_damping,
        options=resolved, forward=problem.forward, generator=problem.generator,
    )  # fmt: skip
    auxiliary.ignore_removed_rows(problem.masks)
    if learn:
        auxiliary.learn(batches, steps, min_steps=steps, callback=on_step)
    return auxiliary


def _build(problem: EstimationProblem) -> dict[str, Operator]:
    """Return the operators of a learned Q, without the learning that could refine it."""
    auxiliary = learn_inverse(problem, relative_damping=DAMPING, gamma=problem.gamma)
    return {layer.name: auxiliary.inverse.unmasked(layer.name) for layer in problem.layers}


def _size_of_first(problem: EstimationProblem, batches: SubBatchStream) -> int:
    """Return the number of examples in the first batch. If one process cannot draw it, all of them raise."""
    size, error = 0, None
    try:
        size = batch_size(batches.peek())
    except Exception as found:
        error = found
    agree_on_batch(problem.model, LOADER, int(error is None), error)
    return size


METHOD = Method(_build, learns=True)
