"""Measure a model: accuracy or loss with labels, agreement with the dense model without labels."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from fishleg.curvature.likelihoods import Categorical, Gaussian, Likelihood
from fishleg.runs.errors import ToolError
from fishleg.runs.sources import describe_error
from fishleg.runtime.batches import Forward, default_forward, inputs_of, map_tensors, move_batch, targets_of
from fishleg.runtime.replay import Replayable

Metric = Callable[[nn.Module, Iterable[Any]], float]


class NonFiniteOutputs(ToolError):
    """A model's outputs are NaN or infinite on inputs that are not."""


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Args:
        metric: The metric of the run.
        loss: The loss; None without labels.
    """

    metric: float
    loss: float | None


class Evaluator:
    """Measures models on one loader.

    With labels, the metric is the accuracy (categorical), the mean squared error (Gaussian with a fixed σ)
    or the loss. Without labels, it is the agreement with the reference model (categorical: the share of
    examples with the same class) or the divergence from it.

    Args:
        loader: The data to evaluate on.
        likelihood: The distribution of the outputs.
        forward: How a model is called on a batch.
        reference: The dense model; needed without labels.
        custom: A metric of the user's own, a function of model and loader; larger is better.
        most_batches: The largest number of batches to use; None: all.

    Attributes:
        name: The name of the metric.
        unit: "%" for accuracy and agreement, else "".
        higher_is_better: Whether a larger metric is better.
        labelled: Whether the data have labels.
        classes: The number of classes; 0 before the first evaluation and for other likelihoods.
        on_batch: Called after every batch with the number of batches done and in all (None: unknown).

    Raises:
        ToolError: There are no labels, no reference and no custom metric.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        likelihood: Likelihood,
        forward: Forward = default_forward,
        *,
        reference: nn.Module | None = None,
        custom: Metric | None = None,
        most_batches: int | None = None,
    ) -> None:
        self.loader, self.likelihood, self.forward, self.custom = loader, likelihood, forward, custom
        self.reference, self.most_batches = reference, most_batches
        self.classes = 0
        self.on_batch: Callable[[int, int | None], None] | None = None
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
        """Evaluate a model in evaluation mode; every module's mode is restored afterwards.

        Args:
            model: The model.

        Returns:
            Its metric and loss.

        Raises:
            ToolError: The data do not fit the likelihood or are empty, or the custom metric fails.
            NonFiniteOutputs: The outputs are NaN or infinite.
        """
        if isinstance(self.loader, Replayable):
            self.loader.restart()  # the same batches every time
        modes = {module: module.training for module in model.modules()}
        device = next(model.parameters()).device
        loss = right = units = 0.0
        try:
            model.eval()
            if self.custom is not None:
                return Evaluation(self._custom_value(model), None)
            for place, batch in enumerate(self._batches(self.most_batches), 1):
                batch = move_batch(batch, device)
                f = self._outputs(model, batch, place)
                y = targets_of(batch)
                try:
                    self.likelihood.check(f, y)
                except ValueError as error:
                    raise ToolError(f"{_place(place)}: {error}") from None
                if not self.likelihood.finite(f):
                    raise NonFiniteOutputs(
                        f"{_place(place)}: the model's outputs are not finite (NaN or Inf){why_not(batch)}"
                    )
                if (y is not None) != self.labelled:
                    found = "has no labels, unlike" if self.labelled else "has labels, unlike"
                    raise ToolError(f"{_place(place)} {found} the first batch")
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

    def _batches(self, most: int | None = None) -> Iterator[Any]:
        """Yield the batches to evaluate on; one with NaN or Inf in it is an error.

        Yields:
            Batches.

        Raises:
            ToolError: A batch is not finite.
        """
        total = _length(self.loader)
        if total is not None and most is not None:
            total = min(total, most)
        for place, batch in enumerate(islice(self.loader, most), 1):
            # a forward or a metric of the user's own may not use all that is in a batch
            if self.forward is default_forward and has_nan(inputs_of(batch)):
                raise ToolError(f"{_place(place)} holds NaN in its inputs")
            if self.custom is None and has_nan(targets_of(batch)):
                raise ToolError(f"{_place(place)} holds NaN in its targets")
            yield batch
            if self.on_batch is not None:
                self.on_batch(place, total)

    def _outputs(self, model: nn.Module, batch: Any, place: int) -> torch.Tensor:
        try:
            return self.forward(model, batch)
        except Exception as error:
            raise ToolError(
                f"{_place(place)}: the model cannot be called: {describe_error(error)}"
            ) from error

    def _custom_value(self, model: nn.Module) -> float:
        assert self.custom is not None
        try:
            with _checked_outputs(model):
                value = self.custom(model, _CheckedLoader(self))
        except ToolError:
            raise
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
        """Return the mean score of a batch."""
        if self.name == "loss":
            return 0.0
        if self.name == "mse":
            assert y is not None
            # targets of shape [batch] and [batch, 1] mean the same
            return float((f - y.view(f.shape)).double().square().mean())
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

    def formatted(self, value: float) -> str:
        """Return a value of the metric as text with its unit.

        Args:
            value: The value.

        Returns:
            For instance "98.20 %".
        """
        return f"{100 * value:.2f} %" if self.unit == "%" else f"{value:.4g}"

    def drop(self, before: float, after: float) -> float:
        """Return how much worse the metric has become.

        Args:
            before: The metric of the dense model.
            after: The metric of the sparse model.

        Returns:
            The difference for accuracy and agreement; otherwise the change relative to the dense value.
        """
        if self.unit == "%":
            return before - after
        worse = before - after if self.higher_is_better else after - before
        return worse / max(abs(before), 1e-12)


def _length(loader: Iterable[Any]) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


class _CheckedLoader:
    """The loader that a metric of the user's own receives; every batch is checked."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator

    def __iter__(self) -> Iterator[Any]:
        return self.evaluator._batches()

    def __len__(self) -> int:
        return len(self.evaluator.loader)  # type: ignore[arg-type]


@contextlib.contextmanager
def _checked_outputs(model: nn.Module) -> Iterator[None]:
    """Check inside the `with` block that no output of the model is NaN; its caller may be the user's code.

    Yields:
        Nothing.

    Raises:
        NonFiniteOutputs: An output is NaN.
    """

    def check(_: nn.Module, __: Any, outputs: Any) -> None:
        def check_one(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                raise NonFiniteOutputs("metric: the model's outputs hold NaN")
            return tensor

        map_tensors(outputs, check_one)

    handle = model.register_forward_hook(check)
    try:
        yield
    finally:
        handle.remove()


def _place(number: int) -> str:
    return f"batch {number} of the data to evaluate on"


def has_nan(values: Any) -> bool:
    """Tell whether a tensor of a batch holds NaN. Infinities may be meant, as −inf in a mask of attention.

    Args:
        values: A tensor, or any nested container of tensors.

    Returns:
        True if one of them does.
    """
    return _any_tensor(values, lambda tensor: bool(tensor.isnan().any()))


def why_not(batch: Any) -> str:
    """Return what a batch has to do with outputs that are not finite, for messages.

    Args:
        batch: The batch.

    Returns:
        A text such as "; the batch holds Inf", or the empty text.
    """
    return "; the batch holds Inf" if _any_tensor(batch, lambda tensor: bool(tensor.isinf().any())) else ""


def _any_tensor(values: Any, holds: Callable[[torch.Tensor], bool]) -> bool:
    found: list[bool] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor.is_floating_point() and holds(tensor))
        return tensor

    map_tensors(values, look)
    return any(found)
