"""How good a model is: accuracy or loss on labelled data, agreement with the dense model without labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from fishleg.curvature.likelihoods import Categorical, Gaussian, Likelihood
from fishleg.runs.errors import ToolError
from fishleg.runs.sources import describe_error
from fishleg.runtime.batches import Forward, default_forward, move_batch, targets_of
from fishleg.runtime.replay import Replayable

Custom = Callable[[nn.Module, Iterable[Any]], float]


@dataclass(frozen=True)
class Evaluation:
    """The metric of the run, and the loss (None where there are no labels)."""

    metric: float
    loss: float | None


class Evaluator:
    """Measures models on one loader.

    With labels: accuracy (categorical), mean squared error (Gaussian with a fixed σ) or the loss. Without:
    agreement (same answer as the reference model) or divergence from it.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        likelihood: Likelihood,
        forward: Forward = default_forward,
        *,
        reference: nn.Module | None = None,
        custom: Custom | None = None,
        most_batches: int | None = None,
    ) -> None:
        self.loader, self.likelihood, self.forward, self.custom = loader, likelihood, forward, custom
        self.reference, self.most_batches = reference, most_batches
        self.classes = 0  # known after the first evaluation
        self.labelled = targets_of(next(iter(loader), None)) is not None
        if not self.labelled and custom is None and reference is None:
            raise ToolError("there are no labels to measure with, and no dense model to compare with")
        classes = isinstance(likelihood, Categorical)
        self.name = "metric"
        if custom is None and self.labelled:
            squared = isinstance(likelihood, Gaussian) and not likelihood.learned_sigma
            self.name = "accuracy" if classes else "mse" if squared else "loss"
        elif custom is None:
            self.name = "agreement" if classes else "divergence"
        self.higher_is_better = self.name in ("accuracy", "agreement", "metric")
        self.unit = "%" if self.name in ("accuracy", "agreement") else ""

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> Evaluation:
        """Evaluate in evaluation mode; every module's mode is restored."""
        if isinstance(self.loader, Replayable):
            self.loader.passes = 0  # the same batches every time
        modes = {module: module.training for module in model.modules()}
        device = next(model.parameters()).device
        loss = right = units = 0.0
        try:
            model.eval()
            if self.custom is not None:
                return Evaluation(self._custom_value(model), None)
            for place, batch in enumerate(islice(self.loader, self.most_batches), 1):
                batch = move_batch(batch, device)
                f = self.forward(model, batch)
                y = targets_of(batch)
                try:
                    self.likelihood.check(f, y)
                except ValueError as error:
                    raise ToolError(f"batch {place} of the data to evaluate on: {error}") from None
                if (y is not None) != self.labelled:
                    raise ToolError(f"some batches have labels and batch {place} is not like the first")
                valid = self.likelihood.valid(f, y)
                count = float(self.likelihood.units(f) if valid is None else int(valid.sum()))
                if not count:
                    continue
                if y is not None:
                    loss += count * float(self.likelihood.nll(f, y))
                right += count * self._score(f, batch, y, valid)
                units += count
        finally:
            for module, mode in modes.items():
                module.training = mode
        if not units:
            raise ToolError("there is nothing to evaluate on: the loader is empty or all labels are ignored")
        metric = loss / units if self.name == "loss" else right / units
        return Evaluation(metric, loss / units if self.labelled else None)

    def _custom_value(self, model: nn.Module) -> float:
        assert self.custom is not None
        try:
            value = self.custom(model, self.loader)
        except Exception as error:
            raise ToolError(f"metric: the function raised {describe_error(error)}") from error
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ToolError(f"metric: the function must return a number, got {value!r}") from None
        if not math.isfinite(number):
            raise ToolError(f"metric: the function must return a finite number, got {number}")
        return number

    def _score(
        self, f: torch.Tensor, batch: Any, y: torch.Tensor | None, valid: torch.Tensor | None
    ) -> float:
        """The mean score of a batch."""
        if self.name == "loss":
            return 0.0
        if self.name == "mse":
            assert y is not None
            return float((f - y.view(f.shape)).double().square().mean())  # [batch] and [batch, 1] are alike
        self.classes = f.shape[self.likelihood.class_dim] if isinstance(self.likelihood, Categorical) else 0
        if self.name in ("agreement", "divergence"):
            assert self.reference is not None
            expected = self.forward(self.reference, batch)
            if self.name == "divergence":
                return float(self.likelihood.divergence(f, expected, valid))
        assert isinstance(self.likelihood, Categorical)
        answer = f.argmax(self.likelihood.class_dim)
        if self.name == "accuracy":
            assert y is not None
            right = answer == (y.argmax(self.likelihood.class_dim) if y.is_floating_point() else y)
        else:
            right = answer == expected.argmax(self.likelihood.class_dim)
        return float((right if valid is None else right[valid]).double().mean())

    def shown(self, value: float) -> str:
        """The metric for people."""
        return f"{100 * value:.2f} %" if self.unit == "%" else f"{value:.4g}"

    def drop(self, before: float, after: float) -> float:
        """How much worse: in points of accuracy or agreement, relative to the dense value otherwise."""
        if self.unit == "%":
            return before - after
        worse = before - after if self.higher_is_better else after - before
        return worse / max(abs(before), 1e-12)
