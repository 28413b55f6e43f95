"""Calls to a remote store: deadlines, retries, counters, and the admission of transfers."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Final, Self, TypeVar

from kvoffload_async.errors import (
    CallTimeoutError,
    ServerHangError,
    ShardUnavailableError,
    SlowDownError,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
    drop_tracebacks,
)
from kvoffload_async.tiers.remote.client import RefusedError, RemoteClient, Server, hearing
from kvoffload_async.tiers.remote.settings import RemoteCounters, RemoteSettings
from kvoffload_async.tiers.remote.window import Departure, Window
from kvoffload_async.waiting import Limiter, all_done


class InFlight:
    """Admits the transfers of one direction within its `Window`, which it feeds. Thread: loop.

    Attributes:
        window: The control law.
        limiter: Admits the transfers in the order of their arrival; it always admits one.
        alive_s: Loop time at which a portion last ended with success, or the server asked for fewer
            calls.
    """

    def __init__(self, most_calls: int, window: Window) -> None:
        """Admit at most `most_calls` at once, whatever their bytes."""
        self.window = window
        self.limiter = Limiter(most_calls, window.limit_bytes)
        self.alive_s = -math.inf

    def departs(self, num_bytes: int) -> Departure:
        """Return the state at the start of an admitted transfer, to be passed to `arrives`."""
        is_alone = self.limiter.bytes_in_flight <= num_bytes
        return self.window.departs(asyncio.get_running_loop().time(), is_alone=is_alone)

    def arrives(self, departure: Departure, num_bytes: int) -> None:
        """Record a successful transfer; one of 0 bytes does not change the window."""
        if num_bytes:
            now_s = asyncio.get_running_loop().time()
            self.window.arrives(departure, num_bytes, self.limiter.bytes_in_flight, now_s)
            self.limiter.resize(self.window.limit_bytes)

    def back_off(self, began_s: float) -> None:
        """Halve the window, as a call that began at this loop time found too many in flight."""
        self.window.back_off(began_s, asyncio.get_running_loop().time())
        self.limiter.resize(self.window.limit_bytes)


class Together:
    """Tasks that have ended when its context ends; the first exception cancels the others.

    So does an exception of the context. A cancelled `TaskGroup` would remain in a reference cycle
    with its callers' frames, and keep the primary's rows in use until garbage collection.
    """

    def __init__(self, name: str) -> None:
        """Begin without tasks; `name` will be their name."""
        self._name = name
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task."""
        task = asyncio.get_running_loop().create_task(coroutine, name=self._name)
        self._tasks.append(task)
        return task

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_exc_info: object) -> None:
        tasks, self._tasks = self._tasks, []
        task = None
        try:
            if tasks and kind is None:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await all_done(*tasks)
        try:
            for task in tasks:
                if not task.cancelled() and kind is None:
                    task.result()
        finally:
            del tasks, task  # avoid a reference cycle of tasks, exceptions and frame


async def run_together(coroutines: Iterable[Coroutine[Any, Any, Any]], name: str) -> None:
    """Run coroutines as tasks of a `Together`; a single one runs in the caller's task."""
    waiting = list(coroutines)
    if len(waiting) == 1:
        await waiting[0]
        return
    async with Together(name) as together:
        for coroutine in waiting:
            together.start(coroutine)


async def run_few(coroutines: Iterator[Coroutine[Any, Any, None]], most: int, name: str) -> None:
    """Run coroutines, at most `most` at once; each is taken when its turn comes."""

    async def work() -> None:
        for coroutine in coroutines:
            await coroutine

    await run_together((work() for _ in range(most)), name)


T = TypeVar("T")

_FIRST_PAUSE_S: Final = 0.05
_LAG_S: Final = 0.1
"""A caller's timeout of a job or probe may expire this many seconds before its calls' deadline."""
_LATE_PART: Final = 2 / 3
"""Part of a check's deadline after which an answer is late: it queued behind payload."""
_MAX_DOUBLINGS: Final = 5
"""Doublings of the pause before a retry; at most 1.6 s."""
_RECENTLY_S: Final = 60.0
"""A server that answered within this time counts as working."""


class HangDetector:
    """Distinguishes slow calls from servers that hang.

    While calls to a server have lasted longer than a quarter of the response timeout, the server
    is checked. If it does not answer a check within the rest, it hangs, and these calls time out at
    once. So a hang costs the response timeout, and a slow call may take as long as before.
    Any answer, to whichever call, renews the deadline of the check, which may queue behind payload.

    Thread: loop.
    """

    def __init__(
        self,
        check: Callable[[Server], Awaitable[None]],
        response_timeout_s: float,
        back_off: Callable[[float], object] = lambda _began_s: None,
    ) -> None:
        """Create a detector that observes no call yet.

        Args:
            check: Checks a server; any end, also an error, shows that it does not hang.
            response_timeout_s: Seconds in which a server answers a call or a check made during the
                call, unless it hangs.
            back_off: Called with the start of a check (loop time) whose answer was late.
        """
        self._check = check
        self._back_off = back_off
        self._slow_s = response_timeout_s / 4
        self._check_s = response_timeout_s - self._slow_s
        self._slow: dict[Server, set[asyncio.Timeout]] = {}
        self._tasks: dict[Server, asyncio.Task[None]] = {}
        self._checks: dict[Server, asyncio.Timeout] = {}
        self._hung_s: dict[Server, float] = {}
        """Server -> loop time at which it was last found to hang."""

    def hangs_since(self, server: Server, began_s: float) -> bool:
        """Return whether a server was found to hang at or after a loop time."""
        return self._hung_s.get(server, -math.inf) >= began_s

    def heard(self, server: Server) -> None:
        """Record that a server has sent data, so it does not hang."""
        check = self._checks.get(server)
        if check is not None and not check.expired():
            check.reschedule(asyncio.get_running_loop().time() + self._check_s)

    @contextmanager
    def observing(self, server: Server, timer: asyncio.Timeout) -> Iterator[None]:
        """Observe a call; `timer` expires early if the server hangs."""
        loop = asyncio.get_running_loop()
        handle = loop.call_later(self._slow_s, self._is_slow, server, timer)
        try:
            yield
        finally:
            handle.cancel()
            self._slow.get(server, set()).discard(timer)

    async def close(self) -> None:
        """Cancel running checks."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _is_slow(self, server: Server, timer: asyncio.Timeout) -> None:
        self._slow.setdefault(server, set()).add(timer)
        if server not in self._tasks:
            task = asyncio.get_running_loop().create_task(self._run(server), name="remote:slow")
            self._tasks[server] = task

    async def _run(self, server: Server) -> None:
        """Check a server repeatedly until its slow calls have ended, or until it counts as hung."""
        loop = asyncio.get_running_loop()
        try:
            while self._slow.get(server):
                began_s = loop.time()
                try:
                    async with asyncio.timeout(self._check_s) as self._checks[server]:
                        await self._check(server)
                    if loop.time() - began_s > _LATE_PART * self._check_s:
                        self._back_off(began_s)
                except TimeoutError:
                    self._hung_s[server] = now_s = loop.time()
                    for timer in self._slow.pop(server):
                        if not timer.expired():
                            timer.reschedule(now_s)
                    return
                except Exception as error:  # noqa: BLE001 - any exception of the library
                    drop_tracebacks(error)
                finally:
                    del self._checks[server]
                await asyncio.sleep(self._slow_s)
        finally:
            del self._tasks[server]


class Calls:
    """Runs the calls of one client, with deadlines and retries.

    After a server failed, the next job or probe first checks it, and fails at once if it has no
    keys on another server: a dead server costs one short call instead of a long one per portion.
    One of several servers that timed out is not called again for `call_timeout_s`. A server that
    hangs ends its calls early; see `HangDetector`.

    Thread: loop.
    """

    def __init__(
        self,
        client: RemoteClient,
        settings: RemoteSettings,
        counters: RemoteCounters,
        back_off: Callable[[float], object] = lambda _began_s: None,
    ) -> None:
        """Create the object without making a call.

        Args:
            client: Client whose calls are made.
            settings: Deadlines and retries; `probe_timeout_s` is the servers' response timeout.
            counters: Counts the calls.
            back_off: Called with the start (loop time) of a call or check that found too many
                calls in flight.
        """
        self._client = client
        self.counters = counters
        self._settings = settings
        self._back_off = back_off
        self._hangs = HangDetector(client.check, settings.probe_timeout_s, back_off)
        self._suspects: dict[Server, float] = {}
        """Servers that may be down -> loop time before which they are not called."""
        self._answered_s: dict[Server, float] = {}
        """With several servers: server -> loop time of its last answer."""

    async def run(
        self,
        call: Callable[[], Awaitable[T]],
        deadline_s: float,
        *,
        server: Server = None,
        may_retry: bool = True,
        may_hang: bool = True,
        timeout_s: float | None = None,
    ) -> T:
        """Await a call, with retries while they can help and time is left.

        While the server says "slow down", `max_retries` does not count.

        Args:
            call: Starts the call.
            deadline_s: Loop time of the deadline.
            server: The server called.
            may_retry: Whether to retry.
            may_hang: Whether the call ends early, and is not repeated, if the server hangs.
            timeout_s: Timeout of an attempt in seconds, in place of `call_timeout_s`.

        Raises:
            TierError: The call failed.
        """
        loop = asyncio.get_running_loop()
        attempt = failures = 0
        began_s = loop.time()
        timeout_s = timeout_s or self._settings.call_timeout_s
        while True:
            attempt_s = loop.time()
            if attempt_s >= deadline_s:  # the server is not to blame
                raise TierTimeoutError(f"{self._client.location}: no time is left for a call")
            try:
                return await self._once(
                    call, deadline_s, server, may_hang=may_hang, timeout_s=timeout_s
                )
            except RefusedError:
                raise
            except SlowDownError:
                self.counters.slow_downs += 1
                self._back_off(attempt_s)
                if not may_retry or not await self._pause(attempt, deadline_s):
                    raise
            except TierUnavailableError:
                failures += 1
                is_last = not may_retry or failures > self._settings.max_retries
                if (
                    is_last
                    or self._hangs.hangs_since(server, began_s)
                    or not await self._pause(attempt, deadline_s)
                ):
                    raise
            attempt += 1
            self.counters.retries += 1

    async def check(
        self, servers: Collection[Server], deadline_s: float
    ) -> dict[Server, TierError]:
        """Check the servers that failed recently.

        Returns:
            The servers that do not respond, with their errors.

        Raises:
            TierUnavailableError: None of them responds.
        """
        failures: dict[Server, TierError] = {}

        async def ask(server: Server) -> None:
            if asyncio.get_running_loop().time() < self._suspects.get(server, -math.inf):
                text = f"{self._client.location}: the server timed out recently"
                failures[server] = self.fault_of(server, CallTimeoutError(text))
                return
            self.counters.health_checks += 1
            call = partial(self._client.check, server)
            until_s = asyncio.get_running_loop().time() + self._settings.probe_timeout_s
            try:
                await self.run(call, min(deadline_s, until_s), server=server, may_retry=False)
            except TierUnavailableError as error:
                drop_tracebacks(error)
                failures[server] = self.fault_of(server, error)
            except TierError as error:  # it responds, if only to ask for fewer calls
                drop_tracebacks(error)
                self._suspects.pop(server, None)

        suspects = [server for server in servers if server in self._suspects]
        await run_together(map(ask, suspects), "remote:check")
        if failures and len(failures) == len(servers):
            try:
                raise next(iter(failures.values()))
            finally:
                failures.clear()  # avoid a reference cycle of exceptions and frame
        return failures

    def require(self, server: Server, began_s: float) -> None:
        """Check that no hang of a server was detected since a loop time.

        Raises:
            ServerHangError: A hang was detected.
        """
        if self._hangs.hangs_since(server, began_s):
            raise ServerHangError(f"{self._client.location}: the server hangs")

    async def close(self) -> None:
        """Cancel the checks that run concurrently with slow calls."""
        await self._hangs.close()

    def fault_of(self, server: Server, error: TierError) -> TierError:
        """Return the error as a `ShardUnavailableError` if other servers work."""
        now_s = asyncio.get_running_loop().time()
        others_work = any(
            other != server and now_s - answered_s < _RECENTLY_S
            for other, answered_s in self._answered_s.items()
        )
        if others_work and isinstance(error, TierUnavailableError):
            return ShardUnavailableError(str(error))
        return error

    async def _once(
        self,
        call: Callable[[], Awaitable[T]],
        deadline_s: float,
        server: Server,
        *,
        may_hang: bool,
        timeout_s: float,
    ) -> T:
        location = self._client.location
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        seconds = min(timeout_s, deadline_s - began_s)
        self.counters.requests += 1
        failure: TierError
        try:
            async with asyncio.timeout(seconds) as timer:
                is_observed = may_hang and seconds > self._settings.probe_timeout_s
                observing = self._hangs.observing(server, timer) if is_observed else nullcontext()
                with hearing(partial(self._hangs.heard, server)), observing:
                    result = await call()
        except asyncio.CancelledError:
            has_timed_out = loop.time() >= deadline_s - _LAG_S
            # Otherwise it is unknown whether it would have answered.
            self.counters.failed += has_timed_out
            self.counters.timeouts += has_timed_out
            self._doubt(server, has_timed_out=has_timed_out)
            raise
        except TimeoutError:
            passed_s = loop.time() - began_s
            kind: type[TierTimeoutError] = TierTimeoutError  # of the job or the probe
            if seconds == timeout_s and passed_s >= seconds - _LAG_S:
                kind = CallTimeoutError
            elif self._hangs.hangs_since(server, began_s):
                kind = ServerHangError
            failure = kind(f"{location} did not answer within {min(seconds, passed_s):.3g} s")
        except Exception as error:  # noqa: BLE001 - any exception of the library
            failure = self._redacted_error(error)
        else:
            self._suspects.pop(server, None)
            if server is not None:
                self._answered_s[server] = loop.time()
            self._hangs.heard(server)
            return result
        self.counters.failed += 1
        has_timed_out = isinstance(failure, TierTimeoutError)  # includes the library's own timeouts
        self.counters.timeouts += has_timed_out
        if not has_timed_out:
            self._hangs.heard(server)
        if isinstance(failure, TierUnavailableError):
            self._answered_s.pop(server, None)
            self._doubt(server, has_timed_out=has_timed_out)
        try:
            raise failure  # without a cause, whose text might contain secrets
        finally:
            del failure  # avoid a reference cycle of exception and frame

    def _doubt(self, server: Server, *, has_timed_out: bool) -> None:
        pause_s = self._settings.call_timeout_s if has_timed_out and server is not None else 0.0
        until_s = asyncio.get_running_loop().time() + pause_s
        self._suspects[server] = max(until_s, self._suspects.get(server, until_s))

    def _redacted_error(self, error: Exception) -> TierError:
        """Convert an error of the library, with secrets removed."""
        mapped = self._client.mapped(error)
        drop_tracebacks(error)  # library frames may hold it, and they hold their callers'
        return type(mapped)(f"{self._client.location}: {self._settings.redact(mapped)}")

    async def _pause(self, attempt: int, deadline_s: float) -> bool:
        """Wait before a retry, with exponential backoff; False if no time is left."""
        jitter = random.random()  # noqa: S311 - so that clients do not retry in lockstep
        seconds = _FIRST_PAUSE_S * 2 ** min(attempt, _MAX_DOUBLINGS) * (0.5 + jitter / 2)
        if asyncio.get_running_loop().time() + seconds >= deadline_s:
            return False
        await asyncio.sleep(seconds)
        return True
