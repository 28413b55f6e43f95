"""Non-fatal errors: counted, and logged at a limited rate.

What serves for the life of a process, a thread or a task, makes its calls within
`ErrorLog.survived`, so that one error ends one call only.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from logging import Logger
from typing import Final

from kvoffload_async.errors import drop_tracebacks

INTERVAL_S: Final = 60.0
"""Seconds between two log lines for the same reason."""


class LogRate:
    """Rate-limits log lines of one kind."""

    def __init__(self) -> None:
        self._said_s: float | None = None
        self._unsaid = 0

    def note(self, now_s: float) -> str | None:
        """Count an event; return a suffix for its log line, or None to suppress the line."""
        if self._said_s is not None and now_s < self._said_s + INTERVAL_S:
            self._unsaid += 1
            return None
        self._said_s, unsaid, self._unsaid = now_s, self._unsaid, 0
        return f" ({unsaid} more since the last such line)" if unsaid else ""


class ErrorLog:
    """Counts the errors of one kind of calls, and logs one a minute. Thread-safe.

    Attributes:
        count: Number of errors.
    """

    def __init__(
        self, logger: Logger, what: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start without errors.

        Args:
            logger: Logs them.
            what: What fails; begins each line.
            clock: Monotonic seconds.
        """
        self.count = 0
        self._logger = logger
        self._what = what
        self._clock = clock
        self._rate = LogRate()
        self._lock = threading.Lock()

    def note(self, error: BaseException) -> None:
        """Count an error; log its traceback, unless one was just logged; drop its frames."""
        with self._lock:
            self.count += 1
            more = self._rate.note(self._clock())
        if more is not None:
            # As text: a log record with the error would keep its frames and their locals alive.
            trace = "".join(traceback.format_exception(error)).rstrip()
            self._logger.error("%s failed%s: %s", self._what, more, trace)
        drop_tracebacks(error)

    @contextlib.contextmanager
    def survived(self) -> Iterator[None]:
        """Log and suppress an error of the `with` block; a cancellation or Ctrl-C propagates."""
        try:
            yield
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the caller continues
            self.note(error)
