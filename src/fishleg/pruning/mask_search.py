"""Better masks than single scores can choose: kept and removed weights change places, round by round."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fishleg.pruning.patterns import Masks

logger = logging.getLogger(__name__)
_MARGIN, _GROWTH = 2.0, 3.0  # found by trial on ResNet20, one shot, 80 and 90 %
_ENOUGH = 0.003  # a round that gains less, relative to the loss, is the last: the next would gain still less


def exchange(
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
