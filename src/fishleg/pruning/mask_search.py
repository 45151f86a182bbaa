"""Better masks than single scores can choose: kept and removed weights change places, round by round."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fishleg.inverse.operators import Operator
from fishleg.pruning.compensation import Compensation
from fishleg.pruning.patterns import Masks

logger = logging.getLogger(__name__)
_MARGIN, _GROWTH = 2.0, 3.0  # found by trial on ResNet20, one shot, 80 and 90 %
_ENOUGH = 0.003  # a round that gains less, relative to the loss, is the last: the next would gain still less


def search_masks(
    masks: Masks,
    judge: Callable[[Masks], tuple[float, Mapping[str, Tensor]]],
    choose: Callable[[Mapping[str, Tensor]], Masks],
    rounds: int,
) -> Masks:
    """Masks that `judge` finds no worse than these, and better wherever an exchange helps.

    judge: the loss increase of masks, and what each weight is worth beside all the others.
    choose: masks from scores, with the count and the pattern that they must have.
    Many weights change places at once and may get into each other's way. So a removed weight must be worth
    `_MARGIN` times as much as a kept one, a round counts only if the loss falls, and one that did not
    makes the next more careful. Rounds end when they are used up, or when one hardly helps any more.
    """
    margin, first = _MARGIN, masks
    start, scores = judge(masks)
    best = start
    if not _sound(best, scores):
        logger.warning("no exchanges: the loss increase of the masks, or a weight's worth, is not finite")
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
    logger.info("%d weights changed places: predicted loss increase %.4g, was %.4g", moved, best, start)
    return masks


def _sound(loss: float, scores: Mapping[str, Tensor]) -> bool:
    """Whether one can choose by them; −inf is a fine score, of what must not return."""
    return math.isfinite(loss) and all(bool((s < math.inf).all()) for s in scores.values())


def swap_curvature(q: Operator) -> Tensor:
    """The curvature c that a weight is taken to meet when it comes or goes, the others giving way.

    It is F_ii = (Q⁻¹)_ii at most, if nothing else moves, and 1/Q_ii at least, if everything gives way. Which
    weights do is known at the price of one solution each; the geometric mean of the two stands in for it.
    """
    return (q.inverse_diag() / q.diag()).sqrt()


def swap_scores(w: Tensor, curvature: Tensor, removed: Tensor, solved: Compensation) -> Tensor:
    """What each weight is worth beside all the others, once `removed` are gone and compensated (jointly).

    To remove a kept weight costs ½c v², v = w + δ; the return of a removed one gains x²/2c, x its multiplier.
    """
    if solved.multipliers is None:
        raise ValueError("exchange scores need a joint compensation")
    gain = solved.multipliers.square() / (2 * curvature)
    return torch.where(removed, gain, 0.5 * curvature * (w + solved.delta).square())
