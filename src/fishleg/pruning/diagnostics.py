"""What a user may have overlooked, and is told before or after a pruning step; nothing is changed here."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.curvature.likelihoods import Bernoulli, Categorical, Likelihood
from fishleg.options import PruningOptions
from fishleg.runtime.batches import (
    Forward,
    batch_size,
    check_parts,
    default_forward,
    move_batch,
    slice_batch,
    targets_of,
)
from fishleg.runtime.modes import evaluation_mode

logger = logging.getLogger(__name__)
_ENOUGH = 64  # outputs from which one can tell that none is a logit


def warn_about_outputs(outputs: Sequence[Tensor], batches: Sequence[Any], likelihood: Likelihood) -> None:
    """Say so when they are probabilities already, or classes are sought where there may be none."""
    if not outputs:
        return
    f = torch.cat([f.flatten() for f in outputs])
    probable = f.numel() >= _ENOUGH and bool(((f >= 0) & (f <= 1)).all()) and bool(f.max() > f.min())
    told = (
        "the model's outputs look like probabilities, and logits are expected: leave out its last %s, or F "
        "is that of another, much flatter distribution"
    )
    if isinstance(likelihood, Bernoulli) and probable:
        logger.warning(told, "sigmoid")
    if isinstance(likelihood, Categorical):
        first, targets = outputs[0], targets_of(batches[0])
        if probable and all(bool(((g.sum(likelihood.class_dim) - 1).abs() < 1e-3).all()) for g in outputs):
            logger.warning(told, "softmax")
        fits = targets is not None and targets.shape == first.shape[:-1]
        if first.dim() == 4 and likelihood.class_dim in (-1, 3) and not fits:
            logger.warning(
                "the outputs have the shape %s, and the last dimension is taken for the classes: if these "
                "are maps [batch, classes, height, width], pass likelihood=Categorical(class_dim=1)",
                tuple(first.shape),
            )


def check_batches(
    model: nn.Module, batch: Any, likelihood: Likelihood, forward: Forward, options: PruningOptions
) -> None:
    """An error where a part of a batch is no smaller batch, and a word where its targets are no labels."""
    batch = move_batch(batch, next(model.parameters()).device)
    with evaluation_mode(model), torch.no_grad():
        f = forward(model, batch)
        likelihood.check(f, None)
        # a learned Q takes several groups of examples from each batch, unless it is told to take one
        groups = None if options.auxiliary is None else options.auxiliary.groups
        grouped = options.method == "fishleg" and (groups is None or groups > 1)
        _check_cut(model, batch, f, forward, 1 if grouped else options.sub_batch)
    # what comes second may be another input, and only who calls the model knows
    if forward is not default_forward or (targets := targets_of(batch)) is None:
        return
    try:
        likelihood.check(f, targets)
    except ValueError as error:
        logger.warning(
            "the targets do not fit the outputs and are left out: %s. The true Fisher matrix needs none; "
            "an empirical one and training do",
            error,
        )


def _check_cut(model: nn.Module, batch: Any, f: Tensor, forward: Forward, whole: int) -> None:
    """Compare the outputs f of a batch with those of its halves: Q is learned from parts of batches.

    Those of up to `whole` examples are not cut.
    """
    try:
        size = batch_size(batch)
    except ValueError:
        return  # those who have to cut it say so
    if size <= whole:
        return
    shapes = []
    for start, stop in ((0, size // 2), (size // 2, size)):
        part = slice_batch(batch, start, stop)
        try:
            shapes.append(forward(model, part).shape)
        except Exception as error:
            raise ValueError(
                f"the model cannot be called on examples {start} to {stop - 1} of a batch that was taken for "
                f"{size} of them: these must be the first dimension of the inputs "
                f"({type(error).__name__}: {error})"
            ) from error
    check_parts(batch, f.shape, shapes)


def warn_about_unused_weights(
    model: nn.Module, names: Sequence[str], batches: Sequence[Any], forward: Forward, examples: int
) -> None:
    """Say so when weights have no part in the output: F is zero there, and they are the first to go.

    A model may choose among its weights, as mixtures of experts do, so that more examples are looked at for
    as long as some are unused.
    """
    device, unused = next(model.parameters()).device, list(names)
    for piece in (move_batch(piece, device) for batch in batches for piece in _pieces(batch, examples)):
        with evaluation_mode(model), torch.enable_grad():
            f = forward(model, piece)
            if not f.requires_grad:
                return  # a forward without gradients is told by those who need them
            weights = [model.get_parameter(name) for name in unused]
            gradients = torch.autograd.grad(f.sum(), weights, allow_unused=True)
        unused = [name for name, g in zip(unused, gradients, strict=True) if g is None]
        if not unused:
            return
    logger.warning(
        "%s %s no part in the model's output on the first batches: curvature is zero there, and such weights "
        "are pruned first. Where they matter, pass forward= to say what the output is (of several heads: "
        "torch.cat), or exclude them",
        ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else ""),
        "has" if len(unused) == 1 else "have",
    )


def _pieces(batch: Any, examples: int) -> Iterator[Any]:
    """A batch in parts; as it is where nobody can tell how many examples it has."""
    try:
        size = batch_size(batch)
    except ValueError:
        yield batch
        return
    for start in range(0, size, examples):
        yield slice_batch(batch, start, min(start + examples, size))


def warn_about_batchnorm_refresh(before: float | None, after: float | None) -> bool:
    """Whether the renewal of BatchNorm's statistics has made things a good deal worse; says so."""
    # statistics that lagged behind the weights move the outputs, too, a little, and for the better
    if before is None or after is None or after < 0.25 or after < 3 * before:
        return False
    logger.warning(
        "renewing BatchNorm's statistics on the loader's first batches has moved the outputs from a KL of "
        "%.3g to %.3g: do these look like the data that the model was trained on? A loader that is ordered "
        "by class does not: shuffle it (or leave the statistics as they are, batchnorm_batches=0)",
        before, after,
    )  # fmt: skip
    return True


def warn_about_prediction(sparsity: float, predicted: float, measured: float | None) -> None:
    """Say so when the quadratic model was badly wrong: then more, smaller steps are due."""
    if measured is None:
        return
    if measured > 0.05 and measured > 5 * predicted:
        verdict = (
            "the quadratic model does not hold over so large a step; use more stages, more samples or "
            "another damping"
        )
    elif predicted > 0.05 and predicted > 5 * measured:
        verdict = (
            "better than feared, but Q is not to be trusted then, nor its choice of weights; more "
            "samples may help"
        )
    else:
        return
    logger.warning(
        "at sparsity %.3f the loss increase was %.3g, and Q had predicted %.3g: %s",
        sparsity, measured, predicted, verdict,
    )  # fmt: skip


def warn_about_total(sparsity: float, predicted: Sequence[float], measured: float | None) -> None:
    """Say so when steps that were each too small to be judged have led much further than predicted.

    `predicted` is that of each step, and `measured` the KL to the model before the first. That is about their
    sum where the steps point in all directions, and more, but rarely by much, where they point in one.
    """
    total = sum(predicted)
    if len(predicted) < 2 or measured is None or measured <= 0.02 or measured <= 5 * total:
        return
    logger.warning(
        "at sparsity %.3f the KL to the outputs before pruning is %.3g, and Q had predicted %.3g for the %d "
        "steps together: these add up to more than the quadratic model knows of; more samples or another "
        "damping may help, or training in between (mode='gradual')",
        sparsity, measured, total, len(predicted),
    )  # fmt: skip


def warn_about_loose_zeros(count: int, sparsity: float, pattern: str) -> None:
    """Say so when the model had zeros that the masks do not hold: compensation and training move them."""
    if count:
        logger.warning(
            "%d weights that were zero already are not among those removed at sparsity %.3f, pattern %s: "
            "compensation and training may fill them; prune further than the model is sparse",
            count, sparsity, pattern,
        )  # fmt: skip
