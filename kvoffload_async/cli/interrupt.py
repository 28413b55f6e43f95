"""Ctrl-C as a request to stop, so that it never lands in the middle of an engine's call."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupt:
    """While entered, the first SIGINT only sets `is_requested`; a second one is a real one.

    Where SIGINT is ignored, as a shell has it for what a script runs in its background, it stays
    ignored.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._previous: Any = None
        self._is_installed = False

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()  # others may not
        if is_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._previous = signal.signal(signal.SIGINT, self._handle)
            self._is_installed = True
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, _signal_number: int, _frame: FrameType | None) -> None:
        self.is_requested = True
        signal.signal(signal.SIGINT, self._previous)
