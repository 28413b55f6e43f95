"""Calls to a remote store: each with a deadline, repeated where that may help, counted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from kvoffload_async.errors import (
    ShardUnavailableError,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
    drop_tracebacks,
)
from kvoffload_async.tiers.remote.client import RefusedError, RemoteClient, Server
from kvoffload_async.tiers.remote.settings import Redactor


async def run_together(coroutines: Iterable[Coroutine[Any, Any, None]], name: str) -> None:
    """Run all of them until they have ended; the first one that raises ends the others.

    A `TaskGroup` that is cancelled is left in a reference cycle with the frames of those who await
    it: the primary's rows would stay in use until the garbage collector finds it.

    Args:
        coroutines: What to run.
        name: Of the tasks.
    """
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(coroutine, name=name) for coroutine in coroutines]
    if not tasks:
        return
    try:
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()
    finally:
        del tasks, task  # a task holds what it has raised, and that holds this frame


T = TypeVar("T")

_FIRST_PAUSE_S: Final = 0.05
_LAG_S: Final = 0.1
"""Who waits for a whole job or probe may give it up by so much before its calls' deadline."""
_RECENTLY_S: Final = 60.0
"""A server of several that has answered since then is one that works."""


@dataclass(slots=True)
class CallCounters:
    """What calls have come to.

    Attributes:
        requests: Calls that were begun, retries included.
        retries: Those that repeat one that failed.
        failed: Those that failed, for whatever reason.
        timeouts: Those of the failed ones that had no answer in time.
        health_checks: Those that asked whether the server is there.
    """

    requests: int = 0
    retries: int = 0
    failed: int = 0
    timeouts: int = 0
    health_checks: int = 0


class Calls:
    """Makes calls of one client.

    After a fault of a server the next job or probe first asks whether the server is there, which
    fails it as a whole if it has no keys on another server: a dead server costs one short
    question, and not as many long ones as the job has portions. One of several servers that did
    not answer in time is not asked again for as long as a call may take.

    Thread: loop.
    """

    def __init__(
        self,
        client: RemoteClient,
        redact: Redactor,
        *,
        call_timeout_s: float,
        max_retries: int,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """Make none yet.

        Args:
            client: Whose calls.
            redact: Hides secrets in what errors say.
            call_timeout_s: Seconds for one call.
            max_retries: How often a call is repeated.
            jitter: Returns a number from 0 to 1: pauses are drawn, so that clients do not come
                back all at once.
        """
        self._client = client
        self._redact = redact
        self._call_timeout_s = call_timeout_s
        self._max_retries = max_retries
        self._jitter = jitter
        self._suspects: dict[Server, float] = {}
        """Servers that may be down, each with the loop time until which it is not asked."""
        self._answered_s: dict[Server, float] = {}
        """Of several servers, when each has answered last."""
        self.counters = CallCounters()

    async def run(
        self,
        call: Callable[[], Awaitable[T]],
        deadline_s: float,
        *,
        server: Server = None,
        may_retry: bool = True,
    ) -> T:
        """Await a call; repeat it while that can help and there is time.

        Args:
            call: Begins the call.
            deadline_s: Loop time by which it is over.
            server: Which one it is made to.
            may_retry: Whether to repeat it.

        Raises:
            TierError: It failed.
        """
        attempt = 0
        while True:
            try:
                return await self._once(call, deadline_s, server)
            except RefusedError:
                raise
            except TierUnavailableError:
                is_last = not may_retry or attempt >= self._max_retries
                if is_last or not await self._pause(attempt, deadline_s):
                    raise
            attempt += 1
            self.counters.retries += 1

    async def check(
        self, servers: Collection[Server], deadline_s: float
    ) -> dict[Server, TierError]:
        """Ask servers whether they are there, as far as there is reason to doubt it.

        Returns:
            Which are not, and why.

        Raises:
            TierUnavailableError: None of them is.
        """
        failures: dict[Server, TierError] = {}

        async def ask(server: Server) -> None:
            if asyncio.get_running_loop().time() < self._suspects[server]:
                text = f"{self._client.place}: the server did not answer lately"
                failures[server] = self.fault_of(server, TierTimeoutError(text))
                return
            self.counters.health_checks += 1
            call = partial(self._client.check_server, server)
            try:
                await self.run(call, deadline_s, server=server, may_retry=False)
            except TierError as error:
                drop_tracebacks(error)
                failures[server] = self.fault_of(server, error)

        suspects = [server for server in servers if server in self._suspects]
        await run_together(map(ask, suspects), "remote:check")
        if failures and len(failures) == len(servers):
            try:
                raise next(iter(failures.values()))
            finally:
                failures.clear()  # they hold this frame, and what its callers hold
        return failures

    def fault_of(self, server: Server, error: TierError) -> TierError:
        """Return an error as that of one server, if it is one and others work."""
        now_s = asyncio.get_running_loop().time()
        others_work = any(
            other != server and now_s - answered_s < _RECENTLY_S
            for other, answered_s in self._answered_s.items()
        )
        if others_work and isinstance(error, TierUnavailableError):
            return ShardUnavailableError(str(error))
        return error

    async def _once(self, call: Callable[[], Awaitable[T]], deadline_s: float, server: Server) -> T:
        place = self._client.place
        loop = asyncio.get_running_loop()
        seconds = max(0.0, min(self._call_timeout_s, deadline_s - loop.time()))
        self.counters.requests += 1
        failure: TierError
        try:
            # A deadline that has passed ends the call at its first step.
            async with asyncio.timeout(seconds):
                result = await call()
        except asyncio.CancelledError:
            has_timed_out = loop.time() >= deadline_s - _LAG_S
            if has_timed_out:
                self.counters.failed += 1
                self.counters.timeouts += 1
            # Otherwise nobody knows whether it would have answered.
            self._doubt(server, has_timed_out=has_timed_out)
            raise
        except TimeoutError:
            failure = TierTimeoutError(f"{place} did not answer within {seconds:.3g} s")
        except Exception as error:  # noqa: BLE001 - the library's own, of any kind
            failure = self._said(error)
        else:
            self._suspects.pop(server, None)
            if server is not None:
                self._answered_s[server] = loop.time()
            return result
        self.counters.failed += 1
        has_timed_out = isinstance(failure, TierTimeoutError)  # the library's own, too
        self.counters.timeouts += has_timed_out
        if isinstance(failure, TierUnavailableError):
            self._answered_s.pop(server, None)
            self._doubt(server, has_timed_out=has_timed_out)
        try:
            raise failure  # without a cause, whose text might have secrets in it
        finally:
            del failure  # it holds this frame, and what its callers hold

    def _doubt(self, server: Server, *, has_timed_out: bool) -> None:
        pause_s = self._call_timeout_s if has_timed_out and server is not None else 0.0
        self._suspects[server] = asyncio.get_running_loop().time() + pause_s

    def _said(self, error: Exception) -> TierError:
        """Return what an error of the library means, without its secrets."""
        mapped = self._client.mapped(error)
        drop_tracebacks(error)  # the library's frames may hold it, and they hold their callers'
        return type(mapped)(f"{self._client.place}: {self._redact(mapped)}")

    async def _pause(self, attempt: int, deadline_s: float) -> bool:
        """Wait before a retry, twice as long each time; False if there is no time for one."""
        seconds = _FIRST_PAUSE_S * 2**attempt * (0.5 + self._jitter() / 2)
        if asyncio.get_running_loop().time() + seconds >= deadline_s:
            return False
        await asyncio.sleep(seconds)
        return True
