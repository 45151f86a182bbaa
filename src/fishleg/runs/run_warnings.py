"""Warnings at the start of a run, about its data, its model and its budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fishleg.pruning.surgeon import Surgeon
from fishleg.runs.metrics import Evaluation, Evaluator
from fishleg.runs.recipe import Recipe

_NOTABLE_CHANGE = 0.01  # of an accuracy, or relative to another metric


def run_warnings(
    recipe: Recipe,
    surgeon: Surgeon,
    evaluator: Evaluator,
    macs: Mapping[str, int],
    dense: Evaluation,
    refreshed: Evaluation | None,
) -> Iterator[str]:
    """Yield warnings about common oversights.

    Args:
        recipe: All options of the run.
        surgeon: The surgeon of the run.
        evaluator: Measures the model.
        macs: Multiply-adds by weight name.
        dense: The evaluation of the dense model.
        refreshed: The same with refreshed statistics of BatchNorm; None where nothing is refreshed.

    Yields:
        One sentence for each oversight.
    """
    if not recipe.data.eval_data and evaluator.most_batches is not None:
        yield (
            f"the {evaluator.name} is measured on the calibration data; name data that the model "
            "has not seen (eval_data) to know what pruning really costs"
        )
    unknown = [name for name in surgeon.weights.names if name not in macs]
    if unknown:
        yield (
            f"the multiply-adds of {', '.join(unknown[:3])}{' ...' if len(unknown) > 3 else ''} are "
            "unknown, because no module is called that owns them: all figures and max_flops leave them out"
        )
    if refreshed is not None:
        change = evaluator.drop(dense.metric, refreshed.metric)
        if abs(change) > _NOTABLE_CHANGE:
            yield _on_refresh(evaluator, dense, refreshed, better=change < 0)
    chance = 1 / max(evaluator.classes, 1)
    if evaluator.name == "accuracy" and dense.metric < 1.5 * chance:
        yield (
            f"the dense model's accuracy is {dense.metric:.1%}, which is near chance: is it trained "
            "(weights), and are labels and classes in the same order?"
        )


def _on_refresh(evaluator: Evaluator, dense: Evaluation, refreshed: Evaluation, *, better: bool) -> str:
    before, after = (evaluator.formatted(result.metric) for result in (dense, refreshed))
    told = (
        "refreshing the statistics of BatchNorm on the calibration data, as after every pruning step, "
        f"changes the {evaluator.name} from {before} to {after} with nothing pruned: "
    )
    if better:
        return told + (
            "the statistics lag behind the weights. Compare pruned models with the second number; max_drop "
            "is measured from it"
        )
    return told + (
        "the calibration data do not resemble the training data, or are too few. Give other data or more "
        "batches (batchnorm_batches), or keep the old statistics (batchnorm_batches = 0)"
    )
