"""Access to the event loop from its owner's thread: handing over work, waiting with a timeout.

The loop runs on its own thread (`LoopThread`), or is the caller's (`SameLoopRunner`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvoffload_async.errors import ClosedError, StateError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LoopRunner:
    """Access to an event loop for its owner's thread; the loop runs on another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give access to `loop`."""
        self._loop = loop
        self._progress = threading.Event()
        self._is_waited_for = False
        self._closed = False
        self.now_s: Callable[[], float] = time.monotonic
        """Returns this runner's monotonic time in seconds."""

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        """Schedule a callback on the loop; never blocks. Thread: any.

        Raises:
            ClosedError: The loop is closed.
        """
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError as error:
            raise ClosedError("the loop thread is closed") from error

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine and return its result. For opening and closing only.

        Thread: any but the loop's.

        Raises:
            TimeoutError: It did not end in time, and was cancelled.
            StateError: Called on the loop's own thread, which would deadlock.
        """
        try:
            self.refuse_own_thread("run()")
            if self._closed:
                raise ClosedError("the loop thread is closed")
        except StateError:
            coroutine.close()
            raise
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as error:  # the loop was closed
            coroutine.close()
            raise ClosedError("the loop thread is closed") from error
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if not future.done():
                future.cancel()
            raise
        finally:
            del future, coroutine  # avoid a reference cycle of exception and frame

    def refuse_own_thread(self, call: str) -> None:
        """Raise StateError on the loop's own thread, where `call` would deadlock."""
        if _running_loop() is self._loop:
            raise StateError(
                f"{call} was called on the loop's own thread, which would deadlock it; call it "
                "on another thread"
            )

    def wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `is_done()`, checked again after every `notify`; False on timeout.

        Thread: any but the loop's, one at a time.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._progress.clear()
            # Set before the check: later progress will set the event.
            self._is_waited_for = True
            if is_done():
                break
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                self._is_waited_for = False
                return False
            self._progress.wait(remaining_s)
        self._is_waited_for = False
        return True

    def notify(self) -> None:
        """Wake the thread in `wait_until`. Thread: any."""
        if self._is_waited_for:
            self._progress.set()

    def has_ended(self) -> bool:
        """Return whether the loop is closed, so that its unfinished tasks will never end."""
        return self._loop.is_closed()

    def close(self, timeout_s: float = 5.0) -> None:
        """Refuse further work; the loop is stopped by its owner. Idempotent."""
        self._closed = True


class SameLoopRunner(LoopRunner):
    """A `LoopRunner` for the caller's own loop: progress is reported by a callback.

    Blocking methods (`run`, `wait_until`) are called from a helper thread while the owner awaits
    it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_progress: Callable[[], object]) -> None:
        """Call `on_progress` on the loop's thread whenever a tier has posted an event.

        It may be called within a call of the owner's, and must not call the core.
        """
        super().__init__(loop)
        self._on_progress = on_progress
        self.thread_id = threading.get_ident()
        """Id of the loop's thread, which creates this object."""
        self.now_s = clock_of(loop)
        """See `LoopRunner.now_s`: the loop's time, by which its callers set their deadlines."""

    def notify(self) -> None:
        """See `LoopRunner.notify`."""
        super().notify()
        if threading.get_ident() == self.thread_id:
            self._on_progress()
        else:
            self.call_soon(self._on_progress)


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Return a loop's clock; for uvloop `time.monotonic`, because its own counts milliseconds."""
    return time.monotonic if type(loop).__module__ == "uvloop" else loop.time


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Create a loop: uvloop's if installed, otherwise asyncio's."""
    try:
        import uvloop  # noqa: PLC0415 - optional on platforms that it does not support
    except ImportError:  # pragma: no cover - uvloop is installed wherever the tests run
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class LoopThread(LoopRunner):
    """Runs an event loop on a thread for its owner; a `LoopRunner`.

    The thread does only I/O bookkeeping and holds no policy state. It is a daemon, so that a loop
    that cannot be stopped does not keep the process alive.
    """

    def __init__(
        self, name: str = "kvoffload-loop", on_progress: Callable[[], object] | None = None
    ) -> None:
        """Start the thread.

        Args:
            name: Its name.
            on_progress: Called on the thread after one or several calls of `notify`.
        """
        super().__init__(new_event_loop())
        self._on_progress = on_progress
        self._is_called = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._loop.close()
            raise

    def notify(self) -> None:
        """See `LoopRunner.notify`."""
        super().notify()
        if self._on_progress is not None and not self._is_called:
            self._is_called = True
            if _running_loop() is self._loop:
                self._loop.call_soon(self._progressed)
            else:
                with contextlib.suppress(ClosedError):  # nothing progresses any more
                    self.call_soon(self._progressed)

    def _progressed(self) -> None:
        self._is_called = False
        assert self._on_progress is not None  # noqa: S101 - see notify
        self._on_progress()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the loop and join the thread; log a warning with the names of unfinished tasks.

        Thread: any but the loop's.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(RuntimeError):  # the loop was closed by itself
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("%s did not stop within %s s", self._thread.name, timeout_s)

    def _main(self) -> None:
        """Run the loop until `close`; restart it if anything else stops it."""
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            if not self._closed:
                logger.error(
                    "%s was stopped by a task or callback, and was restarted", self._thread.name
                )
            while not self._closed:
                self._loop.run_forever()
        finally:
            try:
                self._end_tasks()
            finally:
                self._loop.close()

    def _end_tasks(self) -> None:
        left = asyncio.all_tasks(self._loop)
        if left:
            names = ", ".join(sorted(task.get_name() for task in left))
            logger.warning("%s stopped with unfinished tasks: %s", self._thread.name, names)
            for task in left:
                task.cancel()
            self._loop.call_later(0.05, self._loop.stop)  # orphaned copies do not end
            self._loop.run_forever()
            self._loop.set_exception_handler(_repeat_quietly)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the loop running on this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _repeat_quietly(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log the destruction of a pending task at DEBUG: a warning has already named the task."""
    task = context.get("task")
    if task is None or task.done():
        loop.default_exception_handler(context)
    else:
        logger.debug("%s", context["message"])
