"""What every estimator of Q gets: the model, its data, and samples of the gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.curvature.layers import Layer, removed_rows, zero_rows_
from fishleg.curvature.likelihoods import Likelihood
from fishleg.curvature.outputs import AllIgnoredError
from fishleg.curvature.samples import empirical_h, mean_diagonal, sample_h
from fishleg.curvature.zero_fisher import SMALLEST_DIAGONAL, check_fisher_not_zero
from fishleg.options import PruningOptions
from fishleg.runtime.batch_errors import naming_the_batch
from fishleg.runtime.batches import Forward, move_batch
from fishleg.runtime.batchnorm import can_use_batch_statistics
from fishleg.runtime.loaders import SubBatchStream, one_pass, sub_batches
from fishleg.runtime.process_group import agreed_batches
from fishleg.runtime.tensors import at_least_float32

LOADER = "the calibration loader"  # what messages call it


class Pieces(Iterator[Any]):
    """A number of sub-batches on the device of a model.

    Args:
        model: The model, on its device.
        stream: The sub-batches.
        count: How many.
    """

    def __init__(self, model: nn.Module, stream: SubBatchStream, count: int) -> None:
        self._stream, self._device = stream, next(model.parameters()).device
        self._left = islice(agreed_batches(model, stream, stream.name), count)

    def __next__(self) -> Any:
        return move_batch(next(self._left), self._device)

    @property
    def place(self) -> str:
        """The place of the last one in the loader, for error messages."""
        return self._stream.place


@dataclass(frozen=True)
class EstimationProblem:
    """The model, its data and the options of an estimate of Q.

    Args:
        model: The model at which F is taken.
        loader: Batches; inputs suffice unless the Fisher is empirical.
        likelihood: The distribution of the outputs.
        options: How many samples, which blocks, true or empirical Fisher.
        forward: How the model is called on a batch.
        generator: The source of random numbers.
        layers: The layers whose Q is wanted.
        all_layers: All layers of the model; γ is measured over all of them.
        masks: What is removed already, by parameter; True = kept.
        gamma: The damping γ, once it is known.
    """

    model: nn.Module
    loader: Any
    likelihood: Likelihood
    options: PruningOptions
    forward: Forward
    generator: torch.Generator
    layers: list[Layer]
    all_layers: list[Layer]
    masks: Mapping[str, Tensor]
    gamma: float = 0.0

    @cached_property
    def removed_rows(self) -> dict[str, Tensor]:
        """By parameter, the rows that are removed as a whole. They have no curvature."""
        return removed_rows(self.all_layers, self.masks)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    def pieces(self, count: int | None = None) -> Pieces:
        """Return batches of `sub_batch` examples on the model's device.

        Args:
            count: How many; default: `samples`.

        Returns:
            An iterator; the loader is repeated as often as needed.
        """
        stream = sub_batches(self.loader, self.options.sub_batch, LOADER)
        return Pieces(self.model, stream, self.options.samples if count is None else count)

    def one_pass(self) -> list[Any]:
        """Return the batches of one pass over the loader, `samples` at the most.

        Returns:
            Batches of `sub_batch` examples on the model's device.
        """
        found = one_pass(self.loader, self.options.sub_batch, self.options.samples, LOADER)
        return [move_batch(piece, self.device) for piece in found]

    def draw(self) -> Iterator[dict[str, Tensor]]:
        """Draw `samples` vectors h with E[hhᵀ] = F, one at a time.

        Returns:
            An iterator of dictionaries: by layer name, the packed vector in float32 or float64.
        """
        return self._draw(self.options.samples, self.layers)

    def _draw(self, count: int, layers: list[Layer]) -> Iterator[dict[str, Tensor]]:
        drawn = 0
        pieces = self.pieces(count)
        for piece in pieces:
            with naming_the_batch(pieces.place):
                try:
                    h = self._sample(piece)
                except AllIgnoredError:
                    continue
            drawn += 1
            zero_rows_(h, self.removed_rows)
            yield {layer.name: at_least_float32(layer.pack(h)[0]) for layer in layers}
        if not drawn:
            raise AllIgnoredError(f"none of {count} batches has a label that counts: Q cannot be estimated")

    def _sample(self, batch: Any) -> dict[str, Tensor]:
        by_batch = self.uses_batch_statistics and can_use_batch_statistics(self.model, batch)
        if self.options.empirical:
            return empirical_h(self.model, batch, self.likelihood, self.forward, by_batch)
        return sample_h(
            self.model, batch, self.likelihood, generator=self.generator, forward=self.forward,
            batch_statistics=by_batch,
        )  # fmt: skip

    @property
    def uses_batch_statistics(self) -> bool:
        """Whether BatchNorms in training mode normalise by the batch."""
        return bool(self.options.batch_statistics)

    def choose_gamma(self, relative_damping: float) -> float:
        """Return γ = relative_damping × mean diagonal of F, measured on up to 32 samples.

        Args:
            relative_damping: γ in units of the mean diagonal.

        Returns:
            The damping.

        Raises:
            ValueError: F is zero on these samples.
        """
        first = self._draw(min(self.options.samples, 32), self.all_layers)
        diagonals = [mean_diagonal({name: h.unsqueeze(0) for name, h in one.items()}) for one in first]
        mean = sum(diagonals) / len(diagonals)
        if not mean > SMALLEST_DIAGONAL:
            # not `pieces`, in which all processes take part: F may be zero in this one alone
            batch = move_batch(next(sub_batches(self.loader, self.options.sub_batch, LOADER)), self.device)
            check_fisher_not_zero(mean, self.model, batch, self.likelihood, self.forward)
        return relative_damping * sum(diagonals) / len(diagonals)  # in this order, for the last bits
