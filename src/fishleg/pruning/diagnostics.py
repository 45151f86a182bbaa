"""Checks and warnings before and after a pruning step.

They find common mistakes, such as outputs that are probabilities instead of logits. Nothing is changed here.
"""

from __future__ import annotations

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
from fishleg.runtime.process_group import get_logger

logger = get_logger(__name__)
_FAR_OFF = ((0.05, 5.0), (0.1, 3.0))  # a measured KL above this, and above so many times the prediction
_TOO_LARGE_A_STEP = (
    "the quadratic model does not hold for such a large step; use more stages, more samples or another "
    "damping"
)
_ENOUGH = 64  # with fewer outputs, all of them may lie in [0, 1] by chance


def warn_about_outputs(outputs: Sequence[Tensor], batches: Sequence[Any], likelihood: Likelihood) -> None:
    """Warn if the outputs look like probabilities, or if the dimension of the classes looks wrong.

    Args:
        outputs: The model's outputs on some batches.
        batches: These batches.
        likelihood: The distribution of the outputs.
    """
    if not outputs:
        return
    f = torch.cat([f.flatten() for f in outputs])
    probabilities = f.numel() >= _ENOUGH and bool(((f >= 0) & (f <= 1)).all()) and bool(f.max() > f.min())
    message = (
        "the model's outputs look like probabilities, but logits are expected: leave out the final %s, or F "
        "will be that of a different, much flatter distribution"
    )
    if isinstance(likelihood, Bernoulli) and probabilities:
        logger.warning(message, "sigmoid")
    if isinstance(likelihood, Categorical):
        first, targets = outputs[0], targets_of(batches[0])
        sums = [g.sum(likelihood.class_dim) for g in outputs]
        if probabilities and all(bool(((total - 1).abs() < 1e-3).all()) for total in sums):
            logger.warning(message, "softmax")
        fits = targets is not None and targets.shape == first.shape[:-1]
        if first.dim() == 4 and likelihood.class_dim in (-1, 3) and not fits:
            logger.warning(
                "the outputs have the shape %s, and the last dimension is taken as the classes. If they "
                "are maps [batch, classes, height, width], pass likelihood=Categorical(class_dim=1)",
                tuple(first.shape),
            )


def check_batches(
    model: nn.Module, batch: Any, likelihood: Likelihood, forward: Forward, options: PruningOptions
) -> None:
    """Check that a batch can be split into smaller ones, and warn if its targets do not fit the outputs.

    Args:
        model: The model.
        batch: A calibration batch.
        likelihood: The distribution of the outputs.
        forward: How the model is called on a batch.
        options: The options of the pruning.

    Raises:
        ValueError: The outputs do not fit the likelihood, or a part of the batch is not a smaller batch.
    """
    batch = move_batch(batch, next(model.parameters()).device)
    with evaluation_mode(model), torch.no_grad():
        f = forward(model, batch)
        likelihood.check(f, None)
        # a learned Q takes several groups of examples from each batch, unless `groups` is 1
        groups = None if options.auxiliary is None else options.auxiliary.groups
        grouped = options.method == "fishleg" and (groups is None or groups > 1)
        _check_split(model, batch, f, forward, 1 if grouped else options.sub_batch)
    # with a forward of the user's own, the second part of a batch may be another input and not the targets
    if forward is not default_forward or (targets := targets_of(batch)) is None:
        return
    try:
        likelihood.check(f, targets)
    except ValueError as error:
        logger.warning(
            "the targets do not fit the outputs and are not used: %s. The true Fisher matrix needs none, "
            "but the empirical one and training do",
            error,
        )


def _check_split(model: nn.Module, batch: Any, f: Tensor, forward: Forward, whole: int) -> None:
    """Compare the outputs f of a batch with those of its halves: Q is learned from parts of batches.

    A batch of at most `whole` examples is never split, and is not checked.

    Raises:
        ValueError: A half is not a smaller batch.
    """
    try:
        size = batch_size(batch)
    except ValueError:
        return  # a batch that cannot be split raises in `slice_batch`, where it is split
    if size <= whole:
        return
    shapes = []
    for start, stop in ((0, size // 2), (size // 2, size)):
        part = slice_batch(batch, start, stop)
        try:
            shapes.append(forward(model, part).shape)
        except Exception as error:
            raise ValueError(
                f"the model cannot be called on examples {start} to {stop - 1} of a batch of {size}: "
                "the first dimension of the inputs must be the examples "
                f"({type(error).__name__}: {error})"
            ) from error
    check_parts(batch, f.shape, shapes)


def warn_about_unused_weights(
    model: nn.Module, names: Sequence[str], batches: Sequence[Any], forward: Forward, examples: int
) -> None:
    """Warn if the outputs do not depend on some weights: F is zero there, and they are pruned first.

    A mixture of experts uses different weights for different examples. Therefore further examples are
    tried as long as some weights are unused.

    Args:
        model: The model.
        names: The names of the weights that are pruned.
        batches: Some calibration batches.
        forward: How the model is called on a batch.
        examples: The number of examples that are tried at a time.
    """
    device, unused = next(model.parameters()).device, list(names)
    for piece in (move_batch(piece, device) for batch in batches for piece in _pieces(batch, examples)):
        with evaluation_mode(model), torch.enable_grad():
            f = forward(model, piece)
            if not f.requires_grad:
                return  # the estimate of Q raises an error for a forward without gradients
            weights = [model.get_parameter(name) for name in unused]
            gradients = torch.autograd.grad(f.sum(), weights, allow_unused=True)
        unused = [name for name, g in zip(unused, gradients, strict=True) if g is None]
        if not unused:
            return
    logger.warning(
        "%s %s no part in the model's output on the first batches: the curvature is zero there, and such "
        "weights are pruned first. If they matter, exclude them, or pass a forward function that returns all "
        "outputs (join several heads with torch.cat)",
        ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else ""),
        "has" if len(unused) == 1 else "have",
    )


def _pieces(batch: Any, examples: int) -> Iterator[Any]:
    """Yield a batch in parts, or as a whole if its number of examples is unknown.

    Yields:
        Batches of at most `examples` examples.
    """
    try:
        size = batch_size(batch)
    except ValueError:
        yield batch
        return
    for start in range(0, size, examples):
        yield slice_batch(batch, start, min(start + examples, size))


def warn_about_batchnorm_refresh(before: float | None, after: float | None) -> bool:
    """Warn if refreshing BatchNorm's statistics has made the outputs much worse.

    Args:
        before: The divergence from the outputs before pruning, without the refresh; None: not measured.
        after: The same with the refresh.

    Returns:
        Whether a warning was given.
    """
    # small changes are normal: the old statistics may not have matched the weights
    if before is None or after is None or after < 0.25 or after < 3 * before:
        return False
    logger.warning(
        "the refresh of BatchNorm's statistics on the loader's first batches has raised the KL to the "
        "outputs before pruning from %.3g to %.3g. These batches must resemble the training data: "
        "shuffle a loader that is ordered by class, or keep the old statistics (batchnorm_batches=0)",
        before, after,
    )  # fmt: skip
    return True


def exceeds_prediction(predicted: float, measured: float) -> bool:
    """Tell whether a loss increase is so far above its prediction that the quadratic model does not hold.

    Measured on small networks for the digits (with BatchNorm, and plain; all patterns, 50 to 95 %, one shot
    and staged): good runs at the usual sparsities have a KL below 0.05, or below 0.1 and at most five times
    the prediction. Staged runs to 90 % end at up to 2.9 times the prediction. From three times at a KL above
    0.1 on, accuracy had fallen by several points.

    Args:
        predicted: The loss increase that Q predicted.
        measured: The measured one.

    Returns:
        True if it is.
    """
    return any(measured > least and measured > factor * predicted for least, factor in _FAR_OFF)


def warn_about_prediction(sparsity: float, predicted: float, measured: float | None) -> None:
    """Warn if the loss increase of one step differs much from what the quadratic model predicted.

    Args:
        sparsity: The sparsity after the step.
        predicted: The loss increase that Q predicted.
        measured: The measured one; None: not measured.
    """
    if measured is None:
        return
    if exceeds_prediction(predicted, measured):
        verdict = _TOO_LARGE_A_STEP
    elif predicted > 0.05 and predicted > 5 * measured:
        verdict = (
            "less than predicted, but Q is inaccurate, and so is its choice of weights; more samples may help"
        )
    else:
        return
    logger.warning(
        "at sparsity %.3f the loss increase is %.3g, but Q predicted %.3g: %s",
        sparsity, measured, predicted, verdict,
    )  # fmt: skip


def judge_total(
    sparsity: float, predicted: Sequence[float], measured: float | None, *, refresh_harmed: bool = False
) -> str | None:
    """Return a warning if all steps together change the outputs much more than predicted.

    Each step alone may be too small for `warn_about_prediction`. If the steps are independent, the total KL
    is about the sum of the single ones. If they all point in one direction it is larger, but rarely by much.

    Args:
        sparsity: The sparsity after the last step.
        predicted: The predicted loss increase of each step.
        measured: The KL to the model before the first step; None: not measured.
        refresh_harmed: Whether `warn_about_batchnorm_refresh` has given a warning at one of the steps.

    Returns:
        The text of the warning; None where there is nothing to warn of.
    """
    total = sum(predicted)
    if not predicted or measured is None or not exceeds_prediction(total, measured):
        return None
    if refresh_harmed:
        verdict = "the refresh of BatchNorm's statistics has changed the outputs (see the warning there)"
    elif len(predicted) == 1:
        verdict = _TOO_LARGE_A_STEP
    else:
        verdict = (
            "the quadratic model does not hold for their sum. More samples, another damping or training in "
            "between (mode='gradual') may help"
        )
    steps = f" for the {len(predicted)} steps together" if len(predicted) > 1 else ""
    return (
        f"at sparsity {sparsity:.3f} the KL to the outputs before pruning is {measured:.3g}, but Q predicted "
        f"{total:.3g}{steps}: {verdict}"
    )


def warn_about_loose_zeros(count: int, sparsity: float, pattern: str) -> None:
    """Warn if the model had zeros that the masks do not cover: compensation and training may change them.

    Args:
        count: The number of such zeros.
        sparsity: The sparsity after the step.
        pattern: The name of the pattern.
    """
    if count:
        logger.warning(
            "%d weights that were zero already are not among those removed at sparsity %.3f, pattern %s: "
            "compensation and training may change them. Use a higher sparsity than the model has already",
            count, sparsity, pattern,
        )  # fmt: skip
