"""What happens in a run, as a stream of small records: to files always, to trackers where asked for.

An event is a flat mapping with "event" and "time" (seconds of work since the start, over all restarts).
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

from fishleg.runs.directory import LOG
from fishleg.runs.errors import ToolError

Event = dict[str, Any]
COLUMNS = (
    "time", "event", "stage", "step", "target", "sparsity", "loss", "metric", "predicted", "measured",
    "gauge", "lr", "phase",
)  # fmt: skip


class Listener(Protocol):
    """Anything that wants to know; see `FileLog`, `TensorBoard`, `WeightsAndBiases` and the display."""

    def event(self, event: Event) -> None:
        """Take note of one event."""

    def close(self) -> None:
        """There will be no more."""


class FileLog:
    """log.jsonl and log.csv in the run's directory.

    A resumed run cuts off what was written after its checkpoint (`rewind`) and so logs nothing twice.
    """

    def __init__(self, directory: Path) -> None:
        self.paths = directory / LOG, directory / "log.csv"
        self.files = [open(path, "ab") for path in self.paths]  # noqa: SIM115
        if self.files[1].tell() == 0:
            self._write(1, ",".join(COLUMNS) + "\n")

    def event(self, event: Event) -> None:
        """Append to both files."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in event.items()}
        self._write(0, json.dumps(finite) + "\n")
        row = io.StringIO()
        csv.writer(row, lineterminator="\n").writerow([finite.get(column, "") for column in COLUMNS])
        self._write(1, row.getvalue())

    def _write(self, which: int, text: str) -> None:
        try:
            self.files[which].write(text.encode())
            self.files[which].flush()
        except OSError as error:
            raise ToolError(f"cannot write {self.paths[which]}: {error.strerror or error}") from error

    def place(self) -> list[int]:
        """Bytes written so far."""
        return [file.tell() for file in self.files]

    def rewind(self, place: list[int]) -> None:
        """Forget what was written after `place`."""
        for path, file, size in zip(self.paths, self.files, place, strict=True):
            file.flush()
            if path.stat().st_size > size:
                os.truncate(path, size)
            file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Close both files."""
        for file in self.files:
            file.close()


def check_trackers(tensorboard: bool, wandb: str | None) -> None:
    """Say so before a run begins if what it should log to is not installed."""
    if tensorboard and find_spec("tensorboard") is None:
        raise ToolError("tensorboard = true needs TensorBoard: pip install tensorboard")
    if wandb is not None and find_spec("wandb") is None:
        raise ToolError(f"wandb = {wandb!r} needs Weights & Biases: pip install wandb")


class TensorBoard:
    """Scalars for TensorBoard, where it is installed."""

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ToolError("tensorboard = true needs TensorBoard: pip install tensorboard") from None
        self.writer = SummaryWriter(str(directory / "tensorboard"))
        self.count = 0

    def event(self, event: Event) -> None:
        """Every number of the event, under event/name."""
        self.count += 1
        for name, value in scalars(event).items():
            self.writer.add_scalar(f"{event['event']}/{name}", value, self.count)

    def close(self) -> None:
        """Flush."""
        self.writer.close()


class WeightsAndBiases:
    """The same for Weights & Biases."""

    def __init__(self, project: str, directory: Path, recipe: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise ToolError("wandb = PROJECT needs Weights & Biases: pip install wandb") from None
        self.run = wandb.init(project=project, dir=str(directory), config=recipe, resume="allow")

    def event(self, event: Event) -> None:
        """Every number of the event, under event/name."""
        self.run.log({f"{event['event']}/{name}": value for name, value in scalars(event).items()})

    def close(self) -> None:
        """Tell the server that the run is over."""
        self.run.finish()


def scalars(event: Event) -> dict[str, float]:
    """The numbers in an event."""
    return {k: v for k, v in event.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def read_events(path: Path) -> list[Event]:
    """The events of a log.jsonl; a line that was cut off by a crash is left out."""
    events = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events
