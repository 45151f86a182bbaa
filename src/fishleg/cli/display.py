"""What a person sees while a run goes on: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from fishleg.runs.events import Event, Listener


def make_display(
    unit: str, metric: str, stream: TextIO | None = None, *, live: bool | None = None
) -> Listener:
    """Live where the stream is a terminal and rich is installed (or as `live` says), else plain."""
    stream = stream or sys.stderr
    if live is None:
        live = stream.isatty()
    if live:
        try:
            import rich  # noqa: F401

            return LiveDisplay(Story(unit, metric), stream)
        except ImportError:
            pass
    return PlainDisplay(Story(unit, metric), stream)


class Story:
    """The state of a run in words, kept up to date by events."""

    def __init__(self, unit: str, metric: str) -> None:
        self.unit, self.name = unit, metric
        self.now: dict[str, Any] = {}
        self.phase = "starting"
        self.started = time.monotonic()
        self.fraction = 0.0  # of the whole run
        self.began_at = 0.0

    def value(self, metric: float | None) -> str:
        """The metric for people."""
        if metric is None:
            return "?"
        return f"{100 * metric:.2f} %" if self.unit == "%" else f"{metric:.4g}"

    def take(self, event: Event) -> str | None:
        """Note an event; the plain line for it, if it deserves one."""
        kind = event["event"]
        # of Q's learning only its health is shown: its step and loss are not those of the run
        shown = ("gauge",) if kind == "q" else tuple(event)
        self.now |= {k: event[k] for k in shown if event.get(k) is not None}
        stage, stages = event.get("stage", 0), event.get("stages")
        place = f"[{stage}/{stages}]" if stages else f"[{stage}]"
        if kind == "start":
            dense = f"dense {self.name} {self.value(event.get('metric'))}"
            return f"{dense}, {event.get('prunable', 0):,} prunable weights, {stages or '?'} stages"
        if kind == "resume":
            self.fraction = self.began_at = event.get("fraction", 0.0)
            return (
                f"going on at sparsity {event.get('sparsity', 0):.1%} (checkpoint {event.get('checkpoint')})"
            )
        if kind == "q":
            self.phase = {"estimate": "learning Q", "refine": "refining Q"}.get(
                event.get("phase", ""), self.phase
            )
            if event["step"] == 1 and event.get("phase") == "estimate":
                return "learning Q ..."
        elif kind == "prune":
            self.phase = "pruning"
            measured = event.get("measured")
            told = "" if measured is None else f", measured {measured:.3g}"
            reached = f"{place} sparsity {event['sparsity']:.1%}"
            predicted = event.get("predicted")
            foreseen = "" if predicted is None else f" predicted {predicted:.3g}"
            return f"{reached}: loss increase{foreseen}{told}" if foreseen or told else reached
        elif kind == "train":
            self.phase = "training"
            self._progress(stage, stages, event["step"] / event["steps"])
            if event["step"] in (1, event["steps"]) or event["step"] % 100 == 0:
                left = self.left()
                return f"{place} step {event['step']}/{event['steps']}: loss {event['loss']:.4f}{left}"
        elif kind == "stage":
            self._progress(stage, stages, 1.0)
            reached = f"{place} sparsity {event['sparsity']:.1%}"
            return f"{reached}: {self.name} {self.value(event.get('metric'))}{self.left()}"
        elif kind == "rollback":
            return (
                f"{self.name} {self.value(event.get('metric'))} at {event['sparsity']:.2%} is too bad: back"
            )
        elif kind == "checkpoint":
            return None
        elif kind in ("warning", "finish"):
            return event.get("message")
        return None

    def _progress(self, stage: int, stages: int | None, within: float) -> None:
        if stages:  # else a search, and nobody knows
            self.fraction = (stage - 1 + within) / stages

    def left(self) -> str:
        """`, about 3 min left`, once that can be said."""
        done = self.fraction - self.began_at
        if done <= 0.02 or self.fraction >= 1:
            return ""
        seconds = (time.monotonic() - self.started) / done * (1 - self.fraction)
        return f", about {duration(seconds)} left"


class PlainDisplay:
    """A line per stage, and every hundredth training step."""

    def __init__(self, story: Story, stream: TextIO) -> None:
        self.story, self.stream = story, stream

    def event(self, event: Event) -> None:
        """Print the line, if there is one."""
        line = self.story.take(event)
        if line:
            print(line, file=self.stream, flush=True)

    def close(self) -> None:
        """Nothing to do."""


class LiveDisplay:
    """A panel that is redrawn in place, with the lines of the plain display scrolling above it."""

    def __init__(self, story: Story, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self.story = story
        self.console = Console(file=stream)
        self.live = Live(self._panel(), console=self.console, refresh_per_second=4, transient=True)
        self.live.start()

    def event(self, event: Event) -> None:
        """Redraw; lines go above the panel."""
        line = self.story.take(event)
        if line:
            self.live.console.print(line, highlight=False, markup=False)
        self.live.update(self._panel())

    def _panel(self) -> Any:
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        story, now = self.story, self.story.now
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column()
        step = (
            f", step {now.get('step')}/{now['steps']}" if story.phase == "training" and "steps" in now else ""
        )
        of = f"/{now['stages']}" if "stages" in now else ""
        grid.add_row("stage", f"{now.get('stage', 0)}{of} {story.phase}{step}")
        grid.add_row("sparsity", f"{now.get('sparsity', 0.0):.2%}")
        grid.add_row(story.name, story.value(now.get("metric")))
        if "loss" in now:
            grid.add_row("loss", f"{now['loss']:.4g}")
        if "predicted" in now:
            measured = f", measured {now['measured']:.3g}" if "measured" in now else ""
            grid.add_row("loss increase", f"predicted {now['predicted']:.3g}{measured}")
        if "gauge" in now:
            health = "healthy" if abs(now["gauge"]) < 0.05 else "still learning"
            grid.add_row("Q", f"gauge {now['gauge']:+.3f} ({health})")
        grid.add_row("time", f"{duration(time.monotonic() - story.started)}{story.left()}")
        grid.add_row("", ProgressBar(total=1.0, completed=story.fraction, width=40))
        return Panel(grid, title="fishleg", expand=False)

    def close(self) -> None:
        """Leave the terminal clean."""
        self.live.stop()


def duration(seconds: float) -> str:
    """`45 s`, `3 min`, `2 h 5 min`."""
    seconds = max(0, round(seconds))
    if seconds < 90:
        return f"{seconds} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


class Warnings(Listener):
    """What is left where no progress is wanted."""

    def event(self, event: Event) -> None:
        """Only what the user must know."""
        if event["event"] == "warning":
            print(event["message"], file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is open."""
        return
