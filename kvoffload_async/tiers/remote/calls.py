"""Calls to a remote store: each with a deadline, repeated where that may help, counted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from kvoffload_async.errors import (
    TierError,
    TierTimeoutError,
    TierUnavailableError,
    drop_tracebacks,
)
from kvoffload_async.tiers.remote.client import RefusedError, RemoteClient
from kvoffload_async.tiers.remote.secrecy import Redactor

T = TypeVar("T")

_FIRST_PAUSE_S: Final = 0.05
_LAG_S: Final = 0.1
"""Who waits for a whole job or probe may give it up by so much before its calls' deadline."""


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

    After a fault of the server the next job first asks whether the server is there, which fails
    the job as a whole and no block of it: a dead server costs one short question, and not as many
    long ones as the job has portions.

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
        self._is_suspect = False
        self.counters = CallCounters()

    async def run(
        self, call: Callable[[], Awaitable[T]], deadline_s: float, *, may_retry: bool = True
    ) -> T:
        """Await a call; repeat it while that can help and there is time.

        Args:
            call: Begins the call.
            deadline_s: Loop time by which it is over.
            may_retry: Whether to repeat it.

        Raises:
            TierError: It failed.
        """
        attempt = 0
        while True:
            try:
                return await self._once(call, deadline_s)
            except RefusedError:
                raise
            except TierUnavailableError:
                is_last = not may_retry or attempt >= self._max_retries
                if is_last or not await self._pause(attempt, deadline_s):
                    raise
            attempt += 1
            self.counters.retries += 1

    async def check(self, deadline_s: float) -> None:
        """Ask whether the server is there, if there is reason to doubt it.

        Raises:
            TierUnavailableError: It is not.
        """
        if self._is_suspect:
            self.counters.health_checks += 1
            await self.run(self._client.check, deadline_s, may_retry=False)

    async def _once(self, call: Callable[[], Awaitable[T]], deadline_s: float) -> T:
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
            self._is_suspect = True  # nobody knows whether it would have answered
            if loop.time() >= deadline_s - _LAG_S:
                self.counters.failed += 1
                self.counters.timeouts += 1
            raise
        except TimeoutError:
            failure = TierTimeoutError(f"{place} did not answer within {seconds:.3g} s")
        except Exception as error:  # noqa: BLE001 - the library's own, of any kind
            failure = self._said(error)
        else:
            self._is_suspect = False
            return result
        self.counters.failed += 1
        self.counters.timeouts += isinstance(failure, TierTimeoutError)  # the library's own, too
        self._is_suspect = self._is_suspect or isinstance(failure, TierUnavailableError)
        try:
            raise failure  # without a cause, whose text might have secrets in it
        finally:
            del failure  # it holds this frame, and what its callers hold

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
