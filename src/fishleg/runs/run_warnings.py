"""Warnings at the start of a run, about its data, its model and its budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fishleg.pruning.surgeon import Surgeon
from fishleg.runs.metrics import Evaluation, Evaluator
from fishleg.runs.recipe import Recipe


def run_warnings(
    recipe: Recipe, surgeon: Surgeon, evaluator: Evaluator, macs: Mapping[str, int], dense: Evaluation
) -> Iterator[str]:
    """Yield warnings about common oversights.

    Args:
        recipe: All options of the run.
        surgeon: The surgeon of the run.
        evaluator: Measures the model.
        macs: Multiply-adds by weight name.
        dense: The evaluation of the dense model.

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
    chance = 1 / max(evaluator.classes, 1)
    if evaluator.name == "accuracy" and dense.metric < 1.5 * chance:
        yield (
            f"the dense model's accuracy is {dense.metric:.1%}, which is near chance: is it trained "
            "(weights), and are labels and classes in the same order?"
        )
