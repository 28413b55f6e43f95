"""An event loop whose time is virtual: it never sleeps, and needs no thread.

When nothing is ready, time jumps to the next timer. A test that waits an hour takes a millisecond,
and takes the same turns every time.
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
    """A loop was closed while tasks were left on it."""


class _Selector:
    """Stands where a loop asks the system for events: there are none, but time passes."""

    def __init__(self, pass_time: Callable[[float | None], None]) -> None:
        self._pass_time = pass_time

    def select(self, timeout: float | None) -> tuple[()]:
        self._pass_time(timeout)
        return ()


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop with virtual time; it does no I/O, and nothing wakes it from outside.

    Either asyncio drives it (`asyncio.Runner(loop_factory=VirtualLoop)`), or a test does, turn by
    turn, with `run_ready`, `advance` and `run_until`. An exception that would only be logged, such
    as one out of a callback, is raised by the call that was driving the loop.
    """

    def __init__(self) -> None:
        """Start at time 0."""
        super().__init__()
        self._selector = _Selector(self._pass_time)
        self._now_s = 0.0
        self._limit_s: float | None = None
        self._was_idle = False
        self._unhandled: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _loop, context: self._unhandled.append(context))

    def time(self) -> float:
        """Return virtual seconds since the loop was made."""
        return self._now_s

    def run_ready(self) -> None:
        """Run whatever can run without time passing."""
        self._run_to(lambda: False, self._now_s)

    def advance(self, seconds: float) -> None:
        """Let time pass, and run whatever can run by then."""
        self._run_to(lambda: False, self._now_s + seconds)

    def run_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Let time pass until `is_done()`; False if `timeout_s` virtual seconds were not enough."""
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
                raise StateError(f"{idle_turns} turns without time passing: something spins")
        return True

    def _turn(self, limit_s: float) -> None:
        """Run one turn of the loop, in which time may jump, at most to `limit_s`."""
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
        self.stop()  # after this turn
        next_s = math.inf if timeout_s is None else self._now_s + timeout_s
        self._was_idle = timeout_s != 0 and next_s > self._limit_s
        self._now_s = min(next_s, max(self._limit_s, self._now_s))

    def _process_events(self, event_list: tuple[()]) -> None:
        """Nothing: there are no system events."""

    def _write_to_self(self) -> None:
        """Nothing: the loop never sleeps, so nobody has to wake it."""


class VirtualRunner:
    """A `LoopRunner` over a `VirtualLoop`: the owner and the loop are one thread.

    The loop turns only inside `run`, `wait_until` and `run_ready` and `advance`; between them the
    test decides what happens.
    """

    def __init__(self) -> None:
        """Start with a new loop at time 0."""
        self.loop = VirtualLoop()
        self.callbacks = 0
        """How often `call_soon` was called: the wake-ups that a loop thread would have had."""

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
        """See `LoopRunner.run`; the deadline is virtual."""
        if self.loop.is_closed() or self.loop.is_running():
            coroutine.close()
            if self.loop.is_closed():
                raise ClosedError("the virtual loop is closed")
            raise StateError("run() was called from inside the loop, which would deadlock it")
        task = self.loop.create_task(coroutine, name="virtual-runner")
        if not self.loop.run_until(task.done, timeout_s):
            task.cancel()
            self.loop.run_ready()
            raise TimeoutError(f"not done after {timeout_s} virtual seconds")
        return task.result()

    def wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """See `LoopRunner.wait_until`; the deadline is virtual."""
        if self.loop.is_closed():
            return is_done()
        return self.loop.run_until(is_done, timeout_s)

    def notify(self) -> None:
        """Nothing: `wait_until` asks after every turn."""

    def has_ended(self) -> bool:
        """See `LoopRunner.has_ended`."""
        return self.loop.is_closed()

    def now_s(self) -> float:
        """Return the loop's virtual time."""
        return self.loop.time()

    def run_ready(self) -> None:
        """Run whatever can run without time passing."""
        self.loop.run_ready()

    def advance(self, seconds: float) -> None:
        """Let virtual time pass, and run whatever can run by then."""
        self.loop.advance(seconds)

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the loop; idempotent.

        Raises:
            LeftoverTasksError: Tasks were left; they were cancelled, and are named.
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
