"""Events of a run, and the listeners that log them: files, TensorBoard, Weights & Biases.

An event is a flat dictionary. "event" is its kind, and "time" the seconds of work since the start of the
run, over all restarts.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from fishleg.formats.files import NO_FOLLOW
from fishleg.runs.directory import LOG, LOG_TABLE, TENSORBOARD
from fishleg.runs.errors import ToolError

Event = dict[str, Any]
_COLUMNS = (
    "time", "event", "stage", "step", "target", "sparsity", "loss", "metric", "predicted", "measured",
    "gauge", "lr", "phase", "auxiliary_loss",
)  # fmt: skip
_FOR_DISPLAYS = ("phase", "progress")  # they say what happens right now; nobody asks for it later


class Listener(Protocol):
    """Receives the events of a run, such as `FileLog`, `TensorBoard`, `WeightsAndBiases` or a display."""

    def event(self, event: Event) -> None:
        """Receive an event.

        Args:
            event: The event.
        """

    def close(self) -> None:
        """Release resources: no further event will come."""


class FileLog:
    """Writes log.jsonl and log.csv.

    A resumed run first removes what was written after its checkpoint (`rewind`), so that nothing is logged
    twice. Symbolic links are not followed.

    Args:
        directory: The directory of the run.
        new: Whether the files must not exist yet.
    """

    def __init__(self, directory: Path, *, new: bool = False) -> None:
        self.paths = directory / LOG, directory / LOG_TABLE
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | NO_FOLLOW | (os.O_EXCL if new else 0)
        self.files = [os.fdopen(os.open(path, flags, 0o666), "ab") for path in self.paths]
        if self.files[1].tell() == 0:
            self._write(1, ",".join(_COLUMNS) + "\n")

    def event(self, event: Event) -> None:
        """Append an event to both files; events that are meant for displays alone are left out."""
        if event["event"] in _FOR_DISPLAYS:
            return
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in event.items()}
        self._write(0, json.dumps(finite) + "\n")
        row = io.StringIO()
        csv.writer(row, lineterminator="\n").writerow([finite.get(column, "") for column in _COLUMNS])
        self._write(1, row.getvalue())

    def _write(self, which: int, text: str) -> None:
        try:
            self.files[which].write(text.encode())
            self.files[which].flush()
        except OSError as error:
            raise ToolError(f"cannot write {self.paths[which]}: {error.strerror or error}") from error

    def position(self) -> list[int]:
        """Return the number of bytes in each file."""
        return [file.tell() for file in self.files]

    def rewind(self, position: list[int]) -> None:
        """Remove what was written after a position.

        Args:
            position: What `position` returned.
        """
        for file, size in zip(self.files, position, strict=True):
            file.flush()
            if os.fstat(file.fileno()).st_size > size:
                os.ftruncate(file.fileno(), size)
            file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Close both files."""
        for file in self.files:
            file.close()


def check_trackers(tensorboard: bool, wandb: str | None) -> None:
    """Check that the packages that the run should log to are installed.

    Args:
        tensorboard: Whether the run logs to TensorBoard.
        wandb: The Weights & Biases project that it logs to; None: it does not.

    Raises:
        ToolError: A package is missing.
    """
    if tensorboard and find_spec("tensorboard") is None:
        raise ToolError("tensorboard = true needs TensorBoard: pip install tensorboard")
    if wandb is not None and find_spec("wandb") is None:
        raise ToolError(f"wandb = {wandb!r} needs Weights & Biases: pip install wandb")


class TensorBoard:
    """Logs the numbers of each event to TensorBoard.

    Args:
        directory: The directory of the run.

    Raises:
        ToolError: TensorBoard is not installed.
    """

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ToolError("tensorboard = true needs TensorBoard: pip install tensorboard") from None
        self.writer = SummaryWriter(str(directory / TENSORBOARD))
        self.count = 0

    def event(self, event: Event) -> None:
        """Log every number of the event under the name event/name."""
        scalars = _scalars(event)
        self.count += bool(scalars)
        for name, value in scalars.items():
            self.writer.add_scalar(f"{event['event']}/{name}", value, self.count)

    def close(self) -> None:
        """Write what is buffered and close the file."""
        self.writer.close()


class WeightsAndBiases:
    """Logs the numbers of each event to Weights & Biases.

    Args:
        project: The name of the project.
        directory: The directory of the run.
        recipe: All options of the run.

    Raises:
        ToolError: Weights & Biases is not installed.
    """

    def __init__(self, project: str, directory: Path, recipe: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise ToolError("wandb = PROJECT needs Weights & Biases: pip install wandb") from None
        self.run = wandb.init(project=project, dir=str(directory), config=recipe, resume="allow")

    def event(self, event: Event) -> None:
        """Log every number of the event under the name event/name."""
        if scalars := _scalars(event):
            self.run.log({f"{event['event']}/{name}": value for name, value in scalars.items()})

    def close(self) -> None:
        """Mark the run as finished on the server."""
        self.run.finish()


def _scalars(event: Event) -> dict[str, float]:
    """Return the numbers in an event; none of an event that is meant for displays alone."""
    if event["event"] in _FOR_DISPLAYS:
        return {}
    return {k: v for k, v in event.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def read_events(path: Path) -> list[Event]:
    """Return the events of a log. A line that a crash has cut off is left out.

    Args:
        path: The file log.jsonl; it may be missing.

    Returns:
        The events in order.
    """
    events = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events
