"""What reaches a run from outside its own code: signals that ask it to stop, warnings of the library."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType


class StopRequest:
    """The first Ctrl-C (or SIGTERM) asks the run to save and stop, the second stops it at once."""

    def __init__(self) -> None:
        self.asked = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("\nstopping at the next safe point (once more: at once) ...", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Within, signals are requests; outside the main thread they stay their owner's business."""
        try:
            before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)


class _Forward(logging.Handler):
    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self.tell(record.getMessage())


@contextlib.contextmanager
def capture_warnings(tell: Callable[[str], None]) -> Iterator[None]:
    """Within, what the library warns of is told there, and not shown twice."""
    handler, library = _Forward(tell), logging.getLogger("fishleg")
    before, library.propagate = library.propagate, False
    library.addHandler(handler)
    try:
        yield
    finally:
        library.removeHandler(handler)
        library.propagate = before
