"""The log of a run: its events, warnings and times, and the record in run.json."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fishleg.formats.files import remove_leftovers
from fishleg.formats.results import write_json
from fishleg.runs.directory import CHECKPOINTS, FILES, RUN
from fishleg.runs.errors import ToolError
from fishleg.runs.events import Event, FileLog, Listener, TensorBoard, WeightsAndBiases
from fishleg.runs.recipe import Recipe

TIMED = ("estimate", "prune", "train", "evaluate", "checkpoint")


class RunLog:
    """Passes events to listeners, keeps the record, and counts seconds of work over all restarts.

    Args:
        directory: The directory of the run.
        record: The content of run.json; it is updated in place.
        listeners: Objects that receive every event.

    Attributes:
        log: The log files; None before `open`.
        timing: Seconds by kind of work.
    """

    def __init__(self, directory: Path, record: dict[str, Any], listeners: Sequence[Listener] = ()) -> None:
        self.directory, self.record = directory, record
        self.listeners = list(listeners)
        self.displays = list(listeners)
        self.log: FileLog | None = None
        self._owns_record = False  # only then may run.json be replaced
        self.timing = dict.fromkeys(TIMED, 0.0)
        self._seconds, self._since = 0.0, time.monotonic()

    def open(self, recipe: Recipe, *, new: bool) -> None:
        """Write the record of a new run, and open the logs. They receive each event before other listeners.

        The record is written first of all: from then on, the names of a run's files are the run's own.

        Args:
            recipe: All options of the run.
            new: Whether the run is new. Nothing is replaced then.

        Raises:
            ToolError: The directory cannot be written to, or a tracker is not installed.
        """
        try:
            if new:
                self.record |= self.summary("starting")
                write_json(self.directory / RUN, self.record, new=True)
            else:
                remove_leftovers(self.directory / name for name in FILES)
            self._owns_record = True
            (self.directory / CHECKPOINTS).mkdir(exist_ok=not new)
            trackers: list[Listener] = []
            if recipe.run.tensorboard:
                trackers.append(TensorBoard(self.directory))
            if recipe.run.wandb is not None:
                trackers.append(WeightsAndBiases(recipe.run.wandb, self.directory, recipe.sections()))
            self.log = FileLog(self.directory, new=new)
        except OSError as error:
            raise ToolError(f"out: cannot write to {self.directory}: {error.strerror or error}") from None
        self.listeners = [self.log, *trackers, *self.listeners]

    def close(self) -> None:
        """Close every listener."""
        for listener in self.listeners:
            listener.close()

    def listen(self, listener: Listener) -> None:
        """Add a listener.

        Args:
            listener: An object that receives every event.
        """
        self.listeners.append(listener)
        self.displays.append(listener)

    def show(self, kind: str, **values: Any) -> None:
        """Send what is not worth a line in the log files to the displays alone.

        Args:
            kind: The kind of the event: "phase" or "progress".
            values: Its other entries.
        """
        for listener in self.displays:
            listener.event({"event": kind, "time": round(self.elapsed(), 3), **values})

    def emit(self, kind: str, **values: Any) -> None:
        """Send an event to every listener.

        Args:
            kind: The kind of the event.
            values: Its other entries.
        """
        event: Event = {"event": kind, "time": round(self.elapsed(), 3), **values}
        for listener in self.listeners:
            listener.event(event)

    def warn(self, message: str) -> None:
        """Show a warning on the display, in the log and in the report; each text only once.

        Args:
            message: The text.
        """
        if message not in self.record["warnings"]:
            self.record["warnings"].append(message)
            self.emit("warning", message=f"warning: {message}")

    def status(self, status: str, error: str | None = None) -> None:
        """Write run.json.

        Args:
            status: "running", "finished", "interrupted" or "failed".
            error: The error that ended the run.
        """
        self.record |= self.summary(status, error)
        if not self._owns_record:
            return
        ending = status in ("failed", "interrupted")  # a full disk must not hide the error that ends the run
        with contextlib.suppress(OSError) if ending else contextlib.nullcontext():
            write_json(self.directory / RUN, self.record)

    def summary(self, status: str, error: str | None = None) -> dict[str, Any]:
        """Return the entries of the record that change with every write.

        Args:
            status: The status of the run.
            error: The error that ended the run.

        Returns:
            Status, error, seconds of work, and seconds by kind of work.
        """
        timing = {name: round(value, 2) for name, value in self.timing.items()}
        return {"status": status, "error": error, "seconds": round(self.elapsed(), 1), "timing": timing}

    def elapsed(self) -> float:
        """Return the seconds of work since the start of the run, over all restarts."""
        return self._seconds + time.monotonic() - self._since

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the seconds spent inside the `with` block to `timing`.

        Args:
            what: The kind of work.

        Yields:
            Nothing.
        """
        before = time.monotonic()
        try:
            yield
        finally:
            self.timing[what] += time.monotonic() - before

    def state_dict(self) -> dict[str, Any]:
        """Return the times, and the position in the log files."""
        assert self.log is not None
        return {"timing": dict(self.timing), "seconds": self.elapsed(), "log": self.log.position()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, and remove what was logged after it.

        Args:
            state: The saved state.
        """
        assert self.log is not None
        self.timing = dict(state["timing"])
        self._seconds, self._since = state["seconds"], time.monotonic()
        self.log.rewind(state["log"])
