"""Signals that stop a run safely, and warnings of the library that go into its log."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class StopRequest:
    """Whether the user has asked the run to stop.

    The first Ctrl-C (or SIGTERM) sets `requested`; the run saves its state and stops. The second one raises
    KeyboardInterrupt at once.

    Attributes:
        requested: Whether a signal has arrived.
    """

    def __init__(self) -> None:
        self.requested = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        text = "\nstopping at the next safe point; press Ctrl-C again to stop at once ..."
        print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals inside the `with` block, and restore the previous handlers afterwards.

        Python allows signal handlers in the main thread only. In other threads nothing is changed.

        Yields:
            Nothing.
        """
        try:
            before = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)


class _CallbackHandler(logging.Handler):
    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.report = report

    def emit(self, record: logging.LogRecord) -> None:
        self.report(record.getMessage())


_lock = threading.Lock()
_handlers: list[tuple[logging.Handler, bool]] = []  # with the library's `propagate` before each


@contextlib.contextmanager
def capture_warnings(report: Callable[[str], None]) -> Iterator[None]:
    """Pass the library's warnings to a function inside the `with` block, instead of printing them.

    Args:
        report: Receives the text of each warning.

    Yields:
        Nothing.
    """
    handler, library = _CallbackHandler(report), logging.getLogger("fishleg")
    with _lock:  # runs may go on in several threads
        _handlers.append((handler, library.propagate))
        library.propagate = False
        library.addHandler(handler)
    try:
        yield
    finally:
        with _lock:
            place = next(i for i, (other, _) in enumerate(_handlers) if other is handler)
            _, before = _handlers.pop(place)
            library.removeHandler(handler)
            if place == len(_handlers):
                library.propagate = before
            else:  # another run captures still, and restores what was before this one
                _handlers[place] = _handlers[place][0], before
