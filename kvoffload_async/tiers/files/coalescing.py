"""Coalescing of blocking calls: requests made during a call are served by the next one.

So a hundred jobs that end together need only a few journal appends and thread hand-overs, and a
single job does not wait for others. If a call hangs, another one is started in parallel.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, TypeVar

from kvoffload_async.errors import TierClosedError, TierError, TierUnavailableError
from kvoffload_async.waiting import LastingFuture

T = TypeVar("T")

Call = Callable[[Sequence[T], Callable[[], bool]], None]
"""Takes items, and a function that returns whether any is still awaited. Thread: an I/O thread."""

_PATIENCE_S: Final = 0.25
"""Seconds after which a running call is considered hanging."""

_MOST_CALLS: Final = 3
"""Maximum number of concurrent calls if some hang; each uses a thread."""

Runner = Callable[[Callable[[], None]], Awaitable[None]]


@dataclass(slots=True, eq=False)
class _Waiter(Generic[T]):
    """A waiting caller, and whether it still waits."""

    item: T
    future: asyncio.Future[BaseException | None]
    is_waiting: bool = True


@dataclass(slots=True, eq=False)
class _Turn:
    """A sequence of calls made by one thread.

    Attributes:
        taken: Calls taken by the thread and not yet reported to their waiters.
        timer: Periodic progress check.
    """

    taken: list[_Boxed[Any]] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


class _TurnServer(ABC):
    """Serves waiting callers with one task, and with another one while a task's call hangs."""

    _waiting: Sequence[Any]

    def __init__(self, name: str, run: Runner) -> None:
        self._name = name
        self._run = run
        self._loop = asyncio.get_running_loop()
        self._current: _Turn | None = None
        """The newest turn, unless it is considered hanging."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Wait until no call is running."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    @abstractmethod
    async def _serve(self, turn: _Turn) -> None:
        """Serve the waiting callers while the turn is current."""

    def _start(self) -> None:
        """Start serving the waiting callers, unless too many calls hang."""
        if self._waiting and len(self._tasks) < _MOST_CALLS:
            turn = self._current = _Turn()
            task = self._loop.create_task(self._serve(turn), name=self._name)
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _replace(self, turn: _Turn) -> None:
        """Consider the call of a turn hanging."""
        if self._current is turn:
            self._current = None
            self._start()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._current is None:
            self._start()


class Coalescer(_TurnServer, Generic[T]):
    """Coalesces items into calls. Thread: loop; the calls run on an I/O thread."""

    def __init__(self, name: str, call: Call[T], run: Runner) -> None:
        """Create it on the loop that awaits it.

        Args:
            name: Name of its tasks.
            call: Takes all waiting items; its exception is passed to all of them.
            run: Runs a blocking call on a thread.
        """
        super().__init__(name, run)
        self._call = call
        self._waiting: list[_Waiter[T]] = []

    def begin(self, item: T) -> asyncio.Future[BaseException | None]:
        """Pass an item to the next call; the future's result is the call's exception, or None."""
        return self._enqueue(_Waiter(item, self._loop.create_future()))

    def _enqueue(self, waiter: _Waiter[T]) -> asyncio.Future[BaseException | None]:
        self._waiting.append(waiter)
        if self._current is None:
            self._start()
        return waiter.future

    async def add(self, item: T) -> BaseException | None:
        """Pass an item to the next call; return the call's exception, or None.

        If cancelled, it returns after the call has ended, or at once if the call has not begun, and
        withdraws the item.
        """
        waiter: _Waiter[T] = _Waiter(item, LastingFuture(lambda: self._leave(waiter)))
        return await self._enqueue(waiter)

    def _leave(self, waiter: _Waiter[T]) -> bool:
        """Withdraw an item; False if a call has taken it."""
        waiter.is_waiting = False
        if waiter not in self._waiting:
            return False
        self._waiting.remove(waiter)
        return True

    async def _serve(self, turn: _Turn) -> None:
        group: Sequence[_Waiter[T]] = ()
        failure: BaseException | None = None
        try:
            while self._waiting and self._current is turn:
                group, self._waiting = self._waiting, []
                failure = None
                timer = self._loop.call_later(_PATIENCE_S, self._replace, turn)
                try:
                    await self._run(partial(self._make, group))
                except Exception as error:  # noqa: BLE001 - passed to the waiters
                    failure = error
                finally:
                    timer.cancel()
                _end(group, failure)
        except GeneratorExit:  # the loop is gone, and the waiters with it
            raise
        except BaseException as error:
            _end(group, error)
            raise
        finally:
            if self._current is turn:
                self._current = None
            del group, failure  # avoid a cycle of exception and frame, which keeps job memory

    def _make(self, group: Sequence[_Waiter[T]]) -> None:
        """Make the call. Thread: an I/O thread."""
        self._call(
            [waiter.item for waiter in group],
            lambda: any(waiter.is_waiting for waiter in group),
        )


class _Boxed(Generic[T]):
    """A call and its result or exception."""

    __slots__ = ("_call", "_error", "_results", "future", "has_ended")

    def __init__(self, call: Callable[[], T], future: asyncio.Future[None]) -> None:
        self._call = call
        self._results: list[T] = []
        self._error: BaseException | None = None
        self.future = future
        self.has_ended = False

    def make(self) -> None:
        """Make the call. Thread: an I/O thread."""
        try:
            self._results.append(self._call())
        except BaseException as error:  # noqa: BLE001 - passed to the waiter
            self._error = error
        self.has_ended = True

    def fail(self, error: BaseException) -> None:
        """Complete with an error without having been called. Thread: loop."""
        kind = type(error) if isinstance(error, TierError) else TierUnavailableError
        self._error = kind(str(error))
        self._error.__cause__ = error
        self.has_ended = True

    def result(self) -> T:
        """Return the call's result or raise its exception; call only once."""
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # avoid a cycle of exception and frame, which keeps job memory
        return self._results.pop()


class SerialExecutor(_TurnServer):
    """Runs blocking calls independently of each other, with one thread hand-over for all waiting.

    If a call hangs, after `_PATIENCE_S` the calls behind it are moved to another thread, and
    completed ones are reported.

    Thread: loop; the calls run on an I/O thread.
    """

    def __init__(self, name: str, run: Runner) -> None:
        """Create it on the loop that awaits it; see `Coalescer`."""
        super().__init__(name, run)
        self._waiting: deque[_Boxed[Any]] = deque()
        """Threads and the loop (for cancelled calls) remove entries, each atomically."""

    async def run(self, call: Callable[[], T], /) -> T:
        """Return a call's result; for cancellation see `Coalescer.add`.

        Raises:
            TierError: No thread is available.
        """
        if self._loop.is_closed():  # a call left on it is being garbage-collected
            raise TierClosedError("the event loop is closed")
        boxed = _Boxed(call, LastingFuture(lambda: self._leave(boxed)))
        self._waiting.append(boxed)
        if self._current is None:
            self._start()
        await boxed.future
        return boxed.result()

    def _leave(self, boxed: _Boxed[Any]) -> bool:
        """Withdraw a call; False if a thread has taken it."""
        try:
            self._waiting.remove(boxed)
        except ValueError:
            return False
        return True

    async def _serve(self, turn: _Turn) -> None:
        try:
            while self._waiting and self._current is turn:
                turn.timer = self._loop.call_later(_PATIENCE_S, self._look, turn)
                try:
                    await self._run(partial(self._make, turn))
                finally:
                    turn.timer.cancel()
                    _resolve(turn)
        except GeneratorExit:  # the loop is gone, and the waiters with it
            raise
        except Exception as error:  # noqa: BLE001 - no thread: passed to the waiters
            self._refuse(error)
        except BaseException as error:
            self._refuse(error)
            raise
        finally:
            if self._current is turn:
                self._current = None

    def _make(self, turn: _Turn) -> None:
        """Make the calls waiting now. Thread: an I/O thread."""
        for _ in range(len(self._waiting)):
            try:
                boxed = self._waiting.popleft()
            except IndexError:  # another thread was faster
                return
            turn.taken.append(boxed)
            boxed.make()

    def _look(self, turn: _Turn) -> None:
        """Report completed calls; if there are none, serve waiting calls with another thread."""
        if not _resolve(turn) and turn.taken:
            self._replace(turn)
        turn.timer = self._loop.call_later(_PATIENCE_S, self._look, turn)

    def _refuse(self, error: BaseException) -> None:
        """Fail all waiting calls."""
        while self._waiting:
            boxed = self._waiting.popleft()
            boxed.fail(error)
            boxed.future.set_result(None)


def _resolve(turn: _Turn) -> bool:
    """Report completed calls to their waiters; return whether there were any."""
    ended = [boxed for boxed in turn.taken if boxed.has_ended]
    for boxed in ended:
        turn.taken.remove(boxed)
        boxed.future.set_result(None)
    return bool(ended)


def _end(group: Sequence[_Waiter[T]], error: BaseException | None) -> None:
    for waiter in group:
        if not waiter.future.done():
            waiter.future.set_result(error)
