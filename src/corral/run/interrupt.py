"""Ctrl-C and SIGTERM, which is what batch systems send: a run ends between two steps, with a checkpoint."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Protocol, runtime_checkable

STOPPING = "Stopping after this step, with a checkpoint. Once more to stop at once."


@runtime_checkable
class StopListener(Protocol):
    """Shows that a signal has arrived."""

    def stopping(self, sentence: str) -> None:
        """Called from the signal's handler: anything may be half done, a line of text too."""


@dataclass(kw_only=True)
class Interruptible:
    """A job that SIGINT and SIGTERM stop at the end of a step."""

    view: StopListener
    interrupted: bool = False
    patient: bool = False
    """Whether a signal waits for the end of the step; before training it need not."""

    @contextmanager
    def stop_on_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end the run at the next step's end, with a checkpoint; a second one ends it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, self._on_signal) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted or not self.patient:
            raise KeyboardInterrupt
        self.interrupted = True
        self.view.stopping(STOPPING)
