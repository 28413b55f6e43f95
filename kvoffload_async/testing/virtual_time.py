"""An event loop with virtual time: it never sleeps and needs no thread.

When nothing is ready, time jumps to the next timer. A test that waits for an hour takes a
millisecond, and its schedule is deterministic.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

from kvoffload_async.errors import ClosedError, StateError

T = TypeVar("T")

_MAX_IDLE_TURNS = 100_000


class LeftoverTasksError(StateError):
    """A loop was closed while tasks were still pending."""


class _Selector:
    """Replaces the loop's I/O selector: it reports no events and advances virtual time."""

    def __init__(self, pass_time: Callable[[float | None], None]) -> None:
        self._pass_time = pass_time

    def select(self, timeout: float | None) -> tuple[()]:
        self._pass_time(timeout)
        return ()


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop with virtual time, without I/O or wake-ups from other threads.

    It is driven by asyncio (`asyncio.Runner(loop_factory=VirtualLoop)`), or by a test with
    `run_ready`, `advance` and `run_until`. An exception that asyncio would only log, such as one
    raised by a callback, is raised by the call that drives the loop.
    """

    def __init__(self) -> None:
        """Start at virtual time 0."""
        super().__init__()
        self._selector = _Selector(self._pass_time)
        self._now_s = 0.0
        self._limit_s: float | None = None
        self._was_idle = False
        self._unhandled: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _loop, context: self._unhandled.append(context))

    def time(self) -> float:
        """Return virtual seconds since the loop was created."""
        return self._now_s

    def run_ready(self) -> None:
        """Run until nothing is ready, without advancing time."""
        self._run_to(lambda: False, self._now_s)

    def advance(self, seconds: float) -> None:
        """Advance time, running everything that becomes ready."""
        self._run_to(lambda: False, self._now_s + seconds)

    def run_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Advance time until `is_done()`; return False after `timeout_s` virtual seconds."""
        return self._run_to(is_done, self._now_s + timeout_s)

    def _run_to(self, is_done: Callable[[], bool], limit_s: float) -> bool:
        idle_turns = 0
        while not is_done():
            before_s = self._now_s
            self._turn(limit_s)
            if self._was_idle:
                return is_done()
            idle_turns = idle_turns + 1 if self._now_s == before_s else 0
            if idle_turns > _MAX_IDLE_TURNS:
                raise StateError(f"{idle_turns} iterations without time passing: busy loop")
        return True

    def _turn(self, limit_s: float) -> None:
        """Run one iteration of the loop, in which time may jump, at most to `limit_s`."""
        self._limit_s = limit_s
        try:
            self.run_forever()
        finally:
            self._limit_s = None
        if self._unhandled:
            context = self._unhandled.pop(0)
            error = context.get("exception")
            raise error if error is not None else StateError(str(context["message"]))

    def _pass_time(self, timeout_s: float | None) -> None:
        if self._limit_s is None:
            if timeout_s is None:
                raise StateError("deadlock: nothing is ready and no timer is set")
            self._now_s += timeout_s
            return
        self.stop()  # after this iteration
        next_s = math.inf if timeout_s is None else self._now_s + timeout_s
        self._was_idle = timeout_s != 0 and next_s > self._limit_s
        self._now_s = min(next_s, max(self._limit_s, self._now_s))

    def _process_events(self, event_list: tuple[()]) -> None:
        """Do nothing: there are no I/O events."""

    def _write_to_self(self) -> None:
        """Do nothing: the loop never sleeps."""


class VirtualRunner:
    """A `LoopRunner` over a `VirtualLoop`; the owner and the loop share one thread.

    The loop runs only inside `run`, `wait_until`, `run_ready` and `advance`; between these calls
    the test is in control.
    """

    def __init__(self) -> None:
        """Create a loop at virtual time 0."""
        self.loop = VirtualLoop()
        self.callbacks = 0
        """Number of `call_soon` calls, each of which would wake a loop thread."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        """See `LoopRunner.call_soon`."""
        if self.loop.is_closed():
            raise ClosedError("the virtual loop is closed")
        self.callbacks += 1
        self.loop.call_soon(callback, *args)

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

    def refuse_own_thread(self, call: str) -> None:
        """See `LoopRunner.refuse_own_thread`."""
        if self.loop.is_running():
            raise StateError(f"{call} was called from inside the loop, which would deadlock it")

    def wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """See `LoopRunner.wait_until`; the deadline is in virtual time."""
        if self.loop.is_closed():
            return is_done()
        return self.loop.run_until(is_done, timeout_s)

    def notify(self) -> None:
        """Do nothing: `wait_until` checks after every iteration."""

    def has_ended(self) -> bool:
        """See `LoopRunner.has_ended`."""
        return self.loop.is_closed()

    def now_s(self) -> float:
        """Return the loop's virtual time."""
        return self.loop.time()

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
