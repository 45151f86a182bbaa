"""Mask search: improve masks by swapping kept and removed weights, round by round.

Saliency scores each weight alone. The search scores all weights again after joint compensation, so that it
sees how weights replace each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fishleg.inverse.operators import Operator
from fishleg.pruning.compensation import Compensation
from fishleg.pruning.patterns import Masks
from fishleg.runtime.process_group import get_logger

logger = get_logger(__name__)
_MARGIN, _GROWTH = 2.0, 3.0  # tuned on ResNet20, one shot, 80 and 90 %
_ENOUGH = 0.003  # the search ends after a round whose relative gain is smaller: the next would gain even less


def search_masks(
    masks: Masks,
    judge: Callable[[Masks], tuple[float, Mapping[str, Tensor]]],
    choose: Callable[[Mapping[str, Tensor]], Masks],
    rounds: int,
) -> Masks:
    """Return masks whose predicted loss increase is at most that of the given ones.

    Each round swaps many weights at once, and the scores do not show how these swaps interact. Therefore a
    removed weight returns only if its score is `_MARGIN` times that of the kept weight it replaces. A round
    is accepted only if the predicted loss falls. After a rejected round the margin grows. The search ends
    after `rounds` rounds, or when a round gains little.

    Args:
        masks: The masks to start from, by weight name; True = kept.
        judge: Returns the predicted loss increase of masks, and a score of every weight given the masks.
        choose: Returns masks from scores, with the required number of kept weights and the pattern.
        rounds: The largest number of rounds.

    Returns:
        The best masks that were found.
    """
    margin, first = _MARGIN, masks
    start, scores = judge(masks)
    best = start
    if not _sound(best, scores):
        logger.warning("no mask search: the predicted loss increase of the masks, or a score, is not finite")
        return masks
    for _ in range(rounds):
        trial = choose({name: torch.where(masks[name], margin * s, s) for name, s in scores.items()})
        if all(torch.equal(trial[name], masks[name]) for name in masks):
            break
        loss, trial_scores = judge(trial)
        if loss < best and _sound(loss, trial_scores):
            last = best - loss < _ENOUGH * best
            best, scores, masks = loss, trial_scores, trial
            if last:
                break
        else:
            margin *= _GROWTH
    moved = sum(int((masks[name] & ~mask).sum()) for name, mask in first.items())
    logger.info("mask search swapped %d weights: predicted loss increase %.4g, was %.4g", moved, best, start)
    return masks


def _sound(loss: float, scores: Mapping[str, Tensor]) -> bool:
    """Return whether the loss and all scores are finite; −inf is allowed: such weights never return."""
    return math.isfinite(loss) and all(bool((s < math.inf).all()) for s in scores.values())


def swap_curvature(q: Operator) -> Tensor:
    """Return an approximate curvature c of the loss along each weight, while the other weights compensate.

    The exact value lies between 1/Q_ii (all other weights compensate) and F_ii = (Q⁻¹)_ii (none does). It
    would cost the solution of one linear system per weight. The geometric mean of the bounds is used.

    Args:
        q: The layer's Q.

    Returns:
        c, [n_out, n_in].
    """
    return (q.inverse_diag() / q.diag()).sqrt()


def swap_scores(w: Tensor, curvature: Tensor, removed: Tensor, solved: Compensation) -> Tensor:
    """Return the score of each weight after a set of weights is removed and jointly compensated.

    The score of a kept weight is the loss increase if it is removed too: ½ c v² with v = w + δ. The score of
    a removed weight is the loss decrease if it returns: x²/(2c), where x is its multiplier.

    Args:
        w: The weights of a layer, [n_out, n_in].
        curvature: c as `swap_curvature` returns it, [n_out, n_in].
        removed: The removed weights, boolean [n_out, n_in].
        solved: The joint compensation of these weights.

    Returns:
        The scores, [n_out, n_in].

    Raises:
        ValueError: The compensation is not joint.
    """
    if solved.multipliers is None:
        raise ValueError("swap scores need a joint compensation: the given one has no multipliers")
    gain = solved.multipliers.square() / (2 * curvature)
    return torch.where(removed, gain, 0.5 * curvature * (w + solved.delta).square())
