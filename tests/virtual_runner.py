"""A `LoopRunner` on virtual time: the owner and the loop share the thread of the test."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

from kvoffload_async.errors import ClosedError, StateError
from kvoffload_async.runtime.loop import LoopRunner
from kvoffload_async.testing import VirtualLoop

T = TypeVar("T")


class LeftoverTasksError(StateError):
    """A loop was closed while tasks were still pending."""


class VirtualRunner(LoopRunner):
    """A `LoopRunner` over a `VirtualLoop`; the owner and the loop share one thread.

    The loop runs only inside `run`, `wait_until`, `run_ready` and `advance`; between these calls
    the test is in control.
    """

    def __init__(self) -> None:
        """Create a loop at virtual time 0."""
        self.loop = VirtualLoop()
        super().__init__(self.loop)
        self.now_s = self.loop.time
        self.callbacks = 0
        """Number of `call_soon` calls, each of which would wake a loop thread."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        """See `LoopRunner.call_soon`."""
        super().call_soon(callback, *args)
        self.callbacks += 1

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """See `LoopRunner.run`; the deadline is in virtual time."""
        try:
            self.refuse_own_thread("run()")
            if self.loop.is_closed():
                raise ClosedError("the virtual loop is closed")
        except StateError:
            coroutine.close()
            raise
        task = self.loop.create_task(coroutine, name="virtual-runner")
        if not self.loop.run_until(task.done, timeout_s):
            task.cancel()
            self.loop.run_ready()
            raise TimeoutError(f"not done after {timeout_s} virtual seconds")
        return task.result()

    def wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """See `LoopRunner.wait_until`; the deadline is in virtual time."""
        if self.loop.is_closed():
            return is_done()
        return self.loop.run_until(is_done, timeout_s)

    def run_ready(self) -> None:
        """Run until nothing is ready, without advancing time."""
        self.loop.run_ready()

    def advance(self, seconds: float) -> None:
        """Advance virtual time, running everything that becomes ready."""
        self.loop.advance(seconds)

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the loop; idempotent.

        Raises:
            LeftoverTasksError: Tasks were pending; they were cancelled, and the message names them.
        """
        if self.loop.is_closed():
            return
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        try:
            self.loop.run_until(lambda: all(task.done() for task in left), timeout_s)
        finally:
            self.loop.close()
        if left:
            names = ", ".join(sorted(task.get_name() for task in left))
            raise LeftoverTasksError(f"tasks were left on the loop: {names}")
