"""What the outside sees of a run: events as they happen, warnings, times, and the record in run.json."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fishleg.formats import checkpoint
from fishleg.runs.directory import CHECKPOINTS, RUN
from fishleg.runs.errors import ToolError
from fishleg.runs.events import Event, FileLog, Listener, TensorBoard, WeightsAndBiases
from fishleg.runs.recipe import Recipe

TIMED = ("estimate", "prune", "train", "evaluate", "checkpoint")


class RunLog:
    """Keeps `record`, tells every listener, and counts seconds of work over all restarts."""

    def __init__(self, directory: Path, record: dict[str, Any], listeners: Sequence[Listener] = ()) -> None:
        self.directory, self.record = directory, record
        self.listeners = list(listeners)
        self.log: FileLog | None = None
        self.timing = dict.fromkeys(TIMED, 0.0)
        self._seconds, self._since = 0.0, time.monotonic()

    def open(self, recipe: Recipe) -> None:
        """Make the directory and the logs in it; listeners that were there before come after those."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / CHECKPOINTS).mkdir(exist_ok=True)
            trackers: list[Listener] = []
            if recipe.run.tensorboard:
                trackers.append(TensorBoard(self.directory))
            if recipe.run.wandb is not None:
                trackers.append(WeightsAndBiases(recipe.run.wandb, self.directory, recipe.sections()))
            self.log = FileLog(self.directory)
        except OSError as error:
            raise ToolError(f"out: cannot write to {self.directory}: {error.strerror or error}") from None
        self.listeners = [self.log, *trackers, *self.listeners]

    def close(self) -> None:
        """There will be no more events."""
        for listener in self.listeners:
            listener.close()

    def emit(self, kind: str, **values: Any) -> None:
        """Tell every listener."""
        event: Event = {"event": kind, "time": round(self.elapsed(), 3), **values}
        for listener in self.listeners:
            listener.event(event)

    def warn(self, message: str) -> None:
        """Something that the user must know: on the display, in the log and in the report; once."""
        if message not in self.record["warnings"]:
            self.record["warnings"].append(message)
            self.emit("warning", message=f"warning: {message}")

    def status(self, status: str, error: str | None = None) -> None:
        """Write run.json."""
        self.record |= self.summary(status, error)
        ending = status in ("failed", "interrupted")  # then the reason matters more than a full disk
        with contextlib.suppress(OSError) if ending else contextlib.nullcontext():
            checkpoint.write_json(self.directory / RUN, self.record)

    def summary(self, status: str, error: str | None = None) -> dict[str, Any]:
        """The part of the record that every writing renews."""
        timing = {name: round(value, 2) for name, value in self.timing.items()}
        return {"status": status, "error": error, "seconds": round(self.elapsed(), 1), "timing": timing}

    def elapsed(self) -> float:
        """Seconds of work since the start."""
        return self._seconds + time.monotonic() - self._since

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Count the seconds inside under a name."""
        before = time.monotonic()
        try:
            yield
        finally:
            self.timing[what] += time.monotonic() - before

    def state_dict(self) -> dict[str, Any]:
        """Times, and how far the logs are."""
        assert self.log is not None
        return {"timing": dict(self.timing), "seconds": self.elapsed(), "log": self.log.place()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to there: what was logged afterwards is cut off."""
        assert self.log is not None
        self.timing = dict(state["timing"])
        self._seconds, self._since = state["seconds"], time.monotonic()
        self.log.rewind(state["log"])
