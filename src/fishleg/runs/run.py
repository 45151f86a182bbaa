"""One pruning run from recipe to report, which can be killed at any moment and go on bit for bit.

What a run writes into its directory:
  recipe.toml  run.json  log.jsonl  log.csv  dense.ckpt  checkpoints/  model.safetensors  packed.safetensors
  report.html
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fishleg.formats import checkpoint
from fishleg.inverse.auxiliary import AuxiliaryStats
from fishleg.pruning.gradual import Gradual
from fishleg.pruning.masks import apply_masks
from fishleg.pruning.tuning import FineTuningOptions
from fishleg.runs.budgets import (
    Plan,
    check_reachable,
    count_macs,
    kept_macs,
    macs_budget,
    make_plan,
    sparsity_for_macs,
)
from fishleg.runs.describe import compare_speed, describe_layers, describe_run, overlooked
from fishleg.runs.directory import (
    CHECKPOINTS,
    DENSE,
    LOCK,
    RECIPE,
    RUN,
    SMALL,
    check_unused,
    locked,
    read_record,
)
from fishleg.runs.errors import Interrupted, ToolError
from fishleg.runs.events import Listener, check_trackers
from fishleg.runs.log import RunLog
from fishleg.runs.metrics import Evaluation
from fishleg.runs.outputs import write_models, write_report, write_small
from fishleg.runs.recipe import Recipe, load_recipe, make_recipe
from fishleg.runs.setup import Prepared, prepare
from fishleg.runs.signals import StopRequest, capture_warnings
from fishleg.runs.sources import Data
from fishleg.runtime.random_state import random_state, seeded, set_random_state
from fishleg.runtime.replay import Replayable

logger = logging.getLogger(__name__)
_Q_EVENTS_EVERY = 4


def start(
    recipe: Recipe,
    *,
    model: nn.Module | None = None,
    data: Data | None = None,
    base: Path | None = None,
    listeners: Sequence[Listener] = (),
    command: str = "",
) -> Run:
    """A new run in the recipe's `out`; everything is checked, and nothing written yet.

    A model and loaders that you have in hand take the place of those that the recipe names; the model is
    changed in place.
    """
    base = base or Path.cwd()
    directory = (base / recipe.out).resolve()
    check_unused(directory)
    prepared = prepare(recipe, base, model=model, data=data)
    return Run(prepared, directory, listeners=listeners, command=command)


def resume(
    directory: Path,
    *,
    model: nn.Module | None = None,
    data: Data | None = None,
    listeners: Sequence[Listener] = (),
) -> Run:
    """Go on with the run in a directory, from its last good checkpoint.

    A run that was started with a model and loaders in hand needs them again; the weights do not matter.
    """
    directory = Path(directory).resolve()
    record = read_record(directory)
    if record.get("status") == "finished":
        raise ToolError(f"the run in {directory} is finished: there is nothing to resume")
    if not isinstance(record.get("base"), str) or not isinstance(record.get("warnings"), list):
        raise ToolError(f"{directory / RUN} holds no record of a run")
    recipe = make_recipe(load_recipe(directory / RECIPE))
    try:
        dense = checkpoint.load(directory / DENSE)
    except checkpoint.CheckpointError as error:
        again = f"fishleg prune --recipe {directory / RECIPE} --out ANOTHER"
        raise ToolError(f"{error}. Nothing can go on without it; to start again: {again}") from None
    prepared = prepare(recipe, Path(record["base"]), model=model, data=data, dense=dense)
    if record.get("threads") not in (None, torch.get_num_threads()):
        logger.warning(
            "the run began with %s CPU threads and goes on with %s: results may differ in the last bits "
            "(set OMP_NUM_THREADS to go on as before)",
            record["threads"], torch.get_num_threads(),
        )  # fmt: skip
    return Run(prepared, directory, listeners=listeners, record=record)


class Run:
    """A run in the making. `execute` does the work; build it with `start` or `resume`."""

    def __init__(
        self,
        prepared: Prepared,
        directory: Path,
        *,
        listeners: Sequence[Listener] = (),
        record: dict[str, Any] | None = None,
        command: str = "",
    ) -> None:
        self.recipe, self.base, self.directory = prepared.recipe, prepared.base, directory
        self.model, self.surgeon, self.evaluator = prepared.model, prepared.surgeon, prepared.evaluator
        self.calibration, self.dense = prepared.calibration, prepared.dense
        self._batch, self._forward = prepared.first_batch, prepared.forward
        recipe, data = prepared.recipe, prepared.data
        self.fresh = record is None
        self.record: dict[str, Any] = record or {"warnings": [], "resumed": 0, "command": command}
        self.run_log = RunLog(directory, self.record, listeners)
        self.store = checkpoint.Store(directory / CHECKPOINTS, recipe.keep)
        self.accepted: Path | None = None  # the checkpoint to go back to in a search
        self.stop = StopRequest()
        self._saved_at = time.monotonic()
        self._phase, self._q_seen = "estimate", 0

        check_trackers(recipe.tensorboard, recipe.wandb)
        # read before anything is changed: it is an error if none of the checkpoints can be
        self._found = self.store.latest() if "dense" in self.record else None
        self._dense: Evaluation | None = None
        self.surgeon.on_q = self._on_q
        self.macs = count_macs(self.model, self._batch, self._forward)
        self.gradual: Gradual | None = None
        self.training: Replayable | None = None
        if recipe.mode == "gradual":
            train = data.train if data.train is not None else data.calibration
            self.training = Replayable(train, recipe.seed + 1)
            tuning = {f.name: getattr(recipe, f.name) for f in fields(FineTuningOptions)}
            self.gradual = Gradual(self.surgeon, self.training, FineTuningOptions(**tuning))
            self.gradual.restart_data()
            self.training.load_state_dict({"passes": 0, "place": 0, "last": None})
        self.surgeon.output_change.choose()
        self.calibration.passes = 1  # what was looked at so far does not count
        self.plan: Plan | None = None
        if recipe.max_flops is None:
            self.plan = make_plan(recipe, self.surgeon, self.macs, self.evaluator.name)
            if self.plan.max_drop is None:
                check_reachable(self.surgeon, self.plan.targets[-1])
                if self.fresh:
                    self.surgeon.check_removes(self.plan.targets[-1])
        elif self.fresh:
            macs_budget(self.surgeon, self.macs, recipe.max_flops)

    def listen(self, listener: Listener) -> None:
        """One more that is told what happens."""
        self.run_log.listeners.append(listener)

    # -- the run itself

    def execute(self) -> dict[str, Any]:
        """Do it all, or what is left of it; returns the record that is in run.json."""
        try:
            if self.fresh:  # before anything is written: data or a metric may be at fault
                with capture_warnings(self.run_log.warn):
                    self._dense = self._evaluate_dense()
            self.run_log.open(self.recipe)
            with locked(self.directory / LOCK):  # a run that another process works on is not touched
                self._work()
        finally:
            self.run_log.close()
        return self.record

    def _work(self) -> None:
        try:
            with self.stop.heard(), capture_warnings(self.run_log.warn), seeded(self.recipe.seed):
                if self.fresh:
                    self._begin()
                else:
                    self._go_on()
                self._loop()
                self._finish()
        except (Interrupted, KeyboardInterrupt):
            self.run_log.status("interrupted")
            raise Interrupted(self._how_to_go_on()) from None
        except Exception as error:
            self.run_log.status("failed", f"{type(error).__name__}: {error}")
            raise

    def _begin(self) -> None:
        checkpoint.save(self.directory / DENSE, self.model.state_dict())
        checkpoint.write_atomically(self.directory / RECIPE, self.recipe.to_toml().encode())
        self.record |= {
            "name": self.recipe.model, "base": str(self.base), "threads": torch.get_num_threads(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }  # fmt: skip
        self.run_log.status("running")
        dense = self._dense or self._evaluate_dense()
        self.record |= describe_run(self.recipe, self.surgeon, self.evaluator, self.macs, dense)
        self.run_log.status("running")
        if self.plan is None:
            with self.run_log.timed("estimate"):
                self.plan = make_plan(self.recipe, self.surgeon, self.macs)
        self.run_log.emit(
            "start", metric=dense.metric, loss=dense.loss, prunable=self.record["prunable"],
            stages=self.plan.stages,
        )  # fmt: skip
        for message in overlooked(self.recipe, self.surgeon, self.evaluator, self.macs, dense):
            self.run_log.warn(message)
        self._save()
        self.accepted = self.store.paths()[-1]

    def _go_on(self) -> None:
        if "dense" not in self.record:  # killed before anything was measured
            self._begin()
            return
        found, self._found = self._found, None
        if found is None:
            self._begin()
            return
        path, state = found
        self._load(state)
        if not self.pruned:
            self.accepted = path
        self.record["resumed"] = self.record.get("resumed", 0) + 1
        self.run_log.load_state_dict(state["ledger"])
        self.run_log.status("running")
        assert self.plan is not None
        fraction = self.plan.fraction
        self.run_log.emit("resume", sparsity=self.surgeon.sparsity, checkpoint=path.name, fraction=fraction)

    def _loop(self) -> None:
        """Stage after stage. `pruned` says that the present stage is past its pruning."""
        assert self.plan is not None
        while True:
            if not self.pruned:
                target = self.plan.next(self._predicted)
                if target is None and self._over_flops():
                    continue
                if target is None:
                    return
                self._prune(target)
            self._train()
            self._judge()

    @property
    def pruned(self) -> bool:
        """Whether the surgeon is a stage ahead of the plan."""
        assert self.plan is not None
        history = self.surgeon.history
        return bool(history) and history[-1].target > self.plan.good

    def _predicted(self, sparsity: float) -> float:
        inverse = self.surgeon.inverse or self.surgeon.estimate()
        return sum(self.surgeon.predict(inverse, self.surgeon.select(inverse, sparsity)).values())

    def _prune(self, target: float) -> None:
        assert self.plan is not None
        surgeon = self.surgeon
        self._phase = "estimate" if surgeon.inverse is None or surgeon.learning is None else "refine"
        with self.run_log.timed("estimate"):
            if self.gradual is not None:
                inverse = self.gradual.look()
            elif surgeon.inverse is None:
                inverse = surgeon.estimate()
            elif not surgeon.history and surgeon.learning is not None:
                inverse = surgeon.inverse
            else:
                inverse = surgeon.refine()
        with self.run_log.timed("prune"):
            worker = surgeon if self.gradual is None else self.gradual
            step = worker.prune(target, inverse=inverse)
        after = self._evaluate() if self.gradual is not None else Evaluation(float("nan"), None)
        metric = None if self.gradual is None else after.metric
        # with Q = I the quadratic model speaks of weights, not of the loss
        predicted = None if self.recipe.method == "magnitude" else step.predicted
        self.run_log.emit(
            "prune", stage=self.plan.done + 1, stages=self.plan.stages, target=target, sparsity=step.sparsity,
            predicted=predicted, measured=step.measured, metric=metric, loss=after.loss,
        )  # fmt: skip
        self._save()

    def _train(self) -> None:
        if self.gradual is None:
            return
        assert self.plan is not None
        self._phase = "train"
        before = time.monotonic()
        for loss in self.gradual.train():
            assert self.gradual.optimizer is not None
            self.run_log.emit(
                "train", stage=self.plan.done + 1, stages=self.plan.stages, step=self.gradual.step,
                steps=self.gradual.steps, loss=loss, lr=self.gradual.optimizer.param_groups[0]["lr"],
            )  # fmt: skip
            self.run_log.timing["train"] += time.monotonic() - before
            due = time.monotonic() - self._saved_at > 60 * self.recipe.checkpoint_minutes
            if (due or self.stop.asked) and self.gradual.step < self.gradual.steps:
                self._save()
                self._stop_if_asked()
            before = time.monotonic()

    def _judge(self) -> None:
        """Measure the stage and accept it, or go back."""
        assert self.plan is not None
        step, result = self.surgeon.history[-1], self._evaluate()
        drop = self.evaluator.drop(self.record["dense"]["metric"], result.metric)
        common = {"sparsity": step.sparsity, "metric": result.metric, "loss": result.loss}
        stage, stages = self.plan.done + 1, self.plan.stages
        if self.plan.result(step.target, drop):
            self.run_log.emit("stage", stage=stage, stages=stages, **common)
            self.record["sparse"] = {"metric": result.metric, "loss": result.loss}
            self.accepted = self._save()
        else:
            self.run_log.emit("rollback", reason=f"the {self.evaluator.name} drops by {drop:.4g}", **common)
            self._roll_back()
        self._stop_if_asked()

    def _roll_back(self) -> None:
        """Weights, masks, Q and optimizer of the last accepted stage; the plan keeps what it has learned."""
        assert self.accepted is not None
        assert self.plan is not None
        learned, accepted = self.plan.state_dict(), self.accepted
        self._load(checkpoint.load(accepted))
        self.accepted = accepted
        self.plan.load_state_dict(learned)
        self._save()

    def _over_flops(self) -> bool:
        """A budget of multiply-adds may want a last, small stage: scores change while pruning."""
        if self.recipe.max_flops is None or self.plan is None:
            return False
        enough = sparsity_for_macs(self.surgeon, self.macs, self.recipe.max_flops)
        if enough <= self.surgeon.sparsity:
            return False
        self.plan.targets.append(enough)
        return True

    def _finish(self) -> None:
        assert self.plan is not None
        if not self.surgeon.masks:
            raise ToolError(
                f"nothing was pruned: even a sparsity of {self.plan.bad or 0:.1%} costs more than "
                f"max_drop = {self.recipe.max_drop}"
            )
        apply_masks(self.model, self.surgeon.masks)
        state = {name: value.detach().cpu().contiguous() for name, value in self.model.state_dict().items()}
        facts = {"sparsity": f"{self.surgeon.sparsity:.6f}", "recipe": self.recipe.to_toml()}
        masks = self.surgeon.masks
        self.record |= {
            **write_models(self.directory, state, facts),
            "sparsity": self.surgeon.sparsity, "target": self.plan.good,
            "nonzero": sum(int((p != 0).sum()) for p in self.model.parameters()),
            "macs_sparse": kept_macs(self.macs, masks),
        }  # fmt: skip
        runs_as = self.model
        if self.surgeon.pattern.whole_rows:
            try:
                runs_as, cut = write_small(self.directory, self.model, self._batch, self._forward, facts)
                self.record |= cut
            except (ValueError, RuntimeError) as error:
                self.run_log.warn(f"no {SMALL}, removed rows stay in the model as zeros: {error}")
        self.record["speed"] = compare_speed(self.dense, runs_as, self._batch, self._forward)
        self.record["layers"] = describe_layers(self.surgeon, self.macs)
        write_report(
            self.directory, {**self.record, **self.run_log.summary("finished")}, self.recipe.to_toml()
        )
        self.run_log.status("finished")  # last of all: killed before this, the run is resumed and ends again
        for path in self.store.paths()[:-1]:
            path.unlink()
        dense, sparse = self.record["dense"]["metric"], self.record["sparse"]["metric"]
        shown = self.evaluator.shown
        self.run_log.emit(
            "finish",
            message=f"done: {self.evaluator.name} {shown(dense)} -> {shown(sparse)} at sparsity "
            f"{self.record['sparsity']:.2%}; packed file {self.record['bytes_sparse']:,} of "
            f"{self.record['bytes_plain']:,} bytes{self._told_of_small()}",
        )

    def _told_of_small(self) -> str:
        if "bytes_small" not in self.record:
            return ""
        speed = self.record["speed"]
        return (
            f"; {SMALL}, without the removed rows, {self.record['bytes_small']:,} bytes and "
            f"{speed['dense_ms'] / speed['sparse_ms']:.2f} times as fast"
        )

    # -- saving and loading

    def _state(self) -> dict[str, Any]:
        assert self.plan is not None
        return {
            "model": self.model.state_dict(),
            "surgeon": self.surgeon.state_dict(),
            "gradual": None if self.gradual is None else self.gradual.state_dict(),
            "plan": self.plan.state_dict(),
            "calibration": self.calibration.state_dict(),
            "training": None if self.training is None else self.training.state_dict(),
            "random": random_state(),
            "ledger": self.run_log.state_dict(),
            "accepted": None if self.accepted is None else self.accepted.name,
            "sparse": self.record.get("sparse"),
        }

    def _save(self) -> Path:
        """A checkpoint; the accepted one survives the clearing of old ones."""
        with self.run_log.timed("checkpoint"):
            path = self.store.save(self._state(), protect=self.accepted)
        self._saved_at = time.monotonic()
        self.run_log.emit("checkpoint", name=path.name)
        return path

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.surgeon.load_state_dict(state["surgeon"])
        if self.gradual is not None and self.training is not None:
            self.gradual.load_state_dict(state["gradual"])
            self.training.load_state_dict(state["training"])
            self.gradual.restart_data()
        if self.plan is None:
            self.plan = Plan([])
        self.plan.load_state_dict(state["plan"])
        self.calibration.passes = state["calibration"]["passes"]
        if state["accepted"] is not None:
            self.accepted = self.store.directory / state["accepted"]
        if state["sparse"] is not None:
            self.record["sparse"] = state["sparse"]
        set_random_state(state["random"])

    # -- what the outside sees

    def _evaluate(self) -> Evaluation:
        with self.run_log.timed("evaluate"):
            return self.evaluator(self.model)

    def _evaluate_dense(self) -> Evaluation:
        """Of the same random numbers, wherever it happens."""
        with seeded(self.recipe.seed):
            return self._evaluate()

    def _on_q(self, stats: AuxiliaryStats) -> None:
        if self.stop.asked:
            raise Interrupted("stopped")
        self._q_seen += 1
        if self._q_seen % _Q_EVENTS_EVERY == 1:
            self.run_log.emit(
                "q", step=stats.step, loss=stats.loss, gauge=stats.gauge_smoothed, phase=self._phase
            )

    def _stop_if_asked(self) -> None:
        if self.stop.asked:
            raise Interrupted("stopped")

    def _how_to_go_on(self) -> str:
        paths = self.store.paths()
        saved = f"; everything up to {paths[-1].name} is saved" if paths else ""
        return f"interrupted{saved}. To go on: fishleg resume {self.directory}"
