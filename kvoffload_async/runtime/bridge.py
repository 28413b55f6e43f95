"""The two one-way queues between the owner's thread and the loop's.

Outbox: the ports' effects, handed over in one wake-up a batch. Inbox: a `deque` a tier, to which
the actor appends and which the owner drains. There is no lock, and neither side waits.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvoffload_async.abc.events import BlocksAppeared, BlocksEvicted, TierEvent
from kvoffload_async.abc.tier import AsyncTier, CloseReport, IoRunner
from kvoffload_async.core.port import TierPort
from kvoffload_async.errors import OffloadError
from kvoffload_async.runtime.interpreter import execute
from kvoffload_async.runtime.io_pool import IoPool
from kvoffload_async.runtime.runner import LoopRunner
from kvoffload_async.tiers._actor import ActorEnvironment, TierActor

logger = logging.getLogger(__name__)

_CLOSE_MARGIN_S = 0.7
_STOP_THREADS_S = 0.2


class PoolRunner(IoRunner, Protocol):
    """An `IoRunner` that can be closed."""

    def close(self, timeout_s: float) -> int:
        """Stop; return how many threads are still in a call."""
        ...


class TierLink:
    """One tier's pair of queues: a port on the owner's side, an actor on the loop's.

    Thread: owner, but for `post`.
    """

    def __init__(
        self,
        bridge: Bridge,
        port: TierPort,
        name: str,
        tier: AsyncTier,
        *,
        kv_view: memoryview,
        pool: PoolRunner,
        io_timeout_s: float,
        probe_timeout_s: float,
    ) -> None:
        """Connect; nothing runs before `open`. The pool is closed with the link."""
        self.port = port
        self._pool = pool
        self.inbox: deque[TierEvent] = deque()
        self._bridge = bridge
        self.actor = TierActor(
            name,
            tier,
            ActorEnvironment(kv_view, pool, self._post),
            io_timeout_s=io_timeout_s,
            probe_timeout_s=probe_timeout_s,
        )

    def pump(self, key_limit: float = math.inf) -> None:
        """Apply the events that have come in, in their order. Never waits.

        Args:
            key_limit: From how many announced keys on the rest is left for the next call.
        """
        inbox, port = self.inbox, self.port
        while inbox and key_limit > 0:
            event = inbox.popleft()
            port.handle(event)
            if isinstance(event, BlocksAppeared | BlocksEvicted):
                key_limit -= len(event.keys)

    def open(self, timeout_s: float) -> None:
        """Open the tier and join the bridge; waits. Raises what the tier's `open` raises."""
        try:
            self._bridge.runner.run(self.actor.open(), timeout_s)
        except BaseException:
            self._pool.close(_STOP_THREADS_S)
            raise
        self._bridge.links.append(self)

    def drain(self, timeout_s: float) -> bool:
        """Wait until every job has its result; False at the deadline."""
        self._bridge.flush()
        return self._bridge.runner.wait_until(self._is_drained, timeout_s)

    def close(self, timeout_s: float) -> CloseReport:
        """Close port and actor; every job has its result afterwards. Never raises.

        Waits about `timeout_s` for running jobs, then gives them up.
        """
        self.port.close()
        try:
            report = self._bridge.runner.run(
                self.actor.close(timeout_s), timeout_s + _CLOSE_MARGIN_S
            )
        except (OffloadError, TimeoutError) as error:
            report = CloseReport(error=error)
        self._pool.close(_STOP_THREADS_S)
        self.pump()
        late = tuple(self.port.abandon_rest())
        if self in self._bridge.links:
            self._bridge.links.remove(self)
        return CloseReport(late, report.error)

    def _is_drained(self) -> bool:
        self.pump()
        return not self.port.ledger.unfinished_count

    def _post(self, event: TierEvent) -> None:
        """Append an event for the owner. Thread: any."""
        self.inbox.append(event)
        self._bridge.runner.notify()


class Bridge:
    """Connects the ports of one owner with the actors on one loop.

    Thread: owner.
    """

    def __init__(
        self, runner: LoopRunner, create_pool: Callable[[int, int, int], PoolRunner] = IoPool
    ) -> None:
        """Connect nothing yet.

        Args:
            runner: The loop.
            create_pool: Makes a tier's I/O pool, given its threads that prefer loads, those that
                prefer stores, and those for calls without payload. A pool a tier: one that hangs
                takes no other tier's threads.
        """
        self.runner = runner
        self.create_pool = create_pool
        self.links: list[TierLink] = []
        self.wake_ups = 0

    def flush(self) -> None:
        """Hand over what the ports want done: one wake-up of the loop, or none. Never waits."""
        batch = [
            (link.actor, link.port.take_effects()) for link in self.links if link.port.has_effects
        ]
        if batch:
            self.wake_ups += 1
            self.runner.call_soon(execute, batch)

    def wait_for_progress(self, timeout_s: float) -> bool:
        """Hand over, then wait until an event has come in; False if none has in time."""
        self.flush()
        return self.runner.wait_until(self._has_events, timeout_s)

    def _has_events(self) -> bool:
        return any(link.inbox for link in self.links)
