"""An owned thread that runs an event loop, uvloop's where it is installed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from kvoffload_async.runtime.threadsafe import ThreadsafeRunner

logger = logging.getLogger(__name__)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new loop: uvloop's where it is installed, asyncio's elsewhere."""
    try:
        import uvloop  # noqa: PLC0415 - optional on platforms that it does not support
    except ImportError:  # pragma: no cover - uvloop is installed wherever the tests run
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class LoopThread(ThreadsafeRunner):
    """Runs an event loop for its owner; a `LoopRunner` and a context manager.

    The thread does I/O bookkeeping only and owns no policy state. It is a daemon, so that a loop
    that cannot be stopped does not keep the process alive.
    """

    def __init__(
        self,
        name: str = "kvoffload-loop",
        loop_factory: Callable[[], asyncio.AbstractEventLoop] = new_event_loop,
    ) -> None:
        """Start the thread."""
        super().__init__(loop_factory())
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the loop and join the thread; tasks that are left are named in a warning.

        Thread: any but the loop's.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(RuntimeError):  # the loop has died by itself
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("%s did not stop within %s s", self._thread.name, timeout_s)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            left = asyncio.all_tasks(self._loop)
            if left:
                names = ", ".join(sorted(task.get_name() for task in left))
                logger.warning("%s stopped with tasks left: %s", self._thread.name, names)
                self._cancel(left)
                self._loop.set_exception_handler(_repeat_quietly)
            self._loop.close()

    def _cancel(self, tasks: set[asyncio.Task[Any]]) -> None:
        """Cancel what is left, one turn of the loop: a copy in flight holds on to its task."""
        for task in tasks:
            task.cancel()
        self._loop.call_later(0.05, self._loop.stop)
        self._loop.run_forever()


def _repeat_quietly(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what asyncio says of a task that is still pending when it is destroyed: it was named."""
    task = context.get("task")
    if task is None or task.done():
        loop.default_exception_handler(context)
    else:
        logger.debug("%s", context["message"])
