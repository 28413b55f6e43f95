"""Waiting on an event loop: timeouts, a limiter, delayed cancellation, coalesced blocking calls.

Coalescing: requests made during a call are served by the next one. So a hundred jobs that end
together need only a few journal appends and thread hand-overs, and a single job does not wait for
others. If a call hangs, another one is started in parallel.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, Self, TypeVar

from kvoffload_async.errors import StateError, TierClosedError, TierError, TierUnavailableError

T = TypeVar("T")

_MOST_S: Final = 1e9
"""Maximum timeout: 30 years; the system calls that wait reject ten times as much."""


def seconds(timeout: float, name: str = "timeout_s") -> float:
    """Return a timeout given by a caller, in seconds, but at most 30 years.

    Raises:
        StateError: It is negative or not finite.
    """
    try:
        is_valid = 0 <= timeout < math.inf
    except TypeError:
        is_valid = False
    if not is_valid:
        raise StateError(f"{name}: {timeout!r} is not valid; give seconds, at least 0 and finite")
    return min(timeout, _MOST_S)


class LastingFuture(asyncio.Future[T]):
    """A future that is not cancelled when its awaiter is cancelled.

    `Task.cancel` first asks the awaited future to cancel itself. This future refuses, so the task
    receives the cancellation only when the future is done. The future's exception then counts as
    retrieved.

    Not thread-safe; call only from the event loop's thread.
    """

    def __init__(self, withdraw: Callable[[], object] | None = None) -> None:
        """Create a future of the running loop.

        Args:
            withdraw: Called on a cancellation before the end. If it returns true, the operation is
                no longer in flight, and the future is cancelled at once.
        """
        super().__init__(loop=asyncio.get_running_loop())
        self._withdraw = withdraw
        """Cleared at the end to break a reference cycle with the callback."""

    def cancel(self, msg: Any = None) -> bool:  # noqa: ANN401 - as in the base class
        """Cancel the future if `withdraw` allows it; return whether it was cancelled."""
        if self._withdraw is None or not self._withdraw():
            return False
        self._withdraw = None
        return super().cancel(msg)

    def set_result(self, result: T) -> None:
        """Mark the future done with a result."""
        self._withdraw = None
        super().set_result(result)

    def set_exception(self, error: type[BaseException] | BaseException) -> None:
        """Mark the future done with an exception."""
        self._withdraw = None
        super().set_exception(error)


async def all_done(*futures: asyncio.Future[Any]) -> None:
    """Wait until all futures are done, delaying a cancellation until then. Loop thread only."""
    pending = {future for future in futures if not future.done()}
    if pending:
        ended: LastingFuture[None] = LastingFuture()

        def end(future: asyncio.Future[Any]) -> None:
            pending.discard(future)
            if not pending:
                ended.set_result(None)

        for future in tuple(pending):
            future.add_done_callback(end)
        await ended


async def until_done(future: asyncio.Future[T]) -> T:
    """Wait for a future and return its result, delaying a cancellation until it is done.

    Loop thread only.
    """
    try:
        await all_done(future)
        return future.result()
    except asyncio.CancelledError:
        if not future.cancelled():
            future.exception()  # mark as retrieved, or asyncio logs it
        raise
    finally:
        del future  # break the cycle: exception, traceback, frame, future


class Permit:
    """Admission by a `Limiter`; a context manager that releases it on exit, unless kept."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._is_kept = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        if not self._is_kept:
            self._release()

    def keep(self) -> Callable[[], None]:
        """Keep the permit beyond its context; return the function that releases it."""
        self._is_kept = True
        return self._release


class Limiter:
    """Limits the number of concurrent callers and their total bytes; FIFO.

    A caller with more bytes than the limit is admitted when no other holds bytes. Neither
    `asyncio.Semaphore` nor `anyio.CapacityLimiter` counts bytes in addition to callers.

    Not thread-safe; call only from the event loop's thread.

    Attributes:
        max_bytes: The current limit of bytes.
        bytes_in_flight: Total bytes of the admitted callers.
    """

    def __init__(self, permits: int, num_bytes: int = 0) -> None:
        """Limit admission to `permits` callers, at least 1, with `num_bytes` bytes in total."""
        self.max_bytes = num_bytes
        self.bytes_in_flight = 0
        self._free_permits = permits
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def try_acquire(self, num_bytes: int = 0) -> Permit | None:
        """Return a permit, or None if the caller has to wait."""
        if self._waiting or not self._fits(num_bytes):
            return None
        self._take(num_bytes)
        return Permit(partial(self._give_back, num_bytes))

    async def acquire(self, num_bytes: int = 0) -> Permit:
        """Wait for admission; a cancelled wait takes no permit."""
        if (permit := self.try_acquire(num_bytes)) is not None:
            return permit
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, admitted))
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.cancelled():
                self._admit()  # a later caller may fit
            else:
                self._give_back(num_bytes)
            raise
        return Permit(partial(self._give_back, num_bytes))

    def open(self) -> None:
        """Add one permit per waiting caller."""
        self._free_permits += len(self._waiting)
        self._admit()

    def resize(self, num_bytes: int) -> None:
        """Change the limit of bytes; it holds for callers admitted from now on."""
        self.max_bytes = num_bytes
        self._admit()

    def _fits(self, num_bytes: int) -> bool:
        in_flight = self.bytes_in_flight
        return self._free_permits > 0 and (in_flight + num_bytes <= self.max_bytes or not in_flight)

    def _take(self, num_bytes: int) -> None:
        self._free_permits -= 1
        self.bytes_in_flight += num_bytes

    def _give_back(self, num_bytes: int) -> None:
        self._free_permits += 1
        self.bytes_in_flight -= num_bytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            num_bytes, admitted = self._waiting[0]
            if not admitted.done():  # otherwise the wait was cancelled
                if not self._fits(num_bytes):
                    return
                self._take(num_bytes)
                admitted.set_result(None)
            self._waiting.popleft()


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
        """Consider the call of a turn hanging, and start another turn."""
        if self._current is turn:
            self._current = None
            self._start()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._current is None:
            self._start()


class Coalescer(_TurnServer, Generic[T]):
    """Coalesces waiting items into blocking calls on an I/O thread. Thread: loop."""

    def __init__(self, name: str, call: Call[T], run: Runner) -> None:
        """Create the coalescer on the event loop that awaits its calls.

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
        """Make one call for the items of a group. Thread: an I/O thread."""
        self._call(
            [waiter.item for waiter in group],
            lambda: any(waiter.is_waiting for waiter in group),
        )


@dataclass(slots=True, eq=False)
class _Boxed(Generic[T]):
    """A call and its result or exception."""

    call: Callable[[], T]
    future: asyncio.Future[None]
    returned: list[T] = field(default_factory=list)
    error: BaseException | None = None
    has_ended: bool = False

    def make(self) -> None:
        """Make the call, and keep its result or exception. Thread: an I/O thread."""
        try:
            self.returned.append(self.call())
        except BaseException as error:  # noqa: BLE001 - passed to the waiter
            self.error = error
        self.has_ended = True

    def fail(self, error: BaseException) -> None:
        """Complete the call with an error, without making it. Thread: loop."""
        kind = type(error) if isinstance(error, TierError) else TierUnavailableError
        self.error = kind(str(error))
        self.error.__cause__ = error
        self.has_ended = True

    def result(self) -> T:
        """Return the call's result or raise its exception; call only once."""
        if self.error is not None:
            error, self.error = self.error, None
            try:
                raise error
            finally:
                del error  # avoid a cycle of exception and frame, which keeps job memory
        return self.returned.pop()


class SerialExecutor(_TurnServer):
    """Runs blocking calls one after another; all that wait share one hand-over to a thread.

    If a call hangs, after `_PATIENCE_S` the calls behind it are moved to another thread, and
    completed ones are reported.

    Thread: loop; the calls run on an I/O thread.
    """

    def __init__(self, name: str, run: Runner) -> None:
        """Create the executor on the event loop that awaits its calls; see `Coalescer`."""
        super().__init__(name, run)
        self._waiting: deque[_Boxed[Any]] = deque()
        """Waiting calls; threads, and the loop on cancellation, remove entries, each atomically."""

    async def run(self, call: Callable[[], T], /) -> T:
        """Run a blocking call and return its result; for cancellation see `Coalescer.add`.

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
