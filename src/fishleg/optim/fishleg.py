"""FishLeg: train with Q, w ← w − η Q g, while Q itself keeps learning.

Paper: Algorithm 1, the fine-tuning line and the auxiliary step after it. The optimizer remembers the
inputs of the model's last training call, so an ordinary loop needs no change beyond its constructor.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fishleg.curvature.likelihoods import Likelihood
from fishleg.inverse.auxiliary import Auxiliary, AuxiliaryStats
from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.inverse.options import AuxiliaryOptions
from fishleg.optim.recorder import CallRecorder, replay_call
from fishleg.runtime.batches import Forward

# A gradient this large might overflow in Q g; then the auxiliary step before it can be undone.
_HUGE = 1e8
# What suits a moving model: few examples a step, a quick warm start, BatchNorm as the training step sees it.
ONLINE = AuxiliaryOptions(sub_batch=12, warm_start=20, refine_every=4, eta_floor=0.05, batch_statistics=True)


class FishLeg(Optimizer):
    """Natural gradient with a learned inverse Fisher, as a torch optimizer.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> optimizer = FishLeg(model, "categorical", lr=0.05)
    >>> x, y = torch.randn(32, 4), torch.randint(3, (32,))
    >>> loss = nn.functional.cross_entropy(model(x), y)
    >>> loss.backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | str = "categorical",
        *,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        params: Iterable[Any] | None = None,
        inverse: InverseFisher | None = None,
        gamma: float | None = None,
        relative_damping: float = 3.0,
        update_every: int = 10,
        warmup: int = 40,
        initial_lr: float = 0.1,
        max_kl: float | None = 0.01,
        step_damping: float = 1.0,
        clip_gradients: Callable[[list[nn.Parameter]], object] | None = None,
        auxiliary: AuxiliaryOptions | Auxiliary | None = None,
        forward: Forward | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Options beyond the usual ones.

        params: parameter groups as in any torch optimizer (default: all trainable parameters, one group).
        update_every: auxiliary steps, one every k weight steps; −k means k of them at every step.
        warmup: for the first steps Q learns at every step, whatever update_every is.
        initial_lr: the learning rate of SGD that the first steps amount to, while Q is still αI with
            α = initial_lr/lr (the paper's initialisation for training); ignored where `inverse` is given.
        max_kl: trust region; a step is shortened where its predicted KL would exceed this (see `_trust`).
            It, rather than lr, sets the pace, so that lr hardly needs tuning.
        step_damping: the damping of the steps, in multiples of γ, for a Q that was learned with less damping
            than steps can bear (one that prunes too); cheap for structures with E² and diagonal ones.
        clip_gradients: called with the parameters before each step, for instance
            lambda p: torch.nn.utils.clip_grad_norm_(p, 1.0).
        inverse: a Q to continue with, for instance one that has just scored and pruned.
        auxiliary: options of Q's learning, or the learning itself to go on with (its Q, γ and forward; then
            pass the inputs to step(batch=...)).
        """
        _require("lr", lr, 0 <= lr < math.inf, ">= 0 and finite")
        _require("momentum", momentum, 0 <= momentum < 1, "in [0, 1)")
        _require("weight_decay", weight_decay, weight_decay >= 0, ">= 0")
        _require(
            "update_every", update_every, update_every != 0, "not 0 (k > 0: every k steps; k < 0: |k| a step)"
        )
        _require("initial_lr", initial_lr, 0 < initial_lr < math.inf, "> 0 and finite")
        _require("warmup", warmup, warmup >= 0, ">= 0")
        _require("step_damping", step_damping, 1 <= step_damping < math.inf, ">= 1 and finite")
        _require("max_kl", max_kl, max_kl is None or max_kl > 0, "> 0 or None")
        self._names = {id(p): name for name, p in model.named_parameters()}
        trainable = [p for p in model.parameters() if p.requires_grad]
        if not trainable:
            raise ValueError("the model has no trainable parameters (requires_grad is False for all of them)")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(trainable if params is None else params, defaults)
        if isinstance(auxiliary, Auxiliary):
            if inverse is not None or gamma is not None or forward is not None:
                raise ValueError("an Auxiliary brings its own inverse, gamma and forward; pass none of them")
            inverse, forward = auxiliary.inverse, auxiliary.forward
        elif inverse is None:
            inverse = InverseFisher.from_model(model, "ekfac", scale=initial_lr / lr if lr else 1.0)
        self.inverse = inverse
        self._covered = {part for layer in self.inverse.layers.values() for part in layer.names}
        if isinstance(auxiliary, Auxiliary):
            self.auxiliary = auxiliary
        else:
            self.auxiliary = Auxiliary(
                model,
                self.inverse,
                likelihood,
                gamma=gamma,
                relative_damping=relative_damping,
                options=auxiliary or ONLINE,
                forward=forward or replay_call,
                generator=generator,
            )
        self.update_every, self.warmup, self.max_kl = update_every, warmup, max_kl
        self.step_damping = step_damping
        self.clip_gradients = clip_gradients
        self.steps = 0
        self.last_auxiliary: AuxiliaryStats | None = None
        self.last_trust = 1.0
        self.masks: dict[str, Tensor] = {}
        self._recorder = CallRecorder()
        if forward is None:
            hook = model.register_forward_pre_hook(self._recorder, with_kwargs=True)
            weakref.finalize(self, hook.remove).atexit = False  # a model may see many optimizers come and go

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters, as in any torch optimizer."""
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if id(p) not in self._names:
                self.param_groups.pop()
                raise ValueError(f"a parameter of shape {tuple(p.shape)} does not belong to the model")

    def set_masks(self, masks: Mapping[str, Tensor], *, restrict: bool = True) -> None:
        """Keep weights exactly zero where a mask (boolean, by parameter name, True = kept) is False.

        `restrict` makes Q learn (F_MM+γI)⁻¹, what is right for the kept weights alone.
        """
        if restrict:
            self.inverse.restrict(masks)
        self.masks = {name: mask.clone() for name, mask in masks.items()}
        self.auxiliary.ignore_removed_rows(self.masks)
        for _, p, name in self._parameters():
            if name in self.masks:
                with torch.no_grad():
                    p.mul_(self.masks[name])
                    if "momentum" in self.state[p]:
                        self.state[p]["momentum"].mul_(self.masks[name])

    def step(self, closure: Callable[[], Any] | None = None, *, batch: Any = None) -> Any:
        """The auxiliary steps that are due, then one weight step.

        `batch` gives the auxiliary step its inputs; without it the model's last training call is replayed,
        cut to `sub_batch` examples: every tensor as long as the batch is taken to hold one row per example
        (where that is wrong, say for a square attention mask, pass AuxiliaryOptions(sub_batch=None)).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if isinstance(loss, (Tensor, float)) and not bool(torch.as_tensor(loss).isfinite().all()):
                raise ValueError(f"the loss is not finite ({loss}); nothing was changed")
        for _, p, name in self._parameters():
            if name in self.masks and p.grad is not None:
                p.grad.mul_(self.masks[name])
        if self.clip_gradients is not None:
            self.clip_gradients([p for _, p, _ in self._parameters() if p.grad is not None])
        gradients, largest = self._gradients()
        due = self._auxiliary_steps_due()
        if due > 0:
            inputs = self._recorder.call if batch is None else batch
            if inputs is None:
                raise ValueError(
                    "no inputs to learn Q from: call the model in training mode before step(), "
                    "or pass step(batch=...); a compiled model must not be called before FishLeg is made"
                )
        with self._undone_on_error(due > 1 or (due > 0 and largest > _HUGE)):
            if due > 0:
                self.last_auxiliary = self._learn(inputs, due)
            self._update_weights(gradients)
        self._recorder.call = None
        self.steps += 1
        return loss

    def _learn(self, inputs: Any, due: int) -> AuxiliaryStats | None:
        """`due` auxiliary steps; one whose examples are all ignored is left out."""
        stats = [self.auxiliary.try_step(inputs) for _ in range(due)]
        return stats[-1] or self.last_auxiliary

    @contextmanager
    def _undone_on_error(self, careful: bool) -> Iterator[None]:
        """With `careful`, a failure inside leaves Q and its learning as they were."""
        saved = copy.deepcopy([self.inverse.state_dict(), self.auxiliary.state_dict()]) if careful else None
        try:
            yield
        except Exception:
            if saved is not None:
                self.inverse.load_state_dict(saved[0])
                self.auxiliary.load_state_dict(saved[1])
            raise

    def _auxiliary_steps_due(self) -> int:
        if self.update_every < 0:
            return -self.update_every
        return int(self.steps < self.warmup or self.steps % self.update_every == 0)

    def _parameters(self) -> Iterable[tuple[dict[str, Any], nn.Parameter, str]]:
        for group in self.param_groups:
            for p in group["params"]:
                yield group, p, self._names[id(p)]

    def _gradients(self) -> tuple[dict[str, Tensor], float]:
        """Gradients by name (already masked) and the largest entry; parameters without one are left alone."""
        gradients = {}
        for _, p, name in self._parameters():
            if p.grad is None or not p.requires_grad:
                continue
            if name not in self._covered:
                raise ValueError(f"Q does not cover parameter {name!r}: it was frozen when Q was built")
            if p.grad.is_sparse:
                raise ValueError(f"parameter {name!r} has a sparse gradient; FishLeg needs dense ones")
            gradients[name] = p.grad
        if not gradients:
            raise ValueError("no parameter has a gradient: call loss.backward() before step()")
        norms = torch.stack(list(torch._foreach_norm(list(gradients.values()), math.inf))).tolist()
        for name, norm in zip(gradients, norms, strict=True):
            if not math.isfinite(norm):
                raise ValueError(f"non-finite gradient for parameter {name!r}; nothing was changed")
        return gradients, max(norms)

    @torch.no_grad()
    def _update_weights(self, gradients: dict[str, Tensor]) -> None:
        extra = (self.step_damping - 1) * (self.auxiliary.gamma or 0.0)
        directions = self.inverse.matvec(self._whole_layers(gradients), extra=extra)
        for name in self.masks.keys() & directions.keys():
            directions[name] = directions[name] * self.masks[name]
        products = torch._foreach_mul(list(gradients.values()), [directions[name] for name in gradients])
        decrease = float(torch.stack([product.sum() for product in products]).sum())
        if not math.isfinite(decrease):
            raise ValueError(f"the step Q g is not finite (gᵀQg = {decrease}); nothing was changed")
        ramp = min(1.0, 4 * (self.steps + 1) / self.warmup) if self.warmup else 1.0
        trust = self._trust(decrease, ramp)
        for group in self.param_groups:
            moving: list[Tensor] = [p for p in group["params"] if self._names[id(p)] in gradients]
            if moving:
                steps = [directions[self._names[id(p)]] for p in moving]
                self._move(group, moving, steps, trust, ramp)
        for _, p, name in self._parameters():
            if name in self.masks and name in gradients:
                p.mul_(self.masks[name])
        self.last_trust = trust

    def _move(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        steps: list[Tensor],
        trust: float,
        ramp: float,
    ) -> None:
        """p ← (1 − ηα) p − η m with m ← β m + trust · Q g, for one group; a fused operation each."""
        lr = group["lr"] * ramp
        if group["momentum"]:
            for p in parameters:
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            momenta = [self.state[p]["momentum"] for p in parameters]
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, steps, alpha=trust)
            steps, trust = momenta, 1.0
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_add_(parameters, steps, alpha=-lr * trust)

    def _whole_layers(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Q acts on whole layers: a bias (or weight) without a gradient counts as zero there."""
        covered = dict(gradients)
        for layer in self.inverse.layers.values():
            present = [part for part in layer.names if part in gradients]
            for part in layer.names:
                if present and part not in covered:
                    packed_shape = self.inverse.unmasked(layer.name).diag()
                    covered[part] = torch.zeros_like(layer.unpack(packed_shape)[part])
        return covered

    def _trust(self, decrease: float, ramp: float) -> float:
        """How much to shorten a step δ = −ηQg so that its predicted KL ½ δᵀF_γδ ≈ ½ η² gᵀQg ≤ max_kl.

        With momentum the steps add up to η/(1−β), which is what counts, with the largest η so far: a schedule
        that lowers η then really shortens the steps, and one that raises it again finds nothing in the
        momentum that was too long for it.
        """
        if self.max_kl is None:
            return 1.0
        for group in self.param_groups:
            largest = group.get("largest_lr", 0.0)
            if group["lr"] > largest:  # what has gathered was short enough for the lower rate
                momenta = [self.state[p]["momentum"] for p in group["params"] if "momentum" in self.state[p]]
                if momenta:
                    torch._foreach_mul_(momenta, largest / group["lr"])
            group["largest_lr"] = max(group["lr"], largest)
        reach = max(group["largest_lr"] / (1 - group["momentum"]) for group in self.param_groups) * ramp
        kl = 0.5 * reach**2 * max(decrease, 0.0)
        return min(1.0, math.sqrt(self.max_kl / kl)) if kl > 0 else 1.0

    def state_dict(self) -> dict[str, Any]:
        """The usual optimizer state, and under "fishleg" λ, the auxiliary optimizer, masks and generator."""
        state = super().state_dict()
        state["fishleg"] = copy.deepcopy(
            {
                "steps": self.steps,
                "inverse": self.inverse.state_dict(),
                "auxiliary": self.auxiliary.state_dict(),
                "masks": self.masks,
            }
        )
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore bit for bit what `state_dict` returned."""
        if "fishleg" not in state_dict:
            raise ValueError("this is not a FishLeg state: it has no 'fishleg' entry")
        before = self.state_dict()
        try:
            self._load(state_dict)
        except Exception:
            self._load(before)
            raise

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        own = copy.deepcopy(state_dict["fishleg"])
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "fishleg"})
        self.inverse.load_state_dict(own["inverse"])
        self.auxiliary.load_state_dict(own["auxiliary"])
        device = {name: p.device for _, p, name in self._parameters()}
        self.masks = {name: mask.to(device.get(name, mask.device)) for name, mask in own["masks"].items()}
        self.auxiliary.ignore_removed_rows(self.masks)
        self.steps = own["steps"]

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("FishLeg cannot be copied or pickled: make a new one and load this one's state_dict")


def _require(name: str, value: object, holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {rule}, got {value}")
