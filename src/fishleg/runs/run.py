"""One pruning run from recipe to report. It can be killed at any moment and resumed bit for bit.

`fishleg.runs.directory` lists what a run writes into its directory.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fishleg.formats import checkpoint
from fishleg.formats.files import write_atomically
from fishleg.inverse import AuxiliaryStats
from fishleg.pruning import Event, InverseUpdated, Pruned, StageStarted, TrainingStep
from fishleg.runs.budgets import check_reachable, macs_budget, make_plan, sparsity_for_macs
from fishleg.runs.describe import describe_run, describe_total, first_record
from fishleg.runs.directory import CHECKPOINTS, DENSE, RECIPE, claimed, read_record
from fishleg.runs.errors import Interrupted, ToolError
from fishleg.runs.events import Listener, check_trackers
from fishleg.runs.fingerprint import differences, take_fingerprint
from fishleg.runs.log import RunLog
from fishleg.runs.macs import count_macs
from fishleg.runs.measurements import Measurements
from fishleg.runs.metrics import Evaluation
from fishleg.runs.outputs import write_results
from fishleg.runs.plan import Plan
from fishleg.runs.run_state import check_history, check_state
from fishleg.runs.run_warnings import run_warnings
from fishleg.runs.setup import Prepared, make_session
from fishleg.runs.signals import StopRequest, capture_warnings
from fishleg.runs.sources import no_exit
from fishleg.runtime.batch_errors import error_text
from fishleg.runtime.random_state import get_random_state, seeded, set_random_state
from fishleg.runtime.replay import Replayable

logger = logging.getLogger(__name__)
_Q_EVENTS_EVERY = 4


class Run:
    """A run in the making; built by `start` or `resume`.

    Args:
        prepared: What the recipe names, built and checked.
        directory: Where the run writes to.
        listeners: Objects that receive every event.
        record: The record of a run that is resumed; None: a new run.
        command: The command line, for the report.
    """

    def __init__(
        self,
        prepared: Prepared,
        directory: Path,
        *,
        listeners: Sequence[Listener] = (),
        record: dict[str, Any] | None = None,
        command: str = "",
    ) -> None:
        self.recipe, self.prepared, self.directory = prepared.recipe, prepared, directory
        self.model, self.evaluator = prepared.model, prepared.evaluator
        self.calibration, options = prepared.calibration, prepared.recipe.run
        self.fresh = record is None
        self.record: dict[str, Any] = record or first_record(prepared, command)
        self._as_read = None if record is None else copy.deepcopy(record)
        self.run_log = RunLog(directory, self.record, listeners)
        self.store = checkpoint.Store(directory / CHECKPOINTS, options.keep, self.record["checkpoints"])
        self.accepted: Path | None = None  # the checkpoint to go back to in a search
        self.stop = StopRequest()
        self._saved_at = self._since = time.monotonic()
        self._phase, self._q_seen = "estimate", 0
        self._dense: tuple[Evaluation, Evaluation | None] | None = None
        check_trackers(options.tensorboard, options.wandb)
        self.training = self._training_loader()
        self._make_session()
        self.batch = prepared.draw_batch()
        self.measurements = Measurements(prepared, self.run_log)
        # read before anything is changed: it is an error if none of the checkpoints can be
        self._found = self.store.latest() if "dense" in self.record else None
        self.macs = count_macs(self.model, self.batch, prepared.forward)
        self._prepare_session()
        self.plan = self._make_first_plan()

    def _make_session(self) -> None:
        self.session = make_session(self.prepared, self.training, self._on_auxiliary_step)
        self.surgeon = self.session.surgeon

    def _training_loader(self) -> Replayable | None:
        if self.recipe.trains is None:
            return None
        data = self.prepared.data
        train = data.train if data.train is not None else data.calibration
        return Replayable(train, self.recipe.run.seed + 1, "the training loader")

    def _prepare_session(self) -> None:
        """Let the session look at its data, and set all loaders back to their beginning."""
        self.session.prepare()
        self.fingerprint = take_fingerprint(self.prepared, self.training)
        if self.session.fine_tuner is not None and self.training is not None:
            self.session.fine_tuner.restart_data()
            self.training.restart()
        self.calibration.restart(passes=1)  # what was looked at so far does not count

    def _make_first_plan(self) -> Plan | None:
        """Return the plan, or None if it needs Q. A budget that cannot be met raises an error in any case."""
        budget = self.recipe.schedule.max_flops
        if budget is not None:
            if self.fresh:
                macs_budget(self.surgeon, self.macs, budget)
            return None
        plan = make_plan(self.recipe, self.surgeon, self.macs, self.evaluator.name)
        if plan.max_drop is None:
            check_reachable(self.surgeon, plan.targets[-1])
            if self.fresh:
                self.surgeon.check_removes(plan.targets[-1])
        return plan

    def listen(self, listener: Listener) -> None:
        """Add a listener.

        Args:
            listener: An object that receives every event.
        """
        self.run_log.listen(listener)

    # -- the run itself

    def execute(self) -> dict[str, Any]:
        """Do all of the work, or what is left of it.

        Returns:
            The record that is in run.json.

        Raises:
            Interrupted: The run was asked to stop; it can be resumed.
            ToolError: The directory is in use, or something that the run needs has failed.
        """
        try:
            with no_exit(), claimed(self.directory, new=self.fresh):
                if self.fresh:  # before anything is written: data or a metric may be at fault
                    with capture_warnings(self.run_log.warn):
                        self._dense = self.measurements.dense()
                elif read_record(self.directory) != self._as_read:
                    raise ToolError(
                        f"another process has worked on {self.directory} since it was read: resume it again"
                    )
                self._work()
        finally:
            self.run_log.close()
        return self.record

    def _work(self) -> None:
        try:
            with (
                self.stop.listening(),
                capture_warnings(self.run_log.warn),
                seeded(self.recipe.run.seed),
            ):
                self.run_log.open(self.recipe, new=self.fresh)
                if self.fresh:
                    self._begin()
                else:
                    self._go_on()
                self._loop()
                self._finish()
        except (Interrupted, KeyboardInterrupt):
            self.run_log.status("interrupted")
            raise Interrupted(self._how_to_go_on()) from None
        except BaseException as error:  # user code can raise anything
            self.run_log.status("failed", f"{type(error).__name__}: {error}")
            raise

    def _begin(self) -> None:
        checkpoint.save(self.directory / DENSE, self.model.state_dict())
        write_atomically(self.directory / RECIPE, self.recipe.to_toml().encode())
        self.record["fingerprint"] = self.fingerprint
        dense, refreshed = self._dense or self.measurements.dense()  # or killed before it was written down
        self.record |= describe_run(self.recipe, self.surgeon, self.evaluator, self.macs, dense)
        if refreshed is not None:
            self.record["refreshed"] = {"metric": refreshed.metric, "loss": refreshed.loss}
        self.run_log.status("running")
        if self.plan is None:
            with self.run_log.timed("estimate"):
                self.plan = make_plan(self.recipe, self.surgeon, self.macs)
        self.run_log.emit(
            "start", metric=dense.metric, loss=dense.loss, prunable=self.record["prunable"],
            stages=self.plan.stages, **self._metric_facts(),
        )  # fmt: skip
        for message in run_warnings(self.recipe, self.surgeon, self.evaluator, self.macs, dense, refreshed):
            self.run_log.warn(message)
        self.accepted = self._save()

    def _go_on(self) -> None:
        found, self._found = self._found, None
        if "dense" not in self.record or found is None:  # killed before anything was measured
            self._begin()
            return
        path, _ = self._restore(found)
        assert self.plan is not None
        if not self._ahead_of_plan:
            self.accepted = path
        self.record["resumed"] = self.record.get("resumed", 0) + 1
        self.run_log.status("running")
        fraction = self.plan.fraction
        self.run_log.emit(
            "resume", sparsity=self.surgeon.sparsity, checkpoint=path.name, fraction=fraction,
            **self._metric_facts(),
        )  # fmt: skip
        for message in differences(self.record.get("fingerprint"), self.fingerprint):
            self.run_log.warn(message)

    def _restore(self, found: tuple[Path, Any]) -> tuple[Path, Any]:
        """Go to a checkpoint, or to the newest one before it whose content fits the run.

        Returns:
            Its path and content.

        Raises:
            CheckpointError: None of them fits.
        """
        candidate: tuple[Path, Any] | None = found
        while candidate is not None:
            path, state = candidate
            try:
                self._load(state)
                self.run_log.load_state_dict(state["run_log"])
                return candidate
            except Exception as error:  # of whatever kind: a content with a right checksum may be anything
                reason = f"{type(error).__name__}: {error_text(error)}"
                logger.warning(
                    "%s does not fit this run (%s). The checkpoint before it is used", path, reason
                )
            self.model.load_state_dict(self.prepared.dense.state_dict())
            self._make_session()
            self._prepare_session()
            self.plan = self._make_first_plan()
            candidate = self.store.latest(before=path)
        raise checkpoint.CheckpointError(f"none of the checkpoints in {self.store.directory} fits this run")

    def _metric_facts(self) -> dict[str, str]:
        return {"metric_name": self.evaluator.name, "metric_unit": self.evaluator.unit}

    def _loop(self) -> None:
        """Do all stages. A resumed stage that is pruned already continues with its training."""
        assert self.plan is not None
        while True:
            if self._ahead_of_plan:
                target: float | None = self.surgeon.history[-1].target
            else:
                target = self.plan.next(self._predicted)
                if target is None and self._over_flops():
                    continue
            if target is None:
                return
            self._since = time.monotonic()
            for event in self.session.stage(target, number=self.plan.done + 1, of=self.plan.stages):
                self._on_event(event)
            self._judge()

    @property
    def _ahead_of_plan(self) -> bool:
        """Whether the last stage is pruned and not yet judged."""
        assert self.plan is not None
        history = self.surgeon.history
        return bool(history) and history[-1].target > self.plan.good

    def _predicted(self, sparsity: float) -> float:
        """Return the loss increase that the last Q predicts for a sparsity."""
        surgeon = self.surgeon
        inverse = surgeon.curvature.latest(surgeon.masks)
        masks = surgeon.pruner.select(inverse, sparsity, surgeon.masks)
        return sum(surgeon.pruner.predict(inverse, masks).values())

    def _on_event(self, event: Event) -> None:
        """Log an event of the session, save a checkpoint if one is due, and stop if requested."""
        if isinstance(event, StageStarted):
            self._phase = event.update
        elif isinstance(event, InverseUpdated):
            self._count_seconds("estimate")
        elif isinstance(event, Pruned):
            self._count_seconds("prune")
            self._on_pruned(event)
            self._phase = "train"
        elif isinstance(event, TrainingStep):
            self._on_training_step(event)
        self._since = time.monotonic()

    def _count_seconds(self, what: str) -> None:
        self.run_log.timing[what] += time.monotonic() - self._since

    def _on_pruned(self, event: Pruned) -> None:
        step = event.step
        after = self.measurements.pruned() if self.recipe.trains is not None else None
        self.run_log.emit(
            "prune", stage=event.stage, stages=event.stages, target=step.target, sparsity=step.sparsity,
            predicted=step.predicted if event.predicts else None, measured=step.measured,
            metric=None if after is None else after.metric, loss=None if after is None else after.loss,
        )  # fmt: skip
        self._save()

    def _on_training_step(self, event: TrainingStep) -> None:
        self.run_log.emit(
            "train", stage=event.stage, stages=event.stages, step=event.step, steps=event.steps,
            loss=event.loss, lr=event.lr,
        )  # fmt: skip
        self._count_seconds("train")
        due = time.monotonic() - self._saved_at > 60 * self.recipe.run.checkpoint_minutes
        if (due or self.stop.requested) and event.step < event.steps:
            self._save()
            self._stop_if_requested()

    def _judge(self) -> None:
        """Measure the stage and accept it, or go back."""
        assert self.plan is not None
        step = self.surgeon.history[-1]
        result = self.measurements.pruned(search=self.plan.max_drop is not None)
        drop = self.measurements.drop(result)
        common = {"sparsity": step.sparsity, "metric": result.metric, "loss": result.loss}
        stage, stages = self.plan.done + 1, self.plan.stages
        if self.plan.result(step.target, drop):
            self.run_log.emit("stage", stage=stage, stages=stages, **common)
            self.record["sparse"] = {"metric": result.metric, "loss": result.loss}
            self.accepted = self._save()
        else:
            self.run_log.emit("rollback", reason=f"the {self.evaluator.name} drops by {drop:.4g}", **common)
            self._roll_back()
        self._stop_if_requested()

    def _roll_back(self) -> None:
        """Restore the last accepted stage; the plan keeps what it has learned."""
        assert self.accepted is not None
        assert self.plan is not None
        learned, accepted = self.plan.state_dict(), self.accepted
        self._load(checkpoint.load(accepted))
        self.accepted = accepted
        self.plan.load_state_dict(learned)
        self._save()

    def _over_flops(self) -> bool:
        """Return whether a budget of multiply-adds needs one more small stage: pruning changes the scores."""
        budget = self.recipe.schedule.max_flops
        if budget is None or self.plan is None:
            return False
        enough = sparsity_for_macs(self.surgeon, self.macs, budget)
        if enough <= self.surgeon.sparsity:
            return False
        self.plan.targets.append(enough)
        return True

    def _finish(self) -> None:
        assert self.plan is not None
        if not self.surgeon.masks:
            raise ToolError(
                f"nothing was pruned: even a sparsity of {self.plan.bad or 0:.1%} costs more than "
                f"max_drop = {self.recipe.schedule.max_drop}"
            )
        finished = self.session.finish()
        self.record["total"] = describe_total(self.surgeon, finished, self.recipe)
        self.record["target"] = self.plan.good
        message = write_results(self.prepared, self.surgeon, self.batch, self.macs, self.run_log)
        self.run_log.status("finished")  # last of all: killed before this, the run is resumed and ends again
        self.store.keep_last()
        self.run_log.emit("finish", message=message)

    # -- saving and loading

    def _state(self) -> dict[str, Any]:
        assert self.plan is not None
        return {
            "model": self.model.state_dict(),
            "session": self.session.state_dict(),
            "plan": self.plan.state_dict(),
            "calibration": self.calibration.state_dict(),
            "training": None if self.training is None else self.training.state_dict(),
            "random": get_random_state(),
            "run_log": self.run_log.state_dict(),
            "accepted": None if self.accepted is None else self.accepted.name,
            "sparse": self.record.get("sparse"),
        }

    def _save(self) -> Path:
        """Write a checkpoint. The accepted one is not deleted with the old ones.

        Returns:
            Its path.
        """
        self.store.check_next()
        self.record["checkpoints"] = self.store.next_number + 1
        self.run_log.status("running")  # first the claim to the name, then the file
        with self.run_log.timed("checkpoint"):
            path = self.store.save(self._state(), protect=self.accepted)
        self._saved_at = time.monotonic()
        self.run_log.emit("checkpoint", name=path.name)
        return path

    def _load(self, state: dict[str, Any]) -> None:
        check_state(state, self.recipe, self.plan)
        self.model.load_state_dict(state["model"])
        self.session.load_state_dict(state["session"])
        if self.session.fine_tuner is not None and self.training is not None:
            self.training.load_state_dict(state["training"])
            self.session.fine_tuner.restart_data()
        if self.plan is None:
            self.plan = Plan([])
        self.plan.load_state_dict(state["plan"])
        self.calibration.restart(state["calibration"]["passes"])
        if state["accepted"] is not None:
            self.accepted = self.store.directory / state["accepted"]
        if state["sparse"] is not None:
            self.record["sparse"] = state["sparse"]
        check_history(self.surgeon)
        set_random_state(state["random"])

    # -- what the outside sees

    def _on_auxiliary_step(self, stats: AuxiliaryStats) -> None:
        if self.stop.requested:
            raise Interrupted("stopped")
        self._q_seen += 1
        if self._q_seen % _Q_EVENTS_EVERY == 1:
            self.run_log.emit(
                "q", step=stats.step, auxiliary_loss=stats.loss, gauge=stats.gauge_smoothed, phase=self._phase
            )

    def _stop_if_requested(self) -> None:
        if self.stop.requested:
            raise Interrupted("stopped")

    def _how_to_go_on(self) -> str:
        paths = self.store.paths()
        saved = f"; everything up to {paths[-1].name} is saved" if paths else ""
        return f"interrupted{saved}. To go on: fishleg resume {self.directory}"
