"""The one driver: prune in stages, with or without training in between, as a resumable stream of events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.curvature.likelihoods import Likelihood
from fishleg.inverse.auxiliary import AuxiliaryStats
from fishleg.options import FineTuningOptions, PruningOptions
from fishleg.options.declaration import check_options
from fishleg.pruning.events import (
    Event,
    Finished,
    InverseUpdated,
    Pruned,
    StageDone,
    StageStarted,
    TrainingStep,
)
from fishleg.pruning.fine_tuning import FineTuner
from fishleg.pruning.surgeon import Surgeon
from fishleg.runtime.batches import Forward, default_forward
from fishleg.runtime.loaders import check_loader

_CUTS = 3  # per pruning step of a learned Q, where the model is fine-tuned after it


class PruningSession:
    """Prunes a model stage by stage and reports what happens as events.

    Every decision of a run is taken here or in what it owns: whether Q is estimated, refined or reused, how
    many cuts a stage has, when BatchNorm is refreshed and what is measured. `fishleg.prune`, `attach` and the
    command line only consume its events.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> session = PruningSession(model, [torch.randn(64, 8) for _ in range(4)])
    >>> [type(event).__name__ for event in session.run([0.5])]
    ['StageStarted', 'InverseUpdated', 'Pruned', 'StageDone', 'Finished']

    Args:
        model: The model; it is changed in place.
        loader: Calibration batches; inputs suffice.
        likelihood: The distribution of the outputs, or its name.
        options: How to prune; default: `PruningOptions()`.
        fine_tuning: How to train after each pruning step; None: no training.
        train_loader: Training batches; default: the calibration batches.
        forward: How the model is called on a batch.
        generator: The source of random numbers; default: seed 0.
        trained_elsewhere: Whether a training loop outside of the session trains the model between stages.
        on_auxiliary_step: Receives the statistics of every step of Q's learning.

    Attributes:
        surgeon: What prunes the model: its masks, history, sparsity and Q.
        fine_tuner: What trains it; None without fine-tuning, or before `prepare`.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        *,
        likelihood: Likelihood | str = "categorical",
        options: PruningOptions | None = None,
        fine_tuning: FineTuningOptions | None = None,
        train_loader: Iterable[Any] | None = None,
        forward: Forward = default_forward,
        generator: torch.Generator | None = None,
        trained_elsewhere: bool = False,
        on_auxiliary_step: Callable[[AuxiliaryStats], None] | None = None,
    ) -> None:
        check_options(fine_tuning, FineTuningOptions, "fine_tuning")
        if train_loader is not None and fine_tuning is None:
            raise ValueError("train_loader needs fine_tuning: without it nothing is trained")
        if train_loader is not None:
            check_loader(train_loader, "train_loader")
        self.surgeon = Surgeon(
            model, loader, likelihood=likelihood, options=options, forward=forward, generator=generator,
            trained=fine_tuning is not None or trained_elsewhere, total_at_end=True,
            on_auxiliary_step=on_auxiliary_step,
        )  # fmt: skip
        self.fine_tuning, self.train_loader = fine_tuning, train_loader
        self.fine_tuner: FineTuner | None = None
        self._dense: list[Tensor] | None = None
        self._completed = 0.0  # the target of the last stage that was done with its training

    @property
    def model(self) -> nn.Module:
        """The model that is pruned."""
        return self.surgeon.model

    def prepare(self) -> None:
        """Take the outputs of the dense model and draw the first training batches; `run` does it by itself.

        What is wrong with the data or the model raises here, before any long work.
        """
        if self._dense is None and not self.surgeon.history:
            self._dense = self.surgeon.output_change.outputs()
            self.surgeon.take_reference()
        self._make_fine_tuner()

    def _make_fine_tuner(self) -> None:
        if self.fine_tuning is not None and self.fine_tuner is None:
            self.fine_tuner = FineTuner(self.surgeon, self.train_loader, self.fine_tuning)

    def run(self, sparsities: Sequence[float]) -> Iterator[Event]:
        """Prune to each sparsity in turn; go on where a loaded state was.

        Args:
            sparsities: The sparsity after each stage, rising.

        Yields:
            What happens, as events.

        Raises:
            ValueError: The sparsities do not rise, or pattern and floor do not allow the last one.
        """
        targets = self.surgeon.check_targets(sparsities)
        self.prepare()
        try:
            for number, target in enumerate(targets):
                if target > self._completed and target >= self._reached:
                    yield from self.stage(target, number=number + 1, of=len(targets))
            yield self.finish()
        finally:
            self.close()

    @property
    def _reached(self) -> float:
        """The target of the last pruning step."""
        return self.surgeon.history[-1].target if self.surgeon.history else 0.0

    def stage(self, sparsity: float, *, number: int | None = None, of: int | None = None) -> Iterator[Event]:
        """Do one stage: bring Q up to date, prune, train. An unfinished stage goes on with its training.

        Args:
            sparsity: The sparsity after the stage.
            number: The number of the stage, for the events; default: one more than there are.
            of: How many stages there are, for the events.

        Yields:
            What happens, as events.
        """
        self._make_fine_tuner()
        history = self.surgeon.history
        going_on = bool(history) and history[-1].target == sparsity
        place: dict[str, Any] = {"stage": number or len(history) + (not going_on), "stages": of}
        if not going_on:
            yield from self._prune(self.surgeon.check_rises(sparsity), place)
        if self.fine_tuner is not None:
            for loss in self.fine_tuner.train():
                assert self.fine_tuner.optimizer is not None
                lr = self.fine_tuner.optimizer.param_groups[0]["lr"]
                step, steps = self.fine_tuner.step, self.fine_tuner.steps
                yield TrainingStep(**place, step=step, steps=steps, loss=loss, lr=lr)
        self._completed = history[-1].target
        yield StageDone(**place, step=history[-1])

    def _prune(self, sparsity: float, place: Mapping[str, Any]) -> Iterator[Event]:
        surgeon, tuner = self.surgeon, self.fine_tuner
        if tuner is not None:
            tuner.restore_modes()
        update = surgeon.curvature.next_update
        yield StageStarted(**place, target=sparsity, update=update)
        if self._dense is not None:  # the batches are drawn: an error in them raises before any long work
            surgeon.check_data()
        surgeon.update_inverse()
        yield InverseUpdated(**place, update=update)
        if tuner is not None and tuner.optimizer is None:
            tuner.start()
        step = surgeon.prune(sparsity, cuts=self._cuts)
        if tuner is not None:
            tuner.begin_stage()
        yield Pruned(**place, step=step, predicts=surgeon.predicts)

    @property
    def _cuts(self) -> int:
        """Cuts per pruning step: several where Q can be refined between them and training follows."""
        if self.surgeon.options.cuts is not None:
            return self.surgeon.options.cuts
        refines = self.surgeon.curvature.learns and self.surgeon.refine_steps != 0
        return _CUTS if self.fine_tuning is not None and refines else 1

    def finish(self) -> Finished:
        """Compare the outputs with those of the dense model; warn where the predictions were far off.

        Where the model is trained between the stages, each pruning step is judged by itself when it is done,
        and the total is left out: training changes the outputs, too.

        Returns:
            The last event of a run.
        """
        surgeon = self.surgeon
        total, number = surgeon.total_change(), len(surgeon.history)
        divergence = total.measured
        if divergence is None or total.steps < number:  # not judged, or judged from a later beginning
            divergence = surgeon.output_change.divergence_from(self._dense or [])
        predicted = total.predicted if total.steps == number else None
        return Finished(
            stage=number, stages=number, sparsity=surgeon.sparsity, unit=surgeon.weights.unit,
            divergence=divergence, predicted=predicted, verdict=total.verdict,
        )  # fmt: skip

    def close(self) -> None:
        """Put every module back into the mode that it was found in; `run` does it at its end."""
        if self.fine_tuner is not None:
            self.fine_tuner.close()

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next event depends on beside the model, the data and global random states."""
        return {
            "surgeon": self.surgeon.state_dict(),
            "fine_tuner": None if self.fine_tuner is None else self.fine_tuner.state_dict(),
            "completed": self._completed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Make the session from the dense model, call `prepare`, load the model's state, then this one.

        Args:
            state: The saved state.
        """
        self.surgeon.load_state_dict(state["surgeon"])
        self._completed = state["completed"]
        if state["fine_tuner"] is not None:
            self._make_fine_tuner()
        if self.fine_tuner is not None and state["fine_tuner"] is not None:
            self.fine_tuner.load_state_dict(state["fine_tuner"])
            # FishLeg's own Q shares the generator and has restored it, too. The surgeon's state is the right
            # one.
            self.surgeon.curvature.generator.set_state(state["surgeon"]["curvature"]["generator"])
