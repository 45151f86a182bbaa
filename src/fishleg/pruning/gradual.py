"""Algorithm 1 of the paper: prune a little, train a little, again; Q is refined all along.

`gradual` is the whole loop, `Gradual` the same in the caller's hands.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.optim import Optimizer

from fishleg.curvature.likelihoods import Likelihood
from fishleg.inverse.auxiliary import Auxiliary
from fishleg.inverse.inverse_fisher import InverseFisher
from fishleg.optim.fishleg import FishLeg
from fishleg.pruning.attach import enforce
from fishleg.pruning.surgeon import PruneStep, Surgeon
from fishleg.pruning.tuning import OPTIMIZERS, FineTuningOptions
from fishleg.runtime.batches import move_batch, targets_of
from fishleg.runtime.batchnorm import refreshable_norms
from fishleg.runtime.loaders import check_loader, cycle
from fishleg.runtime.modes import gradients_enabled
from fishleg.runtime.process_group import mean_over_processes
from fishleg.runtime.tensors import at_least_float32

_NOISE = 0.4  # ν in `_pace`
_HOPE = 0.1  # of the loss that the given model had, training is trusted to undercut so much
_LOOK_AHEAD = 8  # training batches on which that loss is measured
_MOST_SKIPPED = 1000  # batches in a row without a label that counts


@dataclass(frozen=True)
class Progress:
    """Where a gradual run is, after each training step."""

    stage: int
    stages: int
    step: int
    steps: int
    loss: float


def gradual(
    surgeon: Surgeon,
    sparsities: Sequence[float],
    loader: Iterable[Any] | None = None,
    tuning: FineTuningOptions | None = None,
    *,
    on_prune: Callable[[PruneStep], None] | None = None,
    on_step: Callable[[Progress], None] | None = None,
    on_stage: Callable[[PruneStep], None] | None = None,
) -> list[PruneStep]:
    """Prune to each sparsity in turn and train after each; the surgeon's model and masks are the result.

    `loader` yields the training batches (default: the surgeon's own). The callbacks see the model in
    evaluation mode right after pruning, and again after the training that follows.
    """
    targets = surgeon.check_targets(sparsities)
    done = []
    with Gradual(surgeon, loader, tuning) as run:
        for stage, sparsity in enumerate(targets):
            done.append(run.prune(sparsity))
            if on_prune is not None:
                on_prune(done[-1])
            for loss in run.train():
                if on_step is not None:
                    on_step(Progress(stage, len(targets), run.step, run.steps, loss))
            if on_stage is not None:
                on_stage(done[-1])
    return done


class Gradual:
    """The same loop in your own hands: `prune(sparsity)`, exhaust `train()`, again; a context manager.

    It can stop between any two training steps: `state_dict`, with those of the model and the surgeon and the
    place in the data, is all that the next step depends on.
    """

    def __init__(
        self, surgeon: Surgeon, loader: Iterable[Any] | None = None, tuning: FineTuningOptions | None = None
    ) -> None:
        self.surgeon, self.tuning = surgeon, tuning or FineTuningOptions()
        surgeon.trains = True
        surgeon.note_zeros()
        self.loader = surgeon.loader if loader is None else loader
        check_loader(self.loader, "the training loader")
        self.steps = self.tuning.steps_for(self.loader)
        self.step = self.steps  # training steps done in the present stage
        self.teacher = copy.deepcopy(surgeon.model).eval() if self.tuning.distill else None
        self.learning: Auxiliary | None = None
        self.optimizer: Optimizer | None = None
        self.recent: list[float] = []  # the last losses, above the least that they could be
        self._floor: float | None = None  # that least value, of the last loss
        self._nothing_counts = False  # whether every label of the last batch is ignored
        self._modes = {module: module.training for module in surgeon.model.modules()}
        self.batches = cycle(self.loader)
        self.ahead = [next(self.batches)]  # drawn, and not trained on yet
        if targets_of(self.ahead[0]) is None and self.teacher is None:
            raise ValueError(
                "fine-tuning needs (inputs, targets) from the loader, or distillation (distill, --distill)"
            )
        if self.tuning.distill and type(surgeon.likelihood).divergence is Likelihood.divergence:
            raise ValueError(f"distill=True needs a divergence, {type(surgeon.likelihood).__name__} has none")
        self.given = self._measure_given() if self.tuning.paced and self.teacher is None else 0.0

    def __enter__(self) -> Gradual:
        return self

    def __exit__(self, *_: object) -> None:
        """Put every module back into the mode it was found in."""
        self._restore_modes()
        self.surgeon.model.zero_grad(set_to_none=True)

    def _set_training_modes(self) -> None:
        """Those of the training: what was in evaluation mode within a model in training mode stays there.

        So do, in a model that was given in evaluation mode, BatchNorms whose parameters are frozen.
        """
        model = self.surgeon.model
        self._restore_modes()
        frozen = {m for m in self._modes if isinstance(m, _BatchNorm)} - set(refreshable_norms(model))
        for module, mode in self._modes.items():
            found_so = mode or (not self._modes[model] and module not in frozen)
            module.training = True if module is model else found_so

    def _restore_modes(self) -> None:
        for module, mode in self._modes.items():
            module.training = mode

    def _measure_given(self) -> float:
        """The loss of the model as it was given, on the batches that come first.

        With dropout as in the training, whose loss it will be compared with; BatchNorm's statistics stay.
        """
        model = self.surgeon.model
        device = next(model.parameters()).device
        count = min(_LOOK_AHEAD, self.steps)
        self.ahead += [next(self.batches) for _ in range(count - 1)]
        found: list[float] = []
        self._set_training_modes()
        for module in model.modules():
            if isinstance(module, (_BatchNorm, _InstanceNorm)):
                module.eval()
        try:
            forked = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
            with gradients_enabled(), torch.no_grad(), forked:
                for batch in self.ahead:
                    loss = self.loss(move_batch(batch, device))
                    if not self._nothing_counts:
                        found.append(self._above_floor(loss))
        finally:
            self._restore_modes()
        if not found:
            raise ValueError(f"none of the first {count} training batches has a label that counts")
        mean = mean_over_processes(model, sum(found) / len(found))
        if not math.isfinite(mean):
            raise ValueError(f"the model's loss on the training loader is not finite: {mean}")
        return mean

    def look(self) -> InverseFisher:
        """Refine Q for the next pruning step; the first time, estimate it."""
        surgeon = self.surgeon
        if self.optimizer is not None:
            self._restore_modes()
            return surgeon.refine(self.tuning.refine)
        inverse = surgeon.inverse or surgeon.estimate()
        self._start()
        return inverse

    def _start(self) -> None:
        """Once there is a Q: the optimizer, which may share it."""
        self.learning = self.surgeon.learning
        self.optimizer = self._make_optimizer()
        self._restore_modes()

    def prune(self, sparsity: float, *, inverse: InverseFisher | None = None) -> PruneStep:
        """The first half of a stage: look, remove, compensate."""
        surgeon = self.surgeon
        cuts, refine = (self.tuning.cuts, self.tuning.refine) if self.tuning.refine else (1, 1)
        inverse = inverse or self.look()
        if self.optimizer is None:
            self._start()
        step = surgeon.prune(sparsity, inverse=inverse, cuts=cuts, refine=refine)
        surgeon.model.eval()
        self.step = 0
        return step

    def _make_optimizer(self, *, untaught: bool = False) -> Optimizer:
        tuning, surgeon = self.tuning, self.surgeon
        parameters = [p for p in surgeon.model.parameters() if p.requires_grad]
        lr = tuning.lr or OPTIMIZERS[tuning.optimizer]
        if tuning.optimizer == "sgd":
            return torch.optim.SGD(
                parameters, lr=lr, momentum=tuning.momentum, weight_decay=tuning.weight_decay
            )
        if tuning.optimizer == "adam":
            return torch.optim.AdamW(parameters, lr=lr, weight_decay=tuning.weight_decay)
        self.learning = surgeon.learning or surgeon.new_learner(untaught=untaught)
        return FishLeg(
            surgeon.model, surgeon.likelihood, lr=lr, momentum=tuning.momentum, max_kl=tuning.max_kl,
            weight_decay=tuning.weight_decay, update_every=tuning.update_every, warmup=0,
            auxiliary=self.learning, step_damping=tuning.step_damping,
        )  # fmt: skip

    def train(self) -> Iterator[float]:
        """The second half: what is left of the stage's training steps; yields the loss of each."""
        surgeon, model, optimizer = self.surgeon, self.surgeon.model, self.optimizer
        if optimizer is None or self.step >= self.steps:
            return
        self._set_training_modes()
        lr = self.tuning.lr or OPTIMIZERS[self.tuning.optimizer]
        device = next(model.parameters()).device
        enforce(optimizer, surgeon)
        if self.learning is not None:
            self.learning.reconfigure(
                sub_batch=surgeon.options.sub_batch,
                groups=1,
                refine_every=2,
                eta_floor=0.05,
                batch_statistics=surgeon.options.batch_statistics is not False
                and not self.learning.options.vectorize,
            )
        skipped = 0
        while self.step < self.steps:
            share = self.step / self.steps if self.tuning.lr_schedule == "cosine" else 0.0
            for group in optimizer.param_groups:
                group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * share))
            batch = move_batch(self.ahead.pop(0) if self.ahead else next(self.batches), device)
            with gradients_enabled():
                loss = self._train_on(batch, optimizer)
            if loss is None:
                skipped += 1
                if skipped > _MOST_SKIPPED:
                    raise ValueError(
                        f"{skipped} training batches in a row have no label that counts, or a single example "
                        "where BatchNorm needs several"
                    )
                continue
            skipped = 0
            self.step += 1
            yield loss
        for name, parameter in model.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                raise ValueError(f"training has made {name!r} infinite or NaN: a smaller lr is due")
        model.eval()

    def _train_on(self, batch: Any, optimizer: Optimizer) -> float | None:
        """One training step; its loss, or None where nothing can be learned from the batch."""
        surgeon = self.surgeon
        optimizer.zero_grad()
        try:
            loss = self.loss(batch)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            return None  # a last batch of one example, before a BatchNorm
        if self._nothing_counts:
            return None
        if not math.isfinite(value := float(loss.detach())):
            raise ValueError(
                f"the training loss is not finite ({value}) at step {self.step + 1} of {self.steps} "
                f"after sparsity {surgeon.sparsity:.4f}: a smaller lr is due, or other data"
            )
        loss.backward()
        if isinstance(optimizer, FishLeg):
            if self.tuning.paced:
                optimizer.max_kl, optimizer.step_damping = self._pace(self._above_floor(loss))
            optimizer.step(batch=batch)
        else:
            optimizer.step()
            enforce(optimizer, surgeon)
            if self.learning is not None and self.step % self.tuning.update_every == 0:
                self.learning.try_step(batch)
        return value

    def state_dict(self) -> dict[str, Any]:
        """The place in the stage and the optimizer (a Q that is the surgeon's too is in the surgeon's)."""
        state = None if self.optimizer is None else self.optimizer.state_dict()
        if state is not None and self._shares_q():
            state["fishleg"] = {**state["fishleg"], "inverse": None, "auxiliary": None}
        progress = {"step": self.step, "recent": list(self.recent), "given": self.given}
        return {**progress, "optimizer": state, "teacher": self._teacher_sum()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, after the model and the surgeon got back theirs.

        With distillation, make this object while the model is still the dense one: that is the teacher.
        """
        if state.get("teacher") != self._teacher_sum():
            raise ValueError(
                "the teacher is another model than it was: with distill=True make Gradual from the dense "
                "model, then load the states of the model, the surgeon and this"
            )
        self.step, self.recent, self.given = state["step"], list(state["recent"]), state["given"]
        if state["optimizer"] is None:
            self.optimizer = None
            return
        self.learning = self.surgeon.learning
        self.optimizer = self._make_optimizer(untaught=True)
        if self._shares_q():
            assert self.learning is not None
            q = {"inverse": self.learning.inverse.state_dict(), "auxiliary": self.learning.state_dict()}
            state = {"optimizer": {**state["optimizer"], "fishleg": {**state["optimizer"]["fishleg"], **q}}}
        self.optimizer.load_state_dict(state["optimizer"])

    def _teacher_sum(self) -> float | None:
        """A number that tells one teacher from another."""
        if self.teacher is None:
            return None
        return float(sum(p.detach().double().abs().sum().cpu() for p in self.teacher.parameters()))

    def restart_data(self) -> None:
        """Draw the next batch from a new iteration over the loader, which was wound to the right place."""
        self.batches, self.ahead = cycle(self.loader), []

    def _shares_q(self) -> bool:
        return isinstance(self.optimizer, FishLeg) and self.optimizer.auxiliary is self.surgeon.learning

    def _above_floor(self, loss: Tensor) -> float:
        return float(loss.detach()) - (self._floor or 0.0)

    def _pace(self, loss: float) -> tuple[float, float]:
        """A step's KL bound, and its damping in multiples of γ, for the loss L that can be regained.

        A step −ηQg has the signal gᵀQg ≈ 2L, and noise 2ν that is the same whatever the loss is. Its expected
        gain 2ηL − η²(L+ν) is largest at η = L/(L+ν), where the step's KL is L²/(L+ν): a bound that did not
        fall like that would wreck a model that is nearly as good as it can be. Such a model needs more
        damping, too: most of what Q would enlarge is noise then. How good it can be is what the given model
        tells: L is the loss above that model's, and a tenth of what that one had left. Where that model's
        own loss is larger than 1, as it is for targets of a large scale, it is the unit of all these: the
        noise is of its size. (The constants were found by trial on ResNet20 and ResNet18.)
        """
        self.recent = [*self.recent[-9:], mean_over_processes(self.surgeon.model, loss)]
        left = 1.0 if self._floor is None else self.given  # None: nobody knows how low the loss can get
        unit = max(1.0, self.given)
        L = max(sum(self.recent) / len(self.recent) - self.given, 0.0) + _HOPE * left
        L = min(1.0, max(L / unit, self.tuning.regain, 1e-3))
        kl = self.tuning.max_kl * unit * (1 + _NOISE) * L**2 / (L + _NOISE)
        return kl, self.tuning.step_damping / max(L, 0.1)

    def loss(self, batch: Any) -> Tensor:
        likelihood, forward = self.surgeon.likelihood, self.surgeon.forward
        f = at_least_float32(forward(self.surgeon.model, batch))
        targets = targets_of(batch)
        valid = likelihood.valid(f, targets)
        self._nothing_counts = valid is not None and not bool(valid.any())
        if self.teacher is None:
            if targets is None:
                raise ValueError("a training batch has no targets, others had: fine-tuning needs them")
            self._floor = likelihood.nll_floor(f)
            try:
                return likelihood.nll(f, targets)
            except (IndexError, RuntimeError, ValueError):
                likelihood.check(f, targets)  # which may know a better word for what is wrong
                raise
        self._floor = 0.0
        with torch.no_grad():
            reference = at_least_float32(forward(self.teacher, batch))
        # a confident teacher says little but the label at T = 1; T² keeps the size of the gradient
        T = self.tuning.temperature if likelihood.has_logits else 1.0
        return T**2 * likelihood.divergence(f / T, reference / T, valid)
