"""Training after a pruning step: Algorithm 1 of the paper between two prunings, in resumable steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.optim import Optimizer

from fishleg.curvature.likelihoods import Likelihood
from fishleg.inverse.auxiliary import Auxiliary
from fishleg.optim.fishleg import FishLeg
from fishleg.options import FineTuningOptions
from fishleg.pruning.pace import Pace
from fishleg.pruning.surgeon import Surgeon
from fishleg.pruning.training_loss import TrainingLoss
from fishleg.pruning.training_modes import TrainingModes
from fishleg.pruning.zero_keeper import ZeroKeeper
from fishleg.runtime.batch_errors import naming_the_batch
from fishleg.runtime.batches import move_batch, targets_of
from fishleg.runtime.loaders import check_loader, cycle
from fishleg.runtime.modes import gradients_enabled
from fishleg.runtime.process_group import agree_on_batch, check_equal_numbers, mean_over_processes

_LOADER = "the training loader"
_LOOK_AHEAD = 8  # training batches on which the loss of the given model is measured
_MOST_SKIPPED = 1000  # batches in a row without a label that counts


class FineTuner:
    """Trains a surgeon's model after each pruning step; zeros stay exactly zero.

    It can stop between any two training steps: `state_dict`, with those of the model and the surgeon and the
    place in the data, is all that the next step depends on.

    Args:
        surgeon: What prunes the model.
        loader: Training batches; default: the surgeon's calibration batches.
        options: How to train; default: `FineTuningOptions()`.

    Attributes:
        step: Training steps done in the present stage.
        steps: Training steps of a stage.
        optimizer: The optimizer; None until `start`.

    Raises:
        ValueError: The batches have no targets and there is no distillation, or the loss is not finite.
    """

    def __init__(
        self,
        surgeon: Surgeon,
        loader: Iterable[Any] | None = None,
        options: FineTuningOptions | None = None,
    ) -> None:
        self.surgeon, self.options = surgeon, options or FineTuningOptions()
        self.zeros = ZeroKeeper(surgeon.weights)
        self.loader = surgeon.loader if loader is None else loader
        check_loader(self.loader, _LOADER)
        self.steps = self._count_steps()
        self.step = self.steps
        teacher = copy.deepcopy(surgeon.model).eval() if self.options.distill else None
        self.criterion = TrainingLoss(
            surgeon.model, surgeon.likelihood, surgeon.forward, teacher, self.options
        )
        self.learning: Auxiliary | None = None
        self.optimizer: Optimizer | None = None
        self._modes = TrainingModes(surgeon.model)
        self._batches = cycle(self.loader, _LOADER)
        self._ahead: list[tuple[str, Any]] = []  # drawn, and not trained on yet
        self._look_ahead(1)
        self._check_targets(self._ahead[0][1])
        given = self._measure_given() if self.options.paced and teacher is None else 0.0
        self.pace = Pace(self.options, given)

    def _count_steps(self) -> int:
        """Return the training steps of a stage, the same in all processes.

        Raises:
            ValueError: The numbers differ, or this loader needs a length and has none.
        """
        steps, error = -1, None  # -1: the loader has no length
        try:
            steps = self.options.steps_for(self.loader)
        except ValueError as found:
            error = found
        check_equal_numbers(
            self.surgeon.model, steps, f"training steps of a stage (epochs times the length of {_LOADER})",
            "give every process as many batches (DistributedSampler, drop_last=True), or give steps",
        )  # fmt: skip
        if error is not None:
            raise error
        return steps

    def _look_ahead(self, count: int) -> None:
        """Draw batches in advance until there are so many, in all processes at once."""
        error = None
        try:
            while len(self._ahead) < count:
                self._ahead.append(self._draw())
        except Exception as found:
            error = found
        agree_on_batch(self.surgeon.model, _LOADER, self._batches.drawn, error)

    def _draw(self) -> tuple[str, Any]:
        """Return the next training batch, with its place for error messages."""
        batch = next(self._batches)
        return self._batches.place, batch

    def _check_targets(self, batch: Any) -> None:
        if targets_of(batch) is None and self.criterion.teacher is None:
            raise ValueError(
                "fine-tuning needs (inputs, targets) from the loader, or distillation (distill, --distill)"
            )
        likelihood = type(self.surgeon.likelihood)
        if self.options.distill and likelihood.divergence is Likelihood.divergence:
            raise ValueError(f"distill=True needs a divergence, {likelihood.__name__} has none")

    def close(self) -> None:
        """Put every module back into the mode that it was found in, and drop gradients."""
        self.restore_modes()
        self.surgeon.model.zero_grad(set_to_none=True)

    def restore_modes(self) -> None:
        """Put every module back into the mode that it was found in."""
        self._modes.restore()

    def _measure_given(self) -> float:
        """Return the loss of the given model on the first batches.

        Dropout is on, as in the training whose loss it is compared with. BatchNorm's statistics are not
        updated.

        Raises:
            ValueError: No label of these batches counts, or the loss is not finite.
        """
        model = self.surgeon.model
        device = next(model.parameters()).device
        count = min(_LOOK_AHEAD, self.steps)
        self._look_ahead(count)
        found: list[float] = []
        self._modes.train()
        for module in model.modules():
            if isinstance(module, (_BatchNorm, _InstanceNorm)):
                module.eval()
        try:
            forked = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
            with gradients_enabled(), torch.no_grad(), forked:
                for place, batch in self._ahead:
                    with naming_the_batch(place):
                        result = self.criterion(move_batch(batch, device))
                    if result.counts:
                        found.append(result.above_floor)
        finally:
            self._modes.restore()
        if not found:
            raise ValueError(f"none of the first {count} training batches has a label that counts")
        mean = mean_over_processes(model, sum(found) / len(found))
        if not math.isfinite(mean):
            raise ValueError(f"the model's loss on the training loader is not finite: {mean}")
        return mean

    def start(self) -> None:
        """Make the optimizer, once there is a Q that it may share."""
        self.optimizer = self._make_optimizer()
        self.restore_modes()

    def begin_stage(self) -> None:
        """Start counting the training steps of a stage."""
        self.surgeon.model.eval()
        self.step = 0

    def _make_optimizer(self, *, learn: bool = True) -> Optimizer:
        options, surgeon = self.options, self.surgeon
        parameters = [p for p in surgeon.model.parameters() if p.requires_grad]
        self.learning = surgeon.curvature.learning
        if options.optimizer == "sgd":
            return torch.optim.SGD(
                parameters, lr=options.learning_rate, momentum=options.momentum,
                weight_decay=options.weight_decay,
            )  # fmt: skip
        if options.optimizer == "adam":
            return torch.optim.AdamW(parameters, lr=options.learning_rate, weight_decay=options.weight_decay)
        self.learning = self.learning or surgeon.curvature.new_learning(surgeon.masks, learn=learn)
        return FishLeg(
            surgeon.model, surgeon.likelihood, lr=options.learning_rate, momentum=options.momentum,
            max_kl=options.max_kl, weight_decay=options.weight_decay, update_every=options.update_every,
            warmup=0, auxiliary=self.learning, step_damping=options.step_damping,
        )  # fmt: skip

    def train(self) -> Iterator[float]:
        """Do the training steps that are left in the present stage.

        Yields:
            The loss of each step.

        Raises:
            ValueError: The loss or a weight is not finite, or no label counts in very many batches.
        """
        model, optimizer = self.surgeon.model, self.optimizer
        if optimizer is None or self.step >= self.steps:
            return
        self._modes.train()
        self.zeros.enforce(optimizer, self.surgeon.masks)
        if self.learning is not None:
            self.surgeon.curvature.configure_for_training(self.learning)
        device, skipped = next(model.parameters()).device, 0
        while self.step < self.steps:
            self._set_learning_rate(optimizer)
            if not skipped:  # a process that skips a batch is late; the others wait for it in their step
                self._look_ahead(1)
            place, batch = self._ahead.pop(0) if self._ahead else self._draw()
            with gradients_enabled(), naming_the_batch(f"{place}, step {self.step + 1} of {self.steps}"):
                loss = self._train_on(move_batch(batch, device), optimizer)
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
                raise ValueError(f"training has made {name!r} infinite or NaN: use a smaller lr")
        model.eval()

    def _set_learning_rate(self, optimizer: Optimizer) -> None:
        share = self.step / self.steps if self.options.lr_schedule == "cosine" else 0.0
        for group in optimizer.param_groups:
            group["lr"] = self.options.learning_rate * 0.5 * (1 + math.cos(math.pi * share))

    def _train_on(self, batch: Any, optimizer: Optimizer) -> float | None:
        """Do one training step.

        Returns:
            The loss, or None if nothing can be learned from the batch.

        Raises:
            ValueError: The loss is not finite.
        """
        surgeon = self.surgeon
        optimizer.zero_grad()
        try:
            result = self.criterion(batch)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            return None  # a last batch of one example, before a BatchNorm
        if not result.counts:
            return None
        if not math.isfinite(value := float(result.loss.detach())):
            raise ValueError(
                f"the training loss is not finite ({value}) at step {self.step + 1} of {self.steps} "
                f"after sparsity {surgeon.sparsity:.4f}: use a smaller lr, or other data"
            )
        result.loss.backward()
        if isinstance(optimizer, FishLeg):
            if self.options.paced:
                self._set_pace(optimizer, result.above_floor, result.floor)
            optimizer.step(batch=batch)
        else:
            optimizer.step()
            self.zeros.enforce(optimizer, surgeon.masks)
            if self.learning is not None and self.step % self.options.update_every == 0:
                self.learning.try_step(batch)
        return value

    def _set_pace(self, optimizer: FishLeg, loss: float, floor: float | None) -> None:
        shared = mean_over_processes(self.surgeon.model, loss)
        optimizer.set_trust_region(*self.pace.update(shared, knows_floor=floor is not None))

    def restart_data(self) -> None:
        """Draw the next batch from a new iteration over the loader, which was set to the right place."""
        self._batches, self._ahead = cycle(self.loader, _LOADER), []

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the stage and the optimizer; a Q that is the surgeon's is in the surgeon's."""
        state = None if self.optimizer is None else self.optimizer.state_dict()
        if state is not None and self._shares_q():
            state["fishleg"] = {**state["fishleg"], "inverse": None, "auxiliary": None}
        place = {"step": self.step, "pace": self.pace.state_dict()}
        return {**place, "optimizer": state, "teacher": self.criterion.teacher_fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, after the model and the surgeon got back theirs.

        With distillation, make this object while the model is still the dense one: that is the teacher.

        Args:
            state: The saved state.

        Raises:
            ValueError: The teacher is another model than it was.
        """
        if state.get("teacher") != self.criterion.teacher_fingerprint():
            raise ValueError(
                "the teacher is another model than it was: with distill=True make the session from the "
                "dense model, then load the states of the model and the session"
            )
        self.step = state["step"]
        self.pace.load_state_dict(state["pace"])
        if state["optimizer"] is None:
            self.optimizer = None
            return
        self.optimizer = self._make_optimizer(learn=False)
        if self._shares_q():
            assert self.learning is not None
            q = {"inverse": self.learning.inverse.state_dict(), "auxiliary": self.learning.state_dict()}
            state = {"optimizer": {**state["optimizer"], "fishleg": {**state["optimizer"]["fishleg"], **q}}}
        self.optimizer.load_state_dict(state["optimizer"])

    def _shares_q(self) -> bool:
        learning = self.surgeon.curvature.learning
        return isinstance(self.optimizer, FishLeg) and self.optimizer.auxiliary is learning
