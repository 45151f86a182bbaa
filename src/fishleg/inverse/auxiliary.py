"""Learning Q by the auxiliary loss A(λ) = ½Tr(QF_γQ) − Tr(Q), whose minimum is Q = (F+γI)⁻¹.

Three estimators can move λ:

- `probe`: the estimator of the paper. It draws u, sets v = Qu, computes one Fisher-vector product, and takes
  a step of Adam on v·sg(P(F_γv − u))/‖u‖². sg stops the gradient.
- `trace`: Adam on ½‖Q(h+√γz)‖² − Tr(Q) with E[hhᵀ] = F. It costs one backward pass and has no noise between
  layers.
- `natural`: inverse-free natural steps on the factors. They need no learning rate and no initial scale.

`auto`, the default, gives each layer the warm start that suits its structure and continues with the best of
these. Every estimator returns the convergence gauge of the paper: the loss without its ½, relative to Tr(Q).
It tends to 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fishleg.curvature.layers import removed_rows, zero_rows_
from fishleg.curvature.likelihoods import Likelihood, as_likelihood
from fishleg.curvature.outputs import AllIgnoredError
from fishleg.curvature.products import fisher_product, sampled_product
from fishleg.curvature.samples import mean_diagonal, sample_h
from fishleg.curvature.zero_fisher import check_fisher_not_zero
from fishleg.inverse.adam import adam_step, make_adam
from fishleg.inverse.gauge import AuxiliaryStats, SmoothedGauge
from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.inverse.probe_loss import probe_loss
from fishleg.inverse.sampled_loss import SampledEstimator
from fishleg.options import AuxiliaryOptions
from fishleg.runtime.batch_errors import naming_the_batch
from fishleg.runtime.batches import Forward, batch_size, default_forward, move_batch, slice_batch
from fishleg.runtime.batchnorm import can_use_batch_statistics
from fishleg.runtime.loaders import BatchStream, cycle
from fishleg.runtime.process_group import (
    agreed_batches,
    broadcast_from_first,
    get_logger,
    is_distributed,
    warn_if_not_shared,
)

__all__ = ["Auxiliary", "AuxiliaryStats"]

logger = get_logger(__name__)


class Auxiliary:
    """Learns the inverse Fisher matrix of a model from inputs alone, without labels.

    >>> model = nn.Linear(3, 2)
    >>> auxiliary = Auxiliary(model, InverseFisher.from_model(model), "categorical", gamma=0.1)
    >>> stats = auxiliary.learn([torch.randn(16, 3) for _ in range(4)], steps=100)

    Args:
        model: The model.
        inverse: The Q to learn.
        likelihood: The likelihood of the model's outputs, or its name.
        gamma: The damping γ. None: γ = relative_damping × mean diag(F), measured on the first batch.
        relative_damping: See `gamma`.
        options: The options of the learning.
        forward: Computes the outputs of the model for a batch.
        generator: The source of all random numbers. None: a new one with seed 0.

    Attributes:
        gamma: The damping γ; None before the first step has chosen it.
        steps: The number of steps taken.
        tolerance: The largest smoothed gauge, and the largest relative change of the smoothed loss, at which
            Q counts as converged.

    Raises:
        ValueError: An argument is out of its range, or the estimator does not suit the structure of Q.
    """

    def __init__(
        self,
        model: nn.Module,
        inverse: InverseFisher,
        likelihood: Likelihood | str = "categorical",
        *,
        gamma: float | None = None,
        relative_damping: float = 1.0,
        options: AuxiliaryOptions | None = None,
        forward: Forward = default_forward,
        generator: torch.Generator | None = None,
    ) -> None:
        if gamma is not None and not (gamma > 0 and math.isfinite(gamma)):
            raise ValueError(f"gamma must be > 0 and finite, got {gamma}")
        if not (relative_damping > 0 and math.isfinite(relative_damping)):
            raise ValueError(f"relative_damping must be > 0 and finite, got {relative_damping}")
        self.model, self.inverse, self.forward = model, inverse, forward
        self.likelihood = as_likelihood(likelihood)
        self.options = (options or AuxiliaryOptions()).resolved()
        self.gamma, self.relative_damping = gamma, relative_damping
        self.generator = generator or torch.Generator().manual_seed(0)
        self.steps = 0
        self.tolerance = 0.02
        self._smoothed = SmoothedGauge(self.options.smoothing)
        for operator in map(inverse.unmasked, inverse.layers):
            learned = any(p.requires_grad for p in operator.parameters())
            if self.options.estimator == "natural" and learned and not operator.has_natural_step:
                raise ValueError(f"{type(operator).__name__} has no natural step; use estimator='trace'")
        self._sampled = SampledEstimator(inverse, self.options)
        self._removed_rows: dict[str, Tensor] = {}
        self._adam = make_adam(inverse, self._sampled.warm_starts.values(), self.options)
        warn_if_not_shared(model)

    def ignore_removed_rows(self, masks: Mapping[str, Tensor]) -> None:
        """Count the curvature of rows that masks remove completely as zero from now on.

        Without this, a BatchNorm after such a row would give it a very large curvature, because it divides
        by the standard deviation of a channel that is always zero.

        Args:
            masks: Masks by parameter name, boolean, True = kept, [*parameter.shape].
        """
        self._removed_rows = removed_rows(self.inverse.layers.values(), masks)

    @torch.enable_grad()
    def step(self, batch: Any, *, lr_factor: float = 1.0) -> AuxiliaryStats:
        """Update λ once from the inputs of one batch.

        A step that fails leaves λ, γ and the generator unchanged.

        Args:
            batch: A batch as `forward` takes it. With the option `sub_batch` only a part of it is used.
            lr_factor: A factor of the learning rate of Adam.

        Returns:
            The loss and the gauge before the update.

        Raises:
            AllIgnoredError: Every label of the batch is ignored.
            ValueError: The loss, or the curvature on the batch, admits no step.
        """
        batch = self._sub_batch(batch)
        generator_state = self.generator.get_state()
        try:
            if self.options.estimator == "probe":
                quadratic, trace = self._probe_step(batch, lr_factor)
            else:
                quadratic, trace = self._sampled_step(batch, lr_factor)
        except Exception as error:
            self.generator.set_state(generator_state)
            if isinstance(error, AllIgnoredError):
                self._broadcast()  # the other processes wait for it
            raise
        self._broadcast()
        self.steps += 1
        gauge, loss = quadratic / max(trace, 1e-300) - 1, 0.5 * quadratic - trace
        smoothed, change = self._smoothed.update(gauge, loss)
        settled = self._smoothed.count >= 2 / (1 - self.options.smoothing)
        converged = settled and self.warm and abs(smoothed) < self.tolerance and change < self.tolerance
        return AuxiliaryStats(self.steps, loss, gauge, smoothed, converged)

    def try_step(self, batch: Any, lr_factor: float = 1.0) -> AuxiliaryStats | None:
        """Update λ once, unless every label of the batch is ignored.

        Args:
            batch: A batch as `forward` takes it.
            lr_factor: A factor of the learning rate of Adam.

        Returns:
            The loss and the gauge before the update; None if every label is ignored.
        """
        try:
            return self.step(batch, lr_factor=lr_factor)
        except AllIgnoredError as error:
            logger.info("no auxiliary step: %s", error)
            return None

    def learn(
        self,
        loader: Iterable[Any],
        steps: int = 300,
        *,
        tolerance: float = 0.02,
        min_steps: int = 0,
        callback: Callable[[AuxiliaryStats], None] | None = None,
    ) -> AuxiliaryStats:
        """Learn Q until the gauge has converged, or for a number of steps.

        The learning rate of Adam falls to zero over the steps as a cosine.

        Args:
            loader: The batches. They are repeated when they run out.
            steps: The largest number of steps.
            tolerance: See the attribute `tolerance`.
            min_steps: The smallest number of steps.
            callback: Called with the result of every step.

        Returns:
            The result of the last step.

        Raises:
            ValueError: `steps` is less than 1.
            AllIgnoredError: Every label of every batch is ignored.
        """
        if steps < 1:
            raise ValueError(f"steps must be >= 1, got {steps}")
        self.tolerance = tolerance
        stats = None
        stream = loader if isinstance(loader, BatchStream) else cycle(loader)
        for i, batch in zip(range(steps), agreed_batches(self.model, stream, stream.name), strict=False):
            with naming_the_batch(stream.place):
                result = self.try_step(batch, lr_factor=0.5 * (1 + math.cos(math.pi * i / steps)))
            if result is None:
                continue
            stats = result
            if callback is not None:
                callback(stats)
            if stats.converged and i + 1 >= min_steps:
                break
        if stats is None:
            raise AllIgnoredError(f"none of {steps} batches has a label that counts: Q cannot be learned")
        if not self.warm:
            logger.warning(
                "Q has not finished its warm start (%d of %d steps) and is still far from the inverse of F: "
                "take more steps, or lower AuxiliaryOptions.warm_start",
                self.steps, self.options.warm_start,
            )  # fmt: skip
        return stats

    def reconfigure(
        self,
        *,
        sub_batch: int | Literal["unchanged"] | None = "unchanged",
        groups: int | None = None,
        warm_start: int | None = None,
        refine_every: int | None = None,
        eta_floor: float | None = None,
        batch_statistics: bool | None = None,
    ) -> None:
        """Continue with other options, for instance with smaller batches once the model itself is trained.

        An argument that is left out keeps its option. The arguments are those of `AuxiliaryOptions`.

        Args:
            sub_batch: Examples of each batch to use; None = all.
            groups: Independent samples h per batch.
            warm_start: Steps of the warm start.
            refine_every: Layers take turns: L, R and D of a layer move in every so many steps.
            eta_floor: The smallest natural step, > 0 to follow a Fisher matrix that changes.
            batch_statistics: Whether BatchNorms normalise by the batch.
        """
        given: dict[str, Any] = {
            "groups": groups,
            "warm_start": warm_start,
            "refine_every": refine_every,
            "eta_floor": eta_floor,
            "batch_statistics": batch_statistics,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        if sub_batch != "unchanged":
            changes["sub_batch"] = sub_batch
        self.options = replace(self.options, **changes)
        self._sampled.set_options(self.options)

    @property
    def warm(self) -> bool:
        """Whether every layer has finished its warm start."""
        return self.options.estimator != "auto" or self._sampled.warm

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on, apart from λ, which is the state of `inverse`.

        Returns:
            The state.
        """
        return {
            "gamma": self.gamma,
            "steps": self.steps,
            "warm_start": self.options.warm_start,
            "adam": self._adam.state_dict(),
            "generator": self.generator.get_state(),
            "smoothed": dict(vars(self._smoothed)),
            **self._sampled.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: The state.
        """
        self.gamma, self.steps = state["gamma"], state["steps"]
        self.reconfigure(warm_start=state.get("warm_start", self.options.warm_start))
        self._adam.load_state_dict(state["adam"])
        self.generator.set_state(state["generator"])
        self._smoothed = SmoothedGauge(**state["smoothed"])
        self._sampled.load_state_dict(state)

    def _broadcast(self) -> None:
        """Give all processes that train this model the Q and the γ of the first one."""
        if not is_distributed(self.model):
            return
        device = next(self.model.parameters()).device
        gamma = torch.tensor(
            math.nan if self.gamma is None else self.gamma, dtype=torch.float64, device=device
        )
        broadcast_from_first(self.model, [gamma, *self.inverse.parameters(), *self.inverse.buffers()])
        if math.isfinite(float(gamma)):
            self.gamma = float(gamma)

    def _sub_batch(self, batch: Any) -> Any:
        """Return the next `sub_batch` examples on the model's device. Repeated steps go through the batch."""
        batch = move_batch(batch, next(self.model.parameters()).device)
        size, limit = batch_size(batch), self.options.sub_batch
        if limit is None or limit >= size:
            return batch
        start = self.steps % (size // limit) * limit
        return slice_batch(batch, start, start + limit)

    def _sample(self, batch: Any) -> dict[str, Tensor]:
        """Return samples h by parameter name, [groups, *parameter.shape]."""
        size = batch_size(batch)
        by_batch = self.options.batch_statistics and can_use_batch_statistics(self.model, batch)
        groups = max(1, min(self.options.groups or 1, size // 2 if by_batch else size))
        if self.options.vectorize and size % groups:  # vmap needs groups of one size
            batch = slice_batch(batch, 0, size - size % groups)
        samples = sample_h(
            self.model,
            batch,
            self.likelihood,
            groups=groups,
            generator=self.generator,
            forward=self.forward,
            vectorize=self.options.vectorize,
            batch_statistics=by_batch,
        )
        zero_rows_(samples, self._removed_rows)
        return samples

    def _damping(self, samples: Mapping[str, Tensor], batch: Any) -> float:
        if self.gamma is not None:
            return self.gamma
        mean = mean_diagonal(samples)
        check_fisher_not_zero(mean, self.model, batch, self.likelihood, self.forward)
        return self.relative_damping * mean

    def _sampled_step(self, batch: Any, lr_factor: float) -> tuple[float, float]:
        samples = self._sample(batch)
        gamma = self._damping(samples, batch)
        packed = self.inverse.pack(samples)
        self.inverse.record_sampled_rows(packed)
        if not packed:
            raise ValueError("no layer of Q is trainable: all were frozen after Q was built")
        losses = self._sampled.losses(packed, gamma, self.steps, self._draw_noise)
        if losses.loss is not None:
            adam_step(self._adam, losses.loss, self.options.lr * lr_factor)
        self.gamma = gamma
        self._sampled.take_natural_steps(losses, packed, gamma)
        return self._sampled.total_terms(packed)

    def _probe_step(self, batch: Any, lr_factor: float) -> tuple[float, float]:
        needs_samples = self.gamma is None or not self.options.exact_products
        samples = self._sample(batch) if needs_samples else {}
        gamma = self._damping(samples, batch)
        u = self._draw_probe(batch)

        def product(v: dict[str, Tensor]) -> dict[str, Tensor]:
            if not self.options.exact_products:
                return sampled_product(samples, v)
            result = fisher_product(self.model, batch, self.likelihood, v, forward=self.forward)
            zero_rows_({name: value.unsqueeze(0) for name, value in result.items()}, self._removed_rows)
            return result

        loss, quadratic, linear = probe_loss(
            self.inverse, u, product, gamma, precondition=self.options.precondition
        )
        adam_step(self._adam, loss, self.options.lr * lr_factor)
        self.gamma = gamma
        return quadratic, linear

    def _draw_probe(self, batch: Any) -> dict[str, Tensor]:
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if callable(self.options.probe):
            u: dict[str, Tensor] = self.options.probe(self.generator)
            return u
        if self.options.probe == "gradient":
            return {name: h[0] for name, h in self._sample(batch).items()}
        return {name: self._draw_noise(p) for name, p in parameters.items()}

    def _draw_noise(self, like: Tensor) -> Tensor:
        """Return standard normal numbers in the shape of a tensor, drawn on the generator's device."""
        noise = torch.randn(
            like.shape, generator=self.generator, dtype=like.dtype, device=self.generator.device
        )
        return noise.to(like.device)
