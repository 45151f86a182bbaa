"""What a run measures: the dense model, without and with refreshed BatchNorm, and every pruned one."""

from __future__ import annotations

import math

from torch import nn

from fishleg.runs.log import RunLog
from fishleg.runs.metrics import Evaluation, NonFiniteOutputs
from fishleg.runs.setup import Prepared
from fishleg.runtime.batchnorm import refresh_batchnorm, refreshable_norms
from fishleg.runtime.models import copy_model
from fishleg.runtime.random_state import seeded


class Measurements:
    """Evaluates the models of a run, and shows the progress of each evaluation.

    Args:
        prepared: The models, the data and the evaluator.
        run_log: The log of the run, whose record holds the evaluations of the dense model.
    """

    def __init__(self, prepared: Prepared, run_log: RunLog) -> None:
        self.prepared, self.run_log, self.evaluator = prepared, run_log, prepared.evaluator

    def _evaluate(self, model: nn.Module, which: str) -> Evaluation:
        self.evaluator.on_batch = lambda done, total: self.run_log.show(
            "progress", what=f"evaluating the {which} model", done=done, total=total
        )
        with self.run_log.timed("evaluate"):
            return self.evaluator(model)

    def dense(self) -> tuple[Evaluation, Evaluation | None]:
        """Evaluate the dense model, with the seed of the run: earlier random numbers do not matter.

        Returns:
            Metric and loss of the model as it is, and with refreshed statistics of BatchNorm, as every pruned
            model has them; None where nothing is refreshed.
        """
        prepared, seed = self.prepared, self.prepared.recipe.run.seed
        with seeded(seed):
            found = self._evaluate(prepared.model, "dense")
        batches = prepared.recipe.pruning.batchnorm_batches
        if not batches or not refreshable_norms(prepared.dense):
            return found, None
        model = copy_model(prepared.dense)
        with seeded(seed):
            refresh_batchnorm(model, prepared.calibration, batches, prepared.forward)
            prepared.calibration.restart(passes=1)
            return found, self._evaluate(model, "dense")

    def pruned(self, *, search: bool = False) -> Evaluation:
        """Evaluate the pruned model.

        Args:
            search: Whether a model whose outputs are not finite is one to go back from, and no error.

        Returns:
            Metric and loss; NaN for such a model in a search.

        Raises:
            NonFiniteOutputs: The outputs are not finite, and this is no search.
        """
        try:
            return self._evaluate(self.prepared.model, "pruned")
        except NonFiniteOutputs:
            if not search:
                raise
            return Evaluation(math.nan, None)

    def drop(self, result: Evaluation) -> float:
        """Return how much worse than the dense model a pruned one is.

        Args:
            result: The evaluation of the pruned model.

        Returns:
            The drop from the dense model as it is or with refreshed statistics of BatchNorm, whichever is
            larger: a gain from the refresh must not hide a loss from the pruning.
        """
        record = self.run_log.record
        before = [record[name]["metric"] for name in ("dense", "refreshed") if name in record]
        return max(self.evaluator.drop(metric, result.metric) for metric in before)
