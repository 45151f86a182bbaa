"""FishLeg: the optimizer w ← w − η Q g, whose Q keeps learning during training.

Paper: algorithm (alg:gradualprune), the fine-tuning step and the auxiliary step after it.
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
from fishleg.optim.gradients import collect_gradients, complete_layers
from fishleg.optim.recorder import CallRecorder, replay_call
from fishleg.optim.trust_region import largest_reach, record_learning_rates_, shortening
from fishleg.options import AuxiliaryOptions
from fishleg.runtime.batches import Forward
from fishleg.runtime.process_group import check_not_sharded

# With a larger gradient Q g may overflow. The auxiliary step before it is then made reversible.
_HUGE = 1e8
# The default options of an auxiliary learning whose model is being trained: few examples per step, a short
# warm start, and BatchNorm as in the training step.
ONLINE = AuxiliaryOptions(sub_batch=12, warm_start=20, refine_every=4, eta_floor=0.05, batch_statistics=True)


class FishLeg(Optimizer):
    """Natural gradient descent with a learned inverse Fisher matrix, as a torch optimizer.

    The optimizer records the inputs of the model's last training call. The auxiliary steps learn from them,
    so an ordinary training loop works without changes.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> optimizer = FishLeg(model, "categorical", lr=0.05)
    >>> x, y = torch.randn(32, 4), torch.randint(3, (32,))
    >>> loss = nn.functional.cross_entropy(model(x), y)
    >>> loss.backward()
    >>> optimizer.step()

    Args:
        model: The model.
        likelihood: The likelihood of the model's outputs, or its name.
        lr: The learning rate η. With a trust region it hardly needs tuning.
        momentum: The momentum β in [0, 1), applied to Q g.
        weight_decay: The decoupled weight decay, ≥ 0.
        params: Parameter groups as in any torch optimizer. None: all trainable parameters in one group.
        inverse: A Q to continue with, for instance one that pruned the model. None: a new one.
        gamma: The damping γ of Q. None: γ = relative_damping × mean diag(F), measured on the first batch.
        relative_damping: See `gamma`.
        update_every: k > 0 takes one auxiliary step in every k-th step. k < 0 takes |k| of them in every
            step.
        warmup: During this many first steps there is one auxiliary step in every step. The learning rate
            rises linearly during the first quarter of them.
        initial_lr: The learning rate of SGD that the first steps are equivalent to: Q starts as αI with
            α = initial_lr/lr. It is not used if `inverse` is given. Paper: section (subsec:qinit).
        max_kl: The trust region: a step is shortened if its predicted KL divergence exceeds this value. None
            switches the trust region off.
        step_damping: The damping of the steps, in multiples of γ, ≥ 1. Use more than 1 for a Q that was
            learned with little damping, for instance for pruning. It is cheap for diagonal structures and
            those with E².
        clip_gradients: Called with the parameters before each step, for instance
            `lambda p: torch.nn.utils.clip_grad_norm_(p, 1.0)`.
        auxiliary: The options of the auxiliary learning, or an existing auxiliary learning to continue with.
            The latter brings its own Q, γ and `forward`; pass the inputs to `step(batch=...)` then.
        forward: Computes the outputs of the model for a batch that is passed to `step(batch=...)`. None: the
            recorded call is repeated.
        generator: The source of random numbers of the auxiliary learning.

    Attributes:
        inverse: Q.
        auxiliary: The auxiliary learning.
        steps: The number of steps taken.
        masks: The masks by parameter name that `set_masks` was given.
        last_auxiliary: The result of the last auxiliary step; None before the first.
        last_trust: The factor by which the trust region multiplied the last step.

    Raises:
        ValueError: An argument is out of its range, or the model has no trainable parameters.
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
        _check_numbers(lr, momentum, weight_decay, update_every, initial_lr, warmup)
        check_not_sharded(model)
        self.set_trust_region(max_kl, step_damping)
        self._names = {id(p): name for name, p in model.named_parameters()}
        trainable = [p for p in model.parameters() if p.requires_grad]
        if not trainable:
            raise ValueError("the model has no trainable parameters (requires_grad is False for all of them)")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(trainable if params is None else params, defaults)
        if isinstance(auxiliary, Auxiliary):
            if inverse is not None or gamma is not None or forward is not None:
                raise ValueError("an Auxiliary has its own inverse, gamma and forward; pass none of them")
            self.auxiliary, forward = auxiliary, auxiliary.forward
        else:
            if inverse is None:
                inverse = InverseFisher.from_model(model, "ekfac", scale=initial_lr / lr if lr else 1.0)
            self.auxiliary = Auxiliary(
                model, inverse, likelihood, gamma=gamma, relative_damping=relative_damping,
                options=auxiliary or ONLINE, forward=forward or replay_call, generator=generator,
            )  # fmt: skip
        self.inverse = self.auxiliary.inverse
        self._covered = {part for layer in self.inverse.layers.values() for part in layer.names}
        self.update_every, self.warmup = update_every, warmup
        self.clip_gradients = clip_gradients
        self.steps = 0
        self.last_auxiliary: AuxiliaryStats | None = None
        self.last_trust = 1.0
        self.masks: dict[str, Tensor] = {}
        self._recorder = CallRecorder()
        if forward is None:
            hook = model.register_forward_pre_hook(self._recorder, with_kwargs=True)
            weakref.finalize(self, hook.remove).atexit = False  # several optimizers may use one model in turn

    def set_trust_region(self, max_kl: float | None, step_damping: float) -> None:
        """Change the bound on the steps, for instance as the loss falls.

        Args:
            max_kl: The largest predicted KL divergence of a step; None: no bound.
            step_damping: The damping of the steps, in multiples of γ.

        Raises:
            ValueError: A number is out of its range.
        """
        _require("step_damping", step_damping, 1 <= step_damping < math.inf, ">= 1 and finite")
        _require("max_kl", max_kl, max_kl is None or 0 < max_kl < math.inf, "> 0 and finite, or None")
        self.max_kl, self.step_damping = max_kl, step_damping

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters, as in any torch optimizer.

        Args:
            param_group: The parameters under `params`, and options of the group.

        Raises:
            ValueError: A parameter does not belong to the model.
        """
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if id(p) not in self._names:
                self.param_groups.pop()
                raise ValueError(f"a parameter of shape {tuple(p.shape)} does not belong to the model")

    def set_masks(self, masks: Mapping[str, Tensor], *, restrict: bool = True) -> None:
        """Keep weights exactly zero where a mask is False.

        Args:
            masks: Masks by parameter name, boolean, True = kept, [*parameter.shape].
            restrict: Whether Q is restricted too. It then learns (F_MM+γI)⁻¹, the inverse for the kept
                weights alone.
        """
        if restrict:
            self.inverse.restrict(masks)
        self.masks = {name: mask.clone() for name, mask in masks.items()}
        self.auxiliary.ignore_removed_rows(self.masks)
        for name, p in self._named_parameters():
            if name in self.masks:
                with torch.no_grad():
                    p.mul_(self.masks[name])
                    if "momentum" in self.state[p]:
                        self.state[p]["momentum"].mul_(self.masks[name])

    def step(self, closure: Callable[[], Any] | None = None, *, batch: Any = None) -> Any:
        """Take the auxiliary steps that are due, then update the weights.

        Without `batch`, the auxiliary steps repeat the model's last training call with its first `sub_batch`
        examples. Every tensor whose first dimension is the batch size is then cut. If that is wrong, for
        instance for a square attention mask, pass `AuxiliaryOptions(sub_batch=None)`.

        Args:
            closure: Computes the loss and its gradients, as in any torch optimizer.
            batch: The inputs of the auxiliary steps, as `forward` takes them.

        Returns:
            The loss that `closure` returned; None without a closure.

        Raises:
            ValueError: There are no gradients, no inputs, or a loss, gradient or step is not finite. The
                weights, Q and its learning are then unchanged.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if isinstance(loss, (Tensor, float)) and not bool(torch.as_tensor(loss).isfinite().all()):
                raise ValueError(f"the loss is not finite ({loss}); nothing was changed")
        for name, p in self._named_parameters():
            if name in self.masks and p.grad is not None:
                p.grad.mul_(self.masks[name])
        if self.clip_gradients is not None:
            self.clip_gradients([p for _, p in self._named_parameters() if p.grad is not None])
        gradients, largest = collect_gradients(self._named_parameters(), self._covered)
        due = self._auxiliary_steps_due()
        if due > 0:
            inputs = self._recorder.call if batch is None else batch
            if inputs is None:
                raise ValueError(
                    "no inputs to learn Q from: call the model in training mode before step(), "
                    "or pass step(batch=...); create FishLeg before the first call of a compiled model"
                )
        with self._restored_on_error(due > 1 or (due > 0 and largest > _HUGE)):
            if due > 0:
                self.last_auxiliary = self._learn(inputs, due)
            self._update_weights(gradients)
        self._recorder.clear()
        self.steps += 1
        return loss

    def _learn(self, inputs: Any, due: int) -> AuxiliaryStats | None:
        """Return the last of `due` auxiliary steps, or the earlier result if its labels are all ignored."""
        stats = [self.auxiliary.try_step(inputs) for _ in range(due)]
        return stats[-1] or self.last_auxiliary

    @contextmanager
    def _restored_on_error(self, enabled: bool) -> Iterator[None]:
        """Restore Q and its learning if the body raises. This costs a copy of both, hence `enabled`."""
        saved = copy.deepcopy([self.inverse.state_dict(), self.auxiliary.state_dict()]) if enabled else None
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

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for group in self.param_groups:
            for p in group["params"]:
                yield self._names[id(p)], p

    @torch.no_grad()
    def _update_weights(self, gradients: dict[str, Tensor]) -> None:
        extra_damping = (self.step_damping - 1) * (self.auxiliary.gamma or 0.0)
        directions = self.inverse.matvec(
            complete_layers(self.inverse, gradients), extra_damping=extra_damping
        )
        for name in self.masks.keys() & directions.keys():
            directions[name] = directions[name] * self.masks[name]
        products = torch._foreach_mul(list(gradients.values()), [directions[name] for name in gradients])
        decrease = float(torch.stack([product.sum() for product in products]).sum())
        if not math.isfinite(decrease):
            raise ValueError(f"the step Q g is not finite (gᵀQg = {decrease}); nothing was changed")
        ramp = min(1.0, 4 * (self.steps + 1) / self.warmup) if self.warmup else 1.0
        trust = 1.0
        if self.max_kl is not None:
            record_learning_rates_(self.param_groups, self.state)
            trust = shortening(decrease, largest_reach(self.param_groups) * ramp, self.max_kl)
        for group in self.param_groups:
            moving: list[Tensor] = [p for p in group["params"] if self._names[id(p)] in gradients]
            if moving:
                steps = [directions[self._names[id(p)]] for p in moving]
                self._move(group, moving, steps, trust, ramp)
        for name, p in self._named_parameters():
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
        """Set m ← β m + trust · Q g and p ← (1 − ηα) p − η m for one group, in fused operations."""
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

    def state_dict(self) -> dict[str, Any]:
        """Return the usual optimizer state, and under "fishleg" Q, its learning and the masks.

        Returns:
            The state. Training continues from it bit for bit.
        """
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
        """Restore what `state_dict` returned. A state that does not fit changes nothing.

        Args:
            state_dict: The state.

        Raises:
            ValueError: It is not the state of a FishLeg optimizer.
        """
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
        device = {name: p.device for name, p in self._named_parameters()}
        self.masks = {name: mask.to(device.get(name, mask.device)) for name, mask in own["masks"].items()}
        self.auxiliary.ignore_removed_rows(self.masks)
        self.steps = own["steps"]

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "FishLeg cannot be copied or pickled: create a new one and load this one's state_dict"
        )


def _check_numbers(
    lr: float, momentum: float, weight_decay: float, update_every: int, initial_lr: float, warmup: int
) -> None:
    _require("lr", lr, 0 <= lr < math.inf, ">= 0 and finite")
    _require("momentum", momentum, 0 <= momentum < 1, "in [0, 1)")
    _require("weight_decay", weight_decay, weight_decay >= 0, ">= 0")
    rule = "> 0 (an auxiliary step in every k-th step) or < 0 (|k| of them in every step)"
    _require("update_every", update_every, update_every != 0, rule)
    _require("initial_lr", initial_lr, 0 < initial_lr < math.inf, "> 0 and finite")
    _require("warmup", warmup, warmup >= 0, ">= 0")


def _require(name: str, value: object, holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {rule}, got {value}")
