"""The progress of a run on the terminal: a live panel, or plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from fishleg.options.text import printable
from fishleg.runs.events import Event, Listener

_LEAST_TIME_LEFT = 3.0  # seconds; less is not announced
_QUIET = 10.0  # seconds without a line after which the plain display prints a count


def make_display(
    unit: str = "", metric: str = "metric", stream: TextIO | None = None, *, live: bool | None = None
) -> Listener:
    """Make a display of the progress. It can be made before anything about the run is known.

    Args:
        unit: The unit of the metric: "%" or "". The event "start" or "resume" may set it.
        metric: The name of the metric. The event "start" or "resume" may set it.
        stream: Where to write; default: standard error.
        live: Whether to show a live panel, which needs rich; default: if the stream is a terminal.

    Returns:
        A live panel, or a display of plain lines.
    """
    stream = stream or sys.stderr
    if live is None:
        live = stream.isatty()
    if live:
        try:
            import rich  # noqa: F401

            return LiveDisplay(Progress(unit, metric), stream)
        except ImportError:
            pass
    return PlainDisplay(Progress(unit, metric), stream)


class Progress:
    """The progress of a run, updated by its events.

    Args:
        unit: The unit of the metric: "%" or "".
        metric: The name of the metric.

    Attributes:
        latest: The latest value of each entry of the events.
        phase: What the run does now, in words.
        counted: How much of the phase is done, and of how much (None: unknown); None while nothing is
            counted.
        fraction: The finished fraction of the run, in [0, 1].
    """

    def __init__(self, unit: str = "", metric: str = "metric") -> None:
        self.unit, self.name = unit, metric
        self.latest: dict[str, Any] = {}
        self.phase = "starting"
        self.counted: tuple[int, int | None] | None = None
        self.fraction = 0.0
        self._started = self._working_since = time.monotonic()
        self._fraction_at_start = 0.0  # above 0 in a resumed run

    def formatted(self, metric: float | None) -> str:
        """Return a value of the metric as text with its unit.

        Args:
            metric: The value; None: unknown.

        Returns:
            For instance "98.20 %".
        """
        if metric is None:
            return "?"
        return f"{100 * metric:.2f} %" if self.unit == "%" else f"{metric:.4g}"

    def update(self, event: Event) -> str | None:
        """Take account of an event.

        Args:
            event: The event.

        Returns:
            A line that describes it, or None if it deserves no line.
        """
        kind = event["event"]
        self.counted = (event["done"], event.get("total")) if kind == "progress" else None
        if kind in ("phase", "progress"):
            self.phase = event["message"] if kind == "phase" else event["what"]
            return self.phase if kind == "phase" else None
        # of the events of Q's learning only the gauge is kept: the step is not that of the run
        keys = ("gauge",) if kind == "q" else tuple(event)
        self.latest |= {key: event[key] for key in keys if event.get(key) is not None}
        if kind in ("warning", "finish"):
            return event.get("message")
        describe = {
            "start": self._on_start,
            "resume": self._on_resume,
            "q": self._on_auxiliary_step,
            "prune": self._on_prune,
            "train": self._on_training_step,
            "stage": self._on_stage,
            "rollback": self._on_rollback,
        }.get(kind)
        return None if describe is None else describe(event)

    def _begin(self, event: Event) -> None:
        self.phase = "starting"
        self._working_since = time.monotonic()  # loading and the first evaluation say nothing about the rest
        self.name = event.get("metric_name", self.name)
        self.unit = event.get("metric_unit", self.unit)

    def _on_start(self, event: Event) -> str:
        self._begin(event)
        dense = f"dense {self.name} {self.formatted(event.get('metric'))}"
        stages = event.get("stages")
        planned = f"{stages} stage{'' if stages == 1 else 's'}" if stages else "as many stages as it takes"
        return f"{dense}, {event.get('prunable', 0):,} prunable weights, {planned}"

    def _on_resume(self, event: Event) -> str:
        self._begin(event)
        self.fraction = self._fraction_at_start = event.get("fraction", 0.0)
        return f"continuing at sparsity {event.get('sparsity', 0):.1%} (checkpoint {event.get('checkpoint')})"

    def _on_auxiliary_step(self, event: Event) -> str | None:
        phases = {"estimate": "learning Q", "refine": "refining Q"}
        self.phase = phases.get(event.get("phase", ""), self.phase)
        return "learning Q ..." if event["step"] == 1 and event.get("phase") == "estimate" else None

    def _on_prune(self, event: Event) -> str:
        self.phase = "pruning"
        reached = f"{_stage(event)} sparsity {event['sparsity']:.1%}"
        predicted, measured = event.get("predicted"), event.get("measured")
        parts = [] if predicted is None else [f" predicted {predicted:.3g}"]
        parts += [] if measured is None else [f" measured {measured:.3g}"]
        return f"{reached}: loss increase{','.join(parts)}" if parts else reached

    def _on_training_step(self, event: Event) -> str | None:
        self.phase = "training"
        step, steps = event["step"], event["steps"]
        self._set_fraction(event, step / steps)
        if step not in (1, steps) and step % 100:
            return None
        return f"{_stage(event)} step {step}/{steps}: loss {event['loss']:.4f}{self.time_left()}"

    def _on_stage(self, event: Event) -> str:
        self._set_fraction(event, 1.0)
        reached = f"{_stage(event)} sparsity {event['sparsity']:.1%}"
        return f"{reached}: {self.name} {self.formatted(event.get('metric'))}{self.time_left()}"

    def _on_rollback(self, event: Event) -> str:
        result = f"sparsity {event['sparsity']:.2%}: {self.name} {self.formatted(event.get('metric'))}"
        return f"{result} drops by more than max_drop, going back"

    def _set_fraction(self, event: Event, within: float) -> None:
        if event.get("stages"):  # in a search the number of stages is unknown
            self.fraction = (event.get("stage", 0) - 1 + within) / event["stages"]

    @property
    def seconds(self) -> float:
        """The time since this process started the run."""
        return time.monotonic() - self._started

    def time_left(self) -> str:
        """Return a text such as ", about 3 min left", or "" where little is finished or little is left."""
        done = self.fraction - self._fraction_at_start
        if done <= 0.02 or self.fraction >= 1:
            return ""
        left = (time.monotonic() - self._working_since) / done * (1 - self.fraction)
        return f", about {duration(left)} left" if left >= _LEAST_TIME_LEFT else ""

    def count(self) -> str:
        """Return how much of the phase is done, such as "12 of 40 batches", or "" while nothing is counted.

        Returns:
            The text.
        """
        if self.counted is None:
            return ""
        done, total = self.counted
        of = f"{done} of {total}" if total is not None else f"{done}"
        return f"{of} batch{'' if (total if total is not None else done) == 1 else 'es'}"


def _stage(event: Event) -> str:
    stage, stages = event.get("stage", 0), event.get("stages")
    return f"[{stage}/{stages}]" if stages else f"[{stage}]"


class PlainDisplay:
    """Prints two lines per stage, and one for every hundredth training step.

    While batches are counted, a line is printed after every ten seconds of silence.

    Args:
        progress: The progress that is shown.
        stream: Where to write.
    """

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        self.progress, self.stream = progress, stream
        self._printed_at: float | None = None

    def event(self, event: Event) -> None:
        """Print the line of an event, if it has one."""
        line = self.progress.update(event)
        now = time.monotonic()
        silent = self._printed_at is None or now - self._printed_at >= _QUIET
        if self.progress.counted is not None and silent:
            line = f"{self.progress.phase}: {self.progress.count()}"
        if line:
            print(printable(line), file=self.stream, flush=True)
            self._printed_at = now

    def close(self) -> None:
        """Do nothing."""


class LiveDisplay:
    """Shows a panel that is redrawn in place. The lines of the plain display scroll above it.

    The panel is redrawn four times a second, with or without events: a spinner turns and the seconds count.

    Args:
        progress: The progress that is shown.
        stream: Where to write.
    """

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        self.progress = progress
        self.console = Console(file=stream)
        self.spinner = Spinner("dots")
        self.live = Live(
            console=self.console, refresh_per_second=4, transient=True, get_renderable=self._panel
        )
        self.live.start(refresh=True)

    def event(self, event: Event) -> None:
        """Print the line of an event above the panel; the panel is redrawn at its next turn."""
        line = self.progress.update(event)
        if line:
            self.live.console.print(printable(line), highlight=False, markup=False, soft_wrap=True)

    def _panel(self) -> Any:
        """Return the panel. Another thread calls this too, while events come in."""
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        progress, latest = self.progress, self.progress.latest
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column()
        training = progress.phase == "training" and "steps" in latest
        step = f", step {latest.get('step')}/{latest['steps']}" if training else ""
        grid.add_row(self.spinner, Text(printable(f"{progress.phase}{step}")))
        if counted := progress.counted:
            done, total = counted
            grid.add_row("", progress.count())
            if total:
                grid.add_row("", ProgressBar(total=total, completed=done, width=40))
        if "metric" in latest or "sparsity" in latest:  # the run has begun
            self._add_results(grid)
        grid.add_row("time", f"{duration(progress.seconds)}{progress.time_left()}")
        if progress.fraction:
            grid.add_row("", ProgressBar(total=1.0, completed=progress.fraction, width=40))
        return Panel(grid, title="fishleg", expand=False)

    def _add_results(self, grid: Any) -> None:
        from rich.text import Text

        progress, latest = self.progress, self.progress.latest
        of = f"/{latest['stages']}" if "stages" in latest else ""
        grid.add_row("stage", f"{latest.get('stage', 0)}{of}")
        grid.add_row("sparsity", f"{latest.get('sparsity', 0.0):.2%}")
        grid.add_row(Text(progress.name), progress.formatted(latest.get("metric")))
        if "loss" in latest:
            grid.add_row("loss", f"{latest['loss']:.4g}")
        if "predicted" in latest:
            measured = f", measured {latest['measured']:.3g}" if "measured" in latest else ""
            grid.add_row("loss increase", f"predicted {latest['predicted']:.3g}{measured}")
        if "gauge" in latest:
            verdict = "converged" if abs(latest["gauge"]) < 0.05 else "still learning"
            grid.add_row("Q", f"gauge {latest['gauge']:+.3f} ({verdict})")

    def close(self) -> None:
        """Remove the panel from the terminal."""
        self.live.stop()


class WarningsOnly(Listener):
    """Prints warnings and nothing else."""

    def event(self, event: Event) -> None:
        """Print a warning; ignore other events."""
        if event["event"] == "warning":
            print(printable(event["message"]), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Do nothing."""
        return


def duration(seconds: float) -> str:
    """Return a time as text.

    >>> duration(45), duration(200), duration(7500)
    ('45 s', '3 min', '2 h 5 min')

    Args:
        seconds: The time in seconds.

    Returns:
        The time in seconds, minutes or hours.
    """
    seconds = max(0, round(seconds))
    if seconds < 90:
        return f"{seconds} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
