"""A transfer whose outcome is published once, and can be awaited on any loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import traceback

from kvoffload_async.abc.transport import Transfer, TransferOutcome
from kvoffload_async.errors import TransportError, drop_tracebacks, text_of

logger = logging.getLogger(__name__)

_Waiter = tuple[asyncio.AbstractEventLoop, asyncio.Future[TransferOutcome]]


class SettlingTransfer(Transfer):
    """Ends when `end` is called, exactly once, after the last byte has moved."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._outcome: TransferOutcome | None = None
        self._lock = threading.Lock()
        self._waiters: list[_Waiter] = []

    async def outcome(self) -> TransferOutcome:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._outcome is not None:
                return self._outcome
            future: asyncio.Future[TransferOutcome] = loop.create_future()
            self._waiters.append((loop, future))
        return await future

    def synchronize(self, timeout_s: float) -> bool:
        return self._ended.wait(timeout_s)

    def end(self, outcome: TransferOutcome) -> None:
        """Publish the outcome and wake the waiters. Thread: any."""
        with self._lock:
            self._outcome = outcome
            waiters, self._waiters = self._waiters, []
        self._ended.set()
        for loop, future in waiters:
            # A waiter's loop may have been closed; later transfers must still be published.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_wake, future, outcome)

    def fail(self, cause: Exception) -> None:
        """End with an error. Thread: any."""
        self.end(failed(cause))


async def outcome_of(transfer: Transfer) -> TransferOutcome:
    """Await the end of any transport's transfer; a contract violation counts as a failure.

    Raises CancelledError if the wait is cancelled, and KeyboardInterrupt.
    """
    try:
        outcome: object = await transfer.outcome()
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - third-party code
        return failed(error)
    if isinstance(outcome, TransferOutcome) and isinstance(outcome.error, Exception | None):
        return outcome
    what = type(outcome).__name__
    return failed(TransportError(f"the transport violated its contract: outcome is a {what}"))


def failed(cause: BaseException) -> TransferOutcome:
    """Return the outcome for an error; drops its frames, which hold slots."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("a transfer failed:\n%s", "".join(traceback.format_exception(cause)))
    drop_tracebacks(cause)
    if isinstance(cause, TransportError):
        return TransferOutcome(0, error=cause)
    error = TransportError(text_of(cause))
    error.__cause__ = cause
    return TransferOutcome(0, error=error)


def _wake(future: asyncio.Future[TransferOutcome], outcome: TransferOutcome) -> None:
    if not future.done():  # else its waiter was cancelled
        future.set_result(outcome)
