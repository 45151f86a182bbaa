"""Learning Q: the auxiliary loss A(λ) = ½Tr(QF_γQ) − Tr(Q), its estimators, and the health gauge.

Three ways to move λ, by cost and noise (docs/math.md derives them):

- `probe`   the paper's: u, v = Qu, one Fisher-vector product, Adam on v·sg(P(F_γv − u))/‖u‖².
- `trace`   ½‖Q(h+√γz)‖² − Tr(Q) with E[hhᵀ] = F, Adam; one backward pass, no cross-layer noise.
- `natural` inverse-free natural steps on the factors; no learning rate to tune, any initial scale.

`auto` (the default) starts each layer in the way that suits its structure and goes on with the best of
these. Whatever the estimator, each step returns the paper's gauge: the loss without its ½, relative to
Tr(Q), which tends to 0.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.curvature.layers import removed_rows, zero_rows_
from fishleg.curvature.likelihoods import Likelihood, as_likelihood
from fishleg.curvature.outputs import AllIgnoredError
from fishleg.curvature.products import fisher_product, sampled_product
from fishleg.curvature.samples import mean_diagonal, sample_h
from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.inverse.operators import Kronecker
from fishleg.inverse.options import AuxiliaryOptions
from fishleg.inverse.warm_start import WarmStart
from fishleg.runtime.batches import Forward, batch_size, default_forward, move_batch, slice_batch
from fishleg.runtime.batchnorm import can_use_batch_statistics
from fishleg.runtime.loaders import cycle
from fishleg.runtime.process_group import broadcast_from_first, is_distributed, warn_if_not_shared

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AuxiliaryStats:
    """One auxiliary step: the loss, and gauges that tend to 0 as Q tends to (F+γI)⁻¹."""

    step: int
    loss: float  # ½Tr(QF_γQ) − Tr(Q), estimated (`probe`: divided by the number of parameters)
    gauge: float  # Tr(QF_γQ)/Tr(Q) − 1, the paper's convergence check, relative
    gauge_smoothed: float
    converged: bool  # the smoothed gauge is small and the smoothed loss has stopped falling


@dataclass
class _Smoothed:
    """Bias-corrected exponential averages of the gauge and of the loss, fast and slow."""

    decay: float
    count: int = 0
    gauge: float = 0.0
    fast: float = 0.0
    slow: float = 0.0

    def update(self, gauge: float, loss: float) -> tuple[float, float]:
        self.count += 1
        lazy = 1 - (1 - self.decay) / 4
        self.gauge = self.decay * self.gauge + (1 - self.decay) * gauge
        self.fast = self.decay * self.fast + (1 - self.decay) * loss
        self.slow = lazy * self.slow + (1 - lazy) * loss
        quick = 1 - self.decay**self.count
        fast, slow = self.fast / quick, self.slow / (1 - lazy**self.count)
        change = abs(fast - slow) / max(abs(slow), 1e-30)
        return self.gauge / quick, change


class Auxiliary:
    """Learns an InverseFisher for a model from inputs alone.

    >>> model = nn.Linear(3, 2)
    >>> auxiliary = Auxiliary(model, InverseFisher.from_model(model), "categorical", gamma=0.1)
    >>> stats = auxiliary.learn([torch.randn(16, 3) for _ in range(4)], steps=100)
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
        """gamma=None chooses γ = relative_damping × mean diag(F), measured on the first batch."""
        if gamma is not None and not (gamma > 0 and math.isfinite(gamma)):
            raise ValueError(f"gamma must be > 0 and finite, got {gamma}")
        if not (relative_damping > 0 and math.isfinite(relative_damping)):
            raise ValueError(f"relative_damping must be > 0 and finite, got {relative_damping}")
        self.model, self.inverse, self.forward = model, inverse, forward
        self.likelihood = as_likelihood(likelihood)
        self.options = options or AuxiliaryOptions()
        self.gamma, self.relative_damping = gamma, relative_damping
        self.generator = generator or torch.Generator().manual_seed(0)
        self.steps = 0
        self.tolerance = 0.02
        self._smoothed = _Smoothed(self.options.smoothing)
        for operator in map(inverse.unmasked, inverse.layers):
            learned = any(p.requires_grad for p in operator.parameters())
            if self.options.estimator == "natural" and learned and not operator.has_natural_step:
                raise ValueError(f"{type(operator).__name__} has no natural step; use estimator='trace'")
        self._warm: dict[str, WarmStart] = {
            name: WarmStart(inverse.unmasked(name), self.options) for name in inverse.layers
        }
        self._terms: dict[str, Tensor] = {}
        self._gone: dict[str, Tensor] = {}
        self._adam = self._make_adam()
        warn_if_not_shared(model)

    def ignore_removed_rows(self, masks: Mapping[str, Tensor]) -> None:
        """Rows that masks remove as a whole have no curvature from now on.

        Behind a BatchNorm they would have a huge one: of a channel that is always zero it makes the most.
        """
        self._gone = removed_rows(self.inverse.layers.values(), masks)

    @torch.enable_grad()
    def step(self, batch: Any, *, lr_factor: float = 1.0) -> AuxiliaryStats:
        """One update of λ from the inputs of one batch. Raises before anything is changed."""
        batch = self._sub_batch(batch)
        generator_state = self.generator.get_state()
        try:
            if self.options.estimator == "probe":
                quad, trace = self._probe_step(batch, lr_factor)
            else:
                quad, trace = self._sample_step(batch, lr_factor)
        except Exception as error:
            self.generator.set_state(generator_state)
            if isinstance(error, AllIgnoredError):
                self._share()  # the other processes expect it
            raise
        self._share()
        self.steps += 1
        gauge, loss = quad / max(trace, 1e-300) - 1, 0.5 * quad - trace
        smoothed, change = self._smoothed.update(gauge, loss)
        settled = self._smoothed.count >= 2 / (1 - self.options.smoothing)
        converged = settled and self.warm and abs(smoothed) < self.tolerance and change < self.tolerance
        return AuxiliaryStats(self.steps, loss, gauge, smoothed, converged)

    def _share(self) -> None:
        """One Q, and one γ, for all processes that train this model."""
        if not is_distributed(self.model):
            return
        device = next(self.model.parameters()).device
        gamma = torch.tensor(
            math.nan if self.gamma is None else self.gamma, dtype=torch.float64, device=device
        )
        broadcast_from_first(self.model, [gamma, *self.inverse.parameters(), *self.inverse.buffers()])
        if math.isfinite(float(gamma)):
            self.gamma = float(gamma)

    def try_step(self, batch: Any, lr_factor: float = 1.0) -> AuxiliaryStats | None:
        """`step`, or None where every label of the (sub-)batch is ignored: there is nothing to learn."""
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
        """Train Q until the gauge says that it is good enough, `steps` at most; cycles over the loader."""
        if steps < 1:
            raise ValueError(f"steps must be >= 1, got {steps}")
        self.tolerance = tolerance
        stats = None
        for i, batch in zip(range(steps), cycle(loader), strict=False):
            done = self.try_step(batch, lr_factor=0.5 * (1 + math.cos(math.pi * i / steps)))
            if done is None:
                continue
            stats = done
            if callback is not None:
                callback(stats)
            if stats.converged and i + 1 >= min_steps:
                break
        if stats is None:
            raise AllIgnoredError(f"none of {steps} batches has a label that counts: nothing to learn Q from")
        if not self.warm:
            logger.warning(
                "Q has not come to the end of its warm start (%d of %d steps) and knows little of F yet: "
                "learn on, or lower AuxiliaryOptions.warm_start",
                self.steps, self.options.warm_start,
            )  # fmt: skip
        return stats

    def reconfigure(self, **changes: Any) -> None:
        """Go on with other options, say small batches and a floor under η once the model moves."""
        self.options = replace(self.options, **changes)
        for warm in self._warm.values():
            warm.options = self.options

    @property
    def warm(self) -> bool:
        """Whether every layer is past its warm start."""
        return self.options.estimator != "auto" or all(w.done for w in self._warm.values())

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, λ excluded (that is the inverse's state)."""
        return {
            "gamma": self.gamma,
            "steps": self.steps,
            "warm_start": self.options.warm_start,
            "adam": self._adam.state_dict(),
            "generator": self.generator.get_state(),
            "smoothed": dict(vars(self._smoothed)),
            "terms": dict(self._terms),
            "warm": {name: warm.state_dict() for name, warm in self._warm.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.gamma, self.steps = state["gamma"], state["steps"]
        self.reconfigure(warm_start=state.get("warm_start", self.options.warm_start))
        self._adam.load_state_dict(state["adam"])
        self.generator.set_state(state["generator"])
        self._smoothed = _Smoothed(**state["smoothed"])
        self._terms = {
            name: term.to(self.inverse.reference(name).device) for name, term in state["terms"].items()
        }
        for name, warm in self._warm.items():
            warm.load_state_dict(state["warm"][name])

    def _make_adam(self) -> torch.optim.Adam:
        """Adam on the part of λ that it moves: not E² where that is averaged, and the bases slowly.

        The noise of a gradient turns a k×k basis by about √k times Adam's step, hence lr/√k.
        """
        factors: dict[nn.Parameter, float] = {}
        for warm in self._warm.values():
            if warm.follows and isinstance(warm.operator, Kronecker):
                for side in (warm.operator.L, warm.operator.R):
                    factors.update((p, max(p.shape[-1], 1) ** -0.5) for p in side.parameters() if p.dim() > 1)
                if warm.operator.log_e is not None:
                    factors[warm.operator.log_e] = 0.0
        groups: dict[float, list[nn.Parameter]] = {}
        for p in self.inverse.parameters():
            if p.requires_grad and factors.get(p, 1.0) > 0:
                groups.setdefault(factors.get(p, 1.0), []).append(p)
        return torch.optim.Adam(
            [{"params": group, "factor": factor} for factor, group in groups.items()]
            or [{"params": [nn.Parameter(torch.zeros(1))], "factor": 1.0}],
            lr=self.options.lr,
            betas=self.options.betas,
            fused=True,
        )

    def _sub_batch(self, batch: Any) -> Any:
        """The next `sub_batch` examples, where the model is; repeated steps on one batch see all of it."""
        batch = move_batch(batch, next(self.model.parameters()).device)
        size, limit = batch_size(batch), self.options.sub_batch
        if limit is None or limit >= size:
            return batch
        start = self.steps % (size // limit) * limit
        return slice_batch(batch, start, start + limit)

    def _samples(self, batch: Any) -> dict[str, Tensor]:
        size = batch_size(batch)
        by_batch = self.options.batch_statistics and can_use_batch_statistics(self.model, batch)
        groups = max(1, min(self.options.groups, size // 2 if by_batch else size))
        if self.options.vectorize and size % groups:  # as a short last batch may be
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
        zero_rows_(samples, self._gone)
        return samples

    def _damping(self, samples: Mapping[str, Tensor]) -> float:
        if self.gamma is not None:
            return self.gamma
        mean = mean_diagonal(samples)
        if not mean > 0:
            raise ValueError("cannot choose gamma: the Fisher matrix is zero on the first batch; pass gamma")
        return self.relative_damping * mean

    def _sample_step(self, batch: Any, lr_factor: float) -> tuple[float, float]:
        """One step of every layer from vectors h; returns (Tr(QF_γQ), Tr(Q)) estimated before it."""
        samples = self._samples(batch)
        gamma = self._damping(samples)
        packed = self.inverse.pack(samples)
        if not packed:
            raise ValueError("no layer of Q is trainable: all were frozen after Q was built")
        losses = []
        natural: list[str] = []
        terms: dict[str, Tensor] = {}  # by layer: Tr(QF_γQ), Tr(Q)
        for i, (name, H) in enumerate(packed.items()):
            operator = self.inverse.operator(name)
            by_adam = self._uses_adam(name)
            if by_adam and self._warm[name].follows and not self._takes_turn(i, name):
                natural.append(name)
                continue
            z = self._noise(H)
            if not by_adam and not self._takes_turn(i, name):  # the loss would be for the gauge alone
                natural.append(name)
                continue
            with torch.set_grad_enabled(by_adam):
                quad, trace = operator.loss_terms(H + gamma**0.5 * z)
                quad = quad / len(H)
            if by_adam:
                losses.append(0.5 * quad - trace)
            if not by_adam or self._warm[name].follows:
                natural.append(name)
            terms[name] = torch.stack([quad.detach(), trace.detach()]).double()
        if losses:
            self._adam_step(torch.stack(losses).sum(), lr_factor)
        self.gamma = gamma
        for name in natural:
            self._warm[name].step(packed[name], gamma, self.inverse.mask(name))
        self._terms.update(terms)
        quad, trace = torch.stack([self._terms[name] for name in packed]).sum(0).tolist()
        return quad, trace

    def _takes_turn(self, i: int, name: str) -> bool:
        """Whether layer i is refined, or its loss looked at; else its last share of the gauge stands."""
        return (self.steps + i) % self.options.refine_every == 0 or name not in self._terms

    def _uses_adam(self, name: str) -> bool:
        if self.options.estimator == "trace":
            return True
        if self.options.estimator == "natural":
            return not self._warm[name].operator.has_natural_step
        return self._warm[name].done and not self._warm[name].natural_forever

    def _probe_step(self, batch: Any, lr_factor: float) -> tuple[float, float]:
        """The paper's step: residual r = P(F_γv − u) at v = Qu, loss v·sg(r)/‖u‖²."""
        needs_samples = self.gamma is None or not self.options.exact_products
        samples = self._samples(batch) if needs_samples else {}
        gamma = self._damping(samples)
        u = self._draw_probe(batch)
        masks = {name: mask for name in self.inverse.layers if (mask := self.inverse.mask(name)) is not None}
        u_packed = {n: v * masks[n] if n in masks else v for n, v in self.inverse.pack(u).items()}
        norm = sum(float(v.double().square().sum()) for v in u_packed.values())
        if not (norm > 0 and math.isfinite(norm)):
            raise ValueError(f"the probe u must be finite and not zero, got ‖u‖² = {norm}")
        v_packed = {name: self.inverse.operator(name).matvec(value) for name, value in u_packed.items()}
        v = self.inverse.unpack({name: value.detach() for name, value in v_packed.items()})
        if self.options.exact_products:
            product = fisher_product(self.model, batch, self.likelihood, v, forward=self.forward)
            zero_rows_({name: value.unsqueeze(0) for name, value in product.items()}, self._gone)
        else:
            product = sampled_product(samples, v)
        F_v = self.inverse.pack(product)
        loss = torch.zeros((), dtype=torch.float64)
        quad = linear = 0.0
        for name, value in v_packed.items():
            damped = F_v[name] + gamma * value.detach()
            residual = damped - u_packed[name]
            if self.options.precondition:
                with torch.no_grad():
                    residual = self.inverse.operator(name).matvec(residual)
            loss = loss + (value * residual).sum().double().cpu() / norm
            quad += float((value.detach() * damped).sum()) / norm
            linear += float((value.detach() * u_packed[name]).sum()) / norm
        self._adam_step(loss, lr_factor)
        self.gamma = gamma
        return quad, linear

    def _draw_probe(self, batch: Any) -> dict[str, Tensor]:
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if callable(self.options.probe):
            return self.options.probe(self.generator)
        if self.options.probe == "gradient":
            return {name: h[0] for name, h in self._samples(batch).items()}
        return {name: self._noise(p) for name, p in parameters.items()}

    def _noise(self, like: Tensor) -> Tensor:
        """Standard normal numbers, drawn where the generator is."""
        drawn = torch.randn(
            like.shape, generator=self.generator, dtype=like.dtype, device=self.generator.device
        )
        return drawn.to(like.device)

    def _adam_step(self, loss: Tensor, lr_factor: float) -> None:
        if not loss.requires_grad:  # every Q is fixed: there is nothing to learn
            return
        parameters = [p for group in self._adam.param_groups for p in group["params"]]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        norms = torch._foreach_norm([g for g in gradients if g is not None])
        if not bool(torch.stack([norm.double() for norm in norms]).isfinite().all()):
            raise ValueError("non-finite gradient of the auxiliary loss; Q was left as it was")
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None and gradient.stride() != parameter.stride():
                # the fused kernel reads memory, not strides: this gradient would be taken transposed
                gradient = torch.empty_like(parameter).copy_(gradient)
            parameter.grad = gradient
        for group in self._adam.param_groups:
            group["lr"] = self.options.lr * lr_factor * group["factor"]
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
