"""A transfer whose outcome is published once, and can be awaited on any loop."""

from __future__ import annotations

import asyncio
import logging
import traceback
from concurrent.futures import Future, wait

from kvoffload_async.abc.transport import Transfer, TransferOutcome
from kvoffload_async.errors import TransportError, drop_tracebacks, text_of

logger = logging.getLogger(__name__)


class CompletableTransfer(Transfer):
    """A transfer that ends when `end` is called, exactly once, after the last byte has moved."""

    def __init__(self) -> None:
        self._ended: Future[TransferOutcome] = Future()
        self._ended.set_running_or_notify_cancel()  # a cancelled waiter does not cancel it

    async def outcome(self) -> TransferOutcome:
        if self._ended.done():
            return self._ended.result()
        return await asyncio.wrap_future(self._ended)

    def synchronize(self, timeout_s: float) -> bool:
        return bool(wait([self._ended], timeout_s).done)

    def end(self, outcome: TransferOutcome) -> None:
        """Publish the outcome and wake the waiters. Thread: any."""
        self._ended.set_result(outcome)

    def fail(self, cause: Exception) -> None:
        """End the transfer with an error. Thread: any."""
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
    """Return the failed outcome for an error; drops its traceback, which refers to slots."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("a transfer failed:\n%s", "".join(traceback.format_exception(cause)))
    drop_tracebacks(cause)
    if isinstance(cause, TransportError):
        return TransferOutcome(0, error=cause)
    error = TransportError(text_of(cause))
    error.__cause__ = cause
    return TransferOutcome(0, error=error)
