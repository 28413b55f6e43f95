"""The two one-way queues between the owner's thread and the loop's.

Outbox: the effects in the tiers' states, handed over in one wake-up per batch. Inbox: one `deque`
per tier, to which the actor appends and which the owner drains. There is no lock, and neither side
waits.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Final

from kvoffload_async.abc.events import BlocksAppeared, BlocksEvicted, TierEvent
from kvoffload_async.abc.tier import AsyncTier, CloseReport, KVIdentity
from kvoffload_async.core.counters import Figures, Histogram
from kvoffload_async.core.ledger import CallTier, StartJob, StartProbe, TierEffect, TouchBlocks
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.error_log import ErrorLog
from kvoffload_async.errors import ClosedError, TierTimeoutError, drop_tracebacks
from kvoffload_async.runtime.io_pool import IoPool
from kvoffload_async.runtime.lifetime import Closing
from kvoffload_async.runtime.loop import LoopRunner, SameLoopRunner
from kvoffload_async.statistics import TierStatistics
from kvoffload_async.tiers._actor import TierActor
from kvoffload_async.tiers._environment import ActorEnvironment
from kvoffload_async.types import OffloadingEvent, ReqContext, ScheduleEndContext

logger = logging.getLogger(__name__)

_inbox_of = attrgetter("inbox")

Batch = Sequence[tuple[TierActor, Sequence[TierEffect]]]

_CLOSE_MARGIN_S = 0.7
_STOP_THREADS_S = 0.2
_STOP_HOST_S = 5.0
KEYS_A_STEP: Final = 4096
"""Maximum number of announced keys applied per step; they take about 1 ms."""


class TierLink:
    """One tier's pair of queues: a state on the owner's side, an actor on the loop's.

    Not thread-safe, except `_post` and `stats`; call only from the owner's thread.

    Attributes:
        state: The tier's state on the owner's side.
        tier: The tier, which runs on the loop.
        bridge: Connects to the loop.
        inbox: Events of the tier that are not yet applied to the state.
        actor: The loop's side.
    """

    def __init__(
        self,
        bridge: Bridge,
        state: TierState,
        tier: AsyncTier,
        *,
        kv_view: memoryview,
        pool: IoPool,
        io_timeout_s: float,
        probe_timeout_s: float,
        identity: KVIdentity,
        owns_loop: bool = False,
    ) -> None:
        """Create the link without starting anything; see `open`.

        Args:
            bridge: Connects to the loop.
            state: The owner's side.
            tier: The tier; owned by the link.
            kv_view: The primary's buffer, shape `[num_slots, slot_bytes]`; released with the link.
            pool: The tier's I/O threads; closed with the link.
            io_timeout_s: Seconds from a job's submission to its deadline.
            probe_timeout_s: Seconds until an unanswered existence probe counts as "absent".
            identity: Identity of the tier's blocks.
            owns_loop: Whether the loop is this link's alone, and is closed with it.
        """
        self.state = state
        self.tier = tier
        self.bridge = bridge
        self._view = kv_view
        self._pool = pool
        self._owns_loop = owns_loop
        self._closing: Closing[CloseReport] = Closing()
        self._gauge_errors = ErrorLog(logger, f"tier {state.name}: gauges()")
        self._opening_s = tier.opening_s(kv_view.nbytes // len(kv_view))
        self.inbox: deque[TierEvent] = deque()
        self.actor = TierActor(
            state.name,
            tier,
            ActorEnvironment(kv_view, pool, self._post, identity),
            io_timeout_s=io_timeout_s,
            probe_timeout_s=probe_timeout_s,
            clock=bridge.runner.now_s,
        )

    # -- steps ----------------------------------------------------------------------------------

    def begin_request(self, _ctx: ReqContext) -> bool:
        """Return whether the tier wants all blocks of a request."""
        return self.tier.capabilities.request_level

    def pump(self, key_limit: float = KEYS_A_STEP) -> None:
        """Apply the received events in order. Non-blocking.

        Args:
            key_limit: Number of announced keys after which further events wait for the next call.
        """
        inbox, state = self.inbox, self.state
        while inbox and key_limit > 0:
            event = inbox.popleft()
            state.handle(event)
            if isinstance(event, BlocksAppeared | BlocksEvicted):
                key_limit -= len(event.keys)

    def end_step(self, _context: ScheduleEndContext | None = None) -> None:
        """Queue the existence probes of the step; `Bridge.flush` hands them over."""
        state = self.state
        if state.cost_gated is not None:
            state.tell_time(self.bridge.runner.now_s)
        elif not state.index.is_waiting:
            return
        state.end_step()

    def take_events(self, max_keys: int | None = None) -> Iterable[OffloadingEvent]:
        """Remove and return events of stored and removed blocks; see `EventLog.take`."""
        return self.state.take_events(max_keys) if self.state.event_log.entries else ()

    def announce_anew(self) -> None:
        """See `EventLog.announce_anew`."""
        self.state.event_log.announce_anew()

    def has_pending_work(self) -> bool:
        """Return whether a job, a result, a probe, or the rest of some events is pending."""
        state = self.state
        return bool(self.inbox) or state.has_pending_work or state.event_log.is_behind

    def stats(self, taken: Figures) -> TierStatistics:
        """Return the tier's statistics, also after closing. Thread-safe.

        Args:
            taken: The tier's figures, copied with `TIER_FIGURES`.
        """
        gauges: dict[str, float] = {}
        with self._gauge_errors.survived():
            gauges = dict(self.tier.gauges())
        return self.state.statistics(taken, waiting_jobs=self.actor.waiting_jobs, gauges=gauges)

    # -- calls that block ----------------------------------------------------------------------

    def open(self, timeout_s: float) -> None:
        """Open the tier and add it to the bridge; blocks. Raises the errors of the tier's `open`.

        Args:
            timeout_s: Timeout in seconds; extended for large tiers.

        Raises:
            TierTimeoutError: The tier did not open in time.
        """
        timeout_s += self._opening_s
        try:
            self.bridge.runner.run(self.actor.open(), timeout_s)
        except BaseException as error:
            if self._pool.close(_STOP_THREADS_S):
                self.bridge.hung_openings[self.state.name] = self._pool
                self._pool.abandon()
            self._release()
            if isinstance(error, TimeoutError):
                why = str(error) or (
                    f"did not open within {timeout_s:g} s; check that its storage responds, or "
                    "raise open_timeout_s"
                )
                name = self.state.name
                raise TierTimeoutError(f"tier {name} ({self.actor.location}): {why}") from error
            raise
        self.bridge.links.append(self)

    def drain(self, timeout_s: float) -> bool:
        """Wait until every job has its result; return False on timeout. No copy is aborted."""
        self.bridge.flush()
        return self.bridge.runner.wait_until(self._is_drained, timeout_s)

    def close(self, timeout_s: float) -> CloseReport:
        """Close state and actor; every job has its result afterwards. Idempotent; see `Closing`.

        Waits about `timeout_s` for running jobs, then fails them.

        Returns:
            The unfinished work; while a copy still runs, the primary must stay allocated.

        Raises:
            StateError: Called on the loop's thread, or out of itself; nothing is changed.
        """
        self.bridge.runner.refuse_own_thread("closing a tier")
        return self._closing.run(self._close, timeout_s)

    def _close(self, timeout_s: float) -> CloseReport:
        self.state.close()
        try:
            report = self.bridge.runner.run(
                self.actor.close(timeout_s), timeout_s + _CLOSE_MARGIN_S
            )
        except Exception as error:  # noqa: BLE001 - closing must continue
            drop_tracebacks(error)
            report = CloseReport(error=error)
        # Not after Ctrl-C: the tier still needs the pool, to be closed by another call.
        self._pool.close(_STOP_THREADS_S)
        self.pump(math.inf)
        late = tuple(self.state.abandon_rest())
        if self in self.bridge.links:
            self.bridge.links.remove(self)
        self._release(timeout_s, keeps_view=bool(late))
        self.pump(math.inf)
        return CloseReport(late, report.error)

    # -- internal -------------------------------------------------------------------------------

    def _release(self, timeout_s: float = _STOP_HOST_S, *, keeps_view: bool = False) -> None:
        """Stop the link's own loop, and release the view of the primary."""
        if self._owns_loop:
            self.bridge.close(timeout_s)
        if keeps_view:
            return
        try:
            self._view.release()
        except BufferError:
            logger.warning("%s: the tier still holds the primary's buffer", self.state.name)

    def _is_drained(self) -> bool:
        self.pump(math.inf)
        return not self.state.jobs.unfinished_count

    def _post(self, event: TierEvent) -> None:
        """Append an event for the owner. Thread: any."""
        self.inbox.append(event)
        self.bridge.runner.notify()


class Bridge:
    """Connects the tier states of one owner with the actors on one loop.

    Not thread-safe; call only from the owner's thread.
    """

    def __init__(
        self, runner: LoopRunner, create_pool: Callable[[int, int, int], IoPool] = IoPool
    ) -> None:
        """Start without links.

        Args:
            runner: The loop.
            create_pool: Creates a tier's I/O pool, given the numbers of threads that prefer loads,
                that prefer stores, and for calls without payload. Each tier has its own pool, so
                that a hanging tier does not use up other tiers' threads.
        """
        self.runner = runner
        self.create_pool = create_pool
        self.links: list[TierLink] = []
        self.wake_ups = 0
        self.lag = Histogram()
        """Seconds from a hand-over until the loop processes it; observed on the loop's thread."""
        self.hung_openings: dict[str, IoPool] = {}
        """Tier -> I/O pool of its last failed opening, if a thread was still in a call."""

    def opening_hangs(self, tier: str) -> bool:
        """Return whether a thread of a tier's failed opening is still in a call. Thread: any."""
        pool = self.hung_openings.get(tier)
        return pool is not None and pool.close(0.0) > 0

    def flush(self) -> None:
        """Hand over the tiers' effects, with at most one wake-up of the loop. Never blocks.

        If the loop has ended, every job fails at once.
        """
        if self.runner.has_ended():
            self._give_up()
            return
        batch: list[tuple[TierActor, Sequence[TierEffect]]] = []
        for link in self.links:
            if link.state.effects:
                effects = link.state.take_effects()
                batch.append((link.actor, effects))
        if batch:
            self.wake_ups += 1
            try:
                self.runner.call_soon(self._execute_batch, batch, self.runner.now_s())
            except ClosedError:  # the loop ended after the check
                self._give_up()

    def wait_for_progress(self, timeout_s: float) -> bool:
        """Hand over effects, then wait for an event of a tier; return False on timeout."""
        self.flush()
        return self.runner.wait_until(self._has_events, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the loop; idempotent. The links close their pools."""
        self.runner.close(timeout_s)

    def _give_up(self) -> None:
        """Fail all jobs after the loop has ended; slots of running copies stay reserved."""
        for link in self.links:
            if link.state.is_available:
                logger.error("tier %s: its event loop has ended, and it with it", link.state.name)
                link.pump(math.inf)  # events that the loop posted before its end
                link.state.close()
                link.state.abandon_rest()

    def _execute_batch(self, batch: Batch, handed_over_s: float) -> None:
        """Execute the effects that the owner has handed over. Thread: loop."""
        self.lag.observe(self.runner.now_s() - handed_over_s)
        for actor, effects in batch:
            _execute(actor, effects)

    def _has_events(self) -> bool:
        return any(map(_inbox_of, self.links))


class SameLoopBridge(Bridge):
    """Executes effects at once, for an owner that runs on the loop: nothing is handed over.

    A tier never calls the owner back: the end of a job that ends within the call is in the inbox
    until the owner's next step.
    """

    runner: SameLoopRunner

    def flush(self) -> None:
        """Execute the tiers' effects; hand them over if called on another thread, as by closing."""
        if threading.get_ident() != self.runner.thread_id:
            super().flush()
            return
        for link in self.links:
            if link.state.effects:
                _execute(link.actor, link.state.take_effects())


def _execute(actor: TierActor, effects: Sequence[TierEffect]) -> None:
    """Execute a tier's effects in order. Thread: loop."""
    for effect in effects:
        match effect:
            case StartJob(job):
                actor.start_job(job)
            case StartProbe(generation, keys, chains):
                actor.probes.start(generation, keys, chains)
            case TouchBlocks(keys):
                actor.touch(keys)
            case CallTier(call_id, operation, keys, cursor, age_s):
                actor.call(call_id, operation, keys, cursor, age_s)
