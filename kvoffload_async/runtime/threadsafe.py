"""A loop that another thread runs, as its owner's thread sees it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvoffload_async.errors import ClosedError, StateError

T = TypeVar("T")


class ThreadsafeRunner:
    """A `LoopRunner` over an event loop that is run elsewhere."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand things over to `loop`."""
        self._loop = loop
        self._progress = threading.Event()
        self._is_waited_for = False
        self._closed = False

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        """See `LoopRunner.call_soon`. Thread: any."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError as error:
            raise ClosedError("the loop thread is closed") from error

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """See `LoopRunner.run`. Thread: any but the loop's."""
        if _running_loop() is self._loop:
            coroutine.close()
            raise StateError("run() was called on the loop's own thread, which would deadlock it")
        if self._closed:
            coroutine.close()
            raise ClosedError("the loop thread is closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if not future.done():
                future.cancel()
            raise

    def wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """See `LoopRunner.wait_until`. Thread: any but the loop's, one at a time."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._progress.clear()
            # Announced before asking: what comes after the answer will set the event.
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
        """See `LoopRunner.notify`."""
        if self._is_waited_for:
            self._progress.set()

    def now_s(self) -> float:
        """See `LoopRunner.now_s`."""
        return time.monotonic()

    def close(self, timeout_s: float = 5.0) -> None:
        """Hand nothing over any more; the loop itself is its runner's to stop."""
        self._closed = True


class SameLoopRunner(ThreadsafeRunner):
    """The caller's own loop: owner and loop are one thread, and progress calls back.

    What waits (`run`, `wait_until`) is called from a helper thread while the owner awaits it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_progress: Callable[[], object]) -> None:
        """Call `on_progress` on the loop's thread whenever a tier has something to report."""
        super().__init__(loop)
        self._on_progress = on_progress

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        """See `LoopRunner.call_soon`: on the loop's own thread, without a system call."""
        if _running_loop() is self._loop:
            self._loop.call_soon(callback, *args)
        else:
            super().call_soon(callback, *args)

    def now_s(self) -> float:
        """See `LoopRunner.now_s`: the loop's time, by which its callers set their deadlines."""
        return self._loop.time()

    def notify(self) -> None:
        """See `LoopRunner.notify`."""
        super().notify()
        self.call_soon(self._on_progress)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the loop that runs on this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
