"""Ctrl-C as a request to stop, so that it never lands in the middle of an engine's call."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupt:
    """While entered, the first SIGINT only sets `is_requested`; a second one acts as always."""

    def __init__(self) -> None:
        self.is_requested = False
        self._previous: Any = None
        self._is_installed = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others may not
            self._previous = signal.signal(signal.SIGINT, self._handle)
            self._is_installed = True
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._uninstall()

    def _handle(self, _signal_number: int, _frame: FrameType | None) -> None:
        self.is_requested = True
        self._uninstall()

    def _uninstall(self) -> None:
        if self._is_installed:
            self._is_installed = False
            signal.signal(signal.SIGINT, self._previous)
