"""How an operation of a tier has ended, in the vocabulary of its owner."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from kvoffload_async.abc.events import BlockFailures
from kvoffload_async.errors import JobCancelledError, TierError, TierUnavailableError, text_of

ENDS_LOOP = (SystemExit, KeyboardInterrupt)
"""What asyncio does not keep in the task that raises it."""
logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


async def contained(operation: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Await an operation of a tier; one that would end the loop only fails itself."""
    try:
        return await operation(*args, **kwargs)
    except ENDS_LOOP as error:
        raise as_contained(error) from error


def as_contained(error: BaseException) -> TierUnavailableError:
    """Return what stands in for an exit that a tier has asked for."""
    return TierUnavailableError(f"a tier raised {text_of(error)}")


def log_trace(error: BaseException) -> None:
    """Log where an error came from, for whoever looks for a defect: before its frames are dropped.

    As text, as logs may be kept.
    """
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s", "".join(traceback.format_exception(error)))


def error_of(task: asyncio.Task[Any]) -> TierError:
    """Return why the task of a job or a probe has failed, in the vocabulary of its owner."""
    error = None if task.cancelled() else task.exception()
    if error is None:
        return JobCancelledError("its task was cancelled")
    if isinstance(error, TierError):
        return error
    failure = TierUnavailableError(text_of(error))
    failure.__cause__ = error
    return failure


def judged(failures: object, num_blocks: int) -> tuple[BlockFailures, TierError | None]:
    """Return what a tier has returned of a job, or that it has broken its contract."""
    if isinstance(failures, Mapping) and all(
        isinstance(i, int) and 0 <= i < num_blocks and isinstance(e, TierError)
        for i, e in failures.items()
    ):
        return dict(failures), None
    return {}, TierUnavailableError(f"the tier broke its contract: it returned {failures!r}")
