"""One blocking call at a time for all who wait for it: who comes meanwhile is served by the next.

So a hundred jobs that end together cost a few appends to the journal and hand-overs to a thread,
and a single one waits for nobody. Only a call that hangs is not waited for: another is made beside
it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, TypeVar

from kvoffload_async.errors import TierClosedError, TierError, TierUnavailableError
from kvoffload_async.waiting import LastingFuture

T = TypeVar("T")

Call = Callable[[Sequence[T], Callable[[], bool]], None]
"""Takes items, and what tells whether anybody still waits for them. Thread: an I/O thread."""

_PATIENCE_S: Final = 0.25
"""How long a call may take before those who came meanwhile get one of their own."""

_MOST_CALLS: Final = 3
"""How many are made at once then, at most: each has a thread."""

Runner = Callable[[Callable[[], None]], Awaitable[None]]


@dataclass(slots=True, eq=False)
class _Waiter(Generic[T]):
    """Who waits, and whether it does so still."""

    item: T
    future: asyncio.Future[BaseException | None]
    is_waiting: bool = True


class Coalescer(Generic[T]):
    """A call that takes several items. Thread: loop; the call itself is made by an I/O thread."""

    def __init__(self, name: str, call: Call[T], run: Runner) -> None:
        """Describe it, on the loop that awaits it.

        Args:
            name: Of its task.
            call: Takes all that wait; what it raises is everybody's.
            run: Runs a blocking call on a thread.
        """
        self._name = name
        self._call = call
        self._run = run
        self._loop = asyncio.get_running_loop()
        self._waiting: list[_Waiter[T]] = []
        self._current: object | None = None
        """The last call that was begun, as long as it is not taken for one that hangs."""
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, item: T) -> asyncio.Future[BaseException | None]:
        """Have the next call take an item; the future ends with what that raises."""
        return self._enqueue(_Waiter(item, self._loop.create_future()))

    def _enqueue(self, waiter: _Waiter[T]) -> asyncio.Future[BaseException | None]:
        self._waiting.append(waiter)
        if self._current is None:
            self._start()
        return waiter.future

    async def add(self, item: T) -> BaseException | None:
        """Return what the call raises that takes the item.

        Cancelled, it returns when the call has ended, or at once if that has not begun: then it
        leaves the item out.
        """
        waiter: _Waiter[T] = _Waiter(item, LastingFuture(lambda: self._leave(waiter)))
        return await self._enqueue(waiter)

    def _leave(self, waiter: _Waiter[T]) -> bool:
        """Take an item back; False if a call has it."""
        waiter.is_waiting = False
        if waiter not in self._waiting:
            return False
        self._waiting.remove(waiter)
        return True

    async def close(self) -> None:
        """Wait until no call is made any more."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _start(self) -> None:
        """Begin to serve those who wait, unless there are too many calls that hang."""
        if self._waiting and len(self._tasks) < _MOST_CALLS:
            call = self._current = object()
            task = self._loop.create_task(self._serve(call), name=self._name)
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._current is None:
            self._start()

    def _give_up(self, call: object) -> None:
        """Take a call for one that hangs."""
        if self._current is call:
            self._current = None
            self._start()

    async def _serve(self, call: object) -> None:
        group: Sequence[_Waiter[T]] = ()
        failure: BaseException | None = None
        try:
            while self._waiting and self._current is call:
                group, self._waiting = self._waiting, []
                failure = None
                timer = self._loop.call_later(_PATIENCE_S, self._give_up, call)
                try:
                    await self._run(partial(self._make, group))
                except Exception as error:  # noqa: BLE001 - handed to those who wait
                    failure = error
                finally:
                    timer.cancel()
                _end(group, failure)
        except GeneratorExit:  # the loop has gone, and those who wait with it
            raise
        except BaseException as error:
            _end(group, error)
            raise
        finally:
            if self._current is call:
                self._current = None
            del group, failure  # what is raised holds this frame, and with it the job's memory

    def _make(self, group: Sequence[_Waiter[T]]) -> None:
        """Make the call. Thread: an I/O thread."""
        self._call(
            [waiter.item for waiter in group],
            lambda: any(waiter.is_waiting for waiter in group),
        )


class _Boxed(Generic[T]):
    """A call, and then what it has returned or raised."""

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
        except BaseException as error:  # noqa: BLE001 - whoever waits for it is told
            self._error = error
        self.has_ended = True

    def fail(self, error: BaseException) -> None:
        """End without having been made. Thread: loop."""
        kind = type(error) if isinstance(error, TierError) else TierUnavailableError
        self._error = kind(str(error))
        self._error.__cause__ = error
        self.has_ended = True

    def result(self) -> T:
        """Return what the call has returned, or raise what it has raised; once."""
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # it holds this frame, and the job's memory with that
        return self._results.pop()


@dataclass(slots=True, eq=False)
class _Turn:
    """What a thread is handed: calls, of which it makes one after the other.

    Attributes:
        taken: What it has taken, to be told as soon as it has ended.
        timer: Looks whether it goes on.
    """

    taken: list[_Boxed[Any]] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


class SerialExecutor:
    """Runs calls that block, each on its own account: all that wait are one hand-over to a thread.

    One that hangs costs the others `_PATIENCE_S`: what was to come behind it is made by another
    thread, and what has ended before it is told.

    Thread: loop; the calls are made by an I/O thread.
    """

    def __init__(self, name: str, run: Runner) -> None:
        """Begin with none, on the loop that awaits them; see `Coalescer`."""
        self._name = name
        self._run = run
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Boxed[Any]] = deque()
        """Threads take from it, and the loop what is cancelled: both in one step."""
        self._current: _Turn | None = None
        """The last turn that was begun, as long as it is not taken for one that hangs."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, call: Callable[[], T], /) -> T:
        """Return what a call returns; cancelled, as `Coalescer.add`.

        Raises:
            TierError: No thread can be had.
        """
        if self._loop.is_closed():  # whoever was left on it is being collected
            raise TierClosedError("the loop has gone")
        boxed = _Boxed(call, LastingFuture(lambda: self._leave(boxed)))
        self._waiting.append(boxed)
        if self._current is None:
            self._start()
        await boxed.future
        return boxed.result()

    async def close(self) -> None:
        """Wait until no call is made any more."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _leave(self, boxed: _Boxed[Any]) -> bool:
        """Take a call back; False if a thread has it."""
        try:
            self._waiting.remove(boxed)
        except ValueError:
            return False
        return True

    def _start(self) -> None:
        """Begin to make what waits, unless there are too many calls that hang."""
        if self._waiting and len(self._tasks) < _MOST_CALLS:
            turn = self._current = _Turn()
            task = self._loop.create_task(self._serve(turn), name=self._name)
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._current is None:
            self._start()

    async def _serve(self, turn: _Turn) -> None:
        try:
            while self._waiting and self._current is turn:
                turn.timer = self._loop.call_later(_PATIENCE_S, self._look, turn)
                try:
                    await self._run(partial(self._make, turn))
                finally:
                    turn.timer.cancel()
                    _tell(turn)
        except GeneratorExit:  # the loop has gone, and those who wait with it
            raise
        except Exception as error:  # noqa: BLE001 - no thread: those who wait are told
            self._refuse(error)
        except BaseException as error:
            self._refuse(error)
            raise
        finally:
            if self._current is turn:
                self._current = None

    def _make(self, turn: _Turn) -> None:
        """Make the calls that wait now. Thread: an I/O thread."""
        for _ in range(len(self._waiting)):
            try:
                boxed = self._waiting.popleft()
            except IndexError:  # another thread was faster
                return
            turn.taken.append(boxed)
            boxed.make()

    def _look(self, turn: _Turn) -> None:
        """Tell what has ended; if nothing has, have another thread make what comes behind it."""
        if not _tell(turn) and turn.taken and self._current is turn:
            self._current = None
            self._start()
        turn.timer = self._loop.call_later(_PATIENCE_S, self._look, turn)

    def _refuse(self, error: BaseException) -> None:
        """End whatever waits."""
        while self._waiting:
            boxed = self._waiting.popleft()
            boxed.fail(error)
            boxed.future.set_result(None)


def _tell(turn: _Turn) -> bool:
    """Tell who waits for what has ended; return whether anything has."""
    ended = [boxed for boxed in turn.taken if boxed.has_ended]
    for boxed in ended:
        turn.taken.remove(boxed)
        boxed.future.set_result(None)
    return bool(ended)


def _end(group: Sequence[_Waiter[T]], error: BaseException | None) -> None:
    for waiter in group:
        if not waiter.future.done():
            waiter.future.set_result(error)
