"""A tier that the engine can do without: until it can be opened, it is tried in the background."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from kvoffload_async.abc.tier import CloseReport
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.index import ExactIndex
from kvoffload_async.core.readings import Figures, read_tier, take_tier
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.errors import TierTimeoutError, TierUnavailableError, drop_tracebacks, text_of
from kvoffload_async.facade.external import GUARDED, share_knowledge
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.tier_factory import SecondaryTierFactory
from kvoffload_async.runtime.bridge import Bridge
from kvoffload_async.statistics import TierStatistics
from kvoffload_async.types import (
    JobId,
    JobMetadata,
    JobResult,
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0


def create_tier(
    tier_config: Mapping[str, Any], primary_kv_view: memoryview, offloading_spec: object
) -> SecondaryTierManager:
    """Create and open a tier; one that is not `required` may be opened later.

    Raises what `SecondaryTierFactory.create_secondary_tier` raises, if the tier is required.
    """
    create = partial(
        SecondaryTierFactory.create_secondary_tier, tier_config, primary_kv_view, offloading_spec
    )
    try:
        return create()
    except Exception as error:
        if tier_config.get("required", True):
            raise
        drop_tracebacks(error)  # before it is logged, as logs may be kept
        longest_s = tier_config.get("reopen_pause_s", _LONGEST_PAUSE_S)
        name = tier_config["type"]
        bridge: Bridge | None = getattr(offloading_spec, "runtime", None)
        hangs = partial(bridge.opening_hangs, name) if bridge is not None else bool
        row_bytes = primary_kv_view.strides[0] if primary_kv_view.strides else 0
        return ReopeningTierManager(name, create, error, longest_s, hangs, row_bytes=row_bytes)


def pauses_s(longest_s: float) -> Iterator[float]:
    """Yield the seconds before each try."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield min(pause_s, longest_s)
        pause_s = min(2 * pause_s, longest_s)


class ReopeningTierManager(SecondaryTierManager):
    """Stands in for a tier until it can be opened, and then passes everything on to it.

    The tier is created on a thread of its own, which the owner never waits for but in `shutdown`.

    Thread: owner, but for `_reopen`.
    """

    def __init__(
        self,
        tier_type: str,
        create: Callable[[], SecondaryTierManager],
        error: Exception,
        longest_pause_s: float,
        hangs: Callable[[], bool] = bool,
        *,
        row_bytes: int = 0,
    ) -> None:
        """Begin to try.

        Args:
            tier_type: The name under which the tier was configured.
            create: Creates and opens the tier; waits for that, on the thread.
            error: Why it could not be opened so far.
            longest_pause_s: Bound on the pauses between two tries, which double from a second on.
            hangs: Tells whether a thread of the last try still hangs: then none is begun.
            row_bytes: Bytes of a row of the primary.
        """
        # Not the base's constructor, which opens a tier.
        self.tier_type = tier_type
        self.medium = Medium.STORAGE
        self.locality = Locality.LOCAL
        self.backpressure_detector = None
        self.flushes_on_poll = True
        self._name: str | None = tier_type
        self._create = create
        self._longest_pause_s = longest_pause_s
        self._hangs = hangs
        self._row_bytes = row_bytes
        self._state: TierState | None = None
        self._live: dict[ReqContext, None] = {}
        self._opened: deque[SecondaryTierManager] = deque()
        self._opened_tier: SecondaryTierManager | None = None
        self._stop = threading.Event()
        self._failed_at_s = time.monotonic()
        why = text_of(error)
        logger.warning("tier %s cannot be opened, and is tried again: %s", tier_type, why)
        self._thread = threading.Thread(
            target=self._reopen, name=f"kvoffload-reopen:{tier_type}", daemon=True
        )
        self._thread.start()

    def attach(self, state: TierState) -> None:
        """Tell a planner's state whether the tier is open, now and from now on."""
        self._state = state
        state.is_available = False

    # -- a request's life -----------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if self._opened_tier is not None:
            return self._opened_tier.on_new_request(req_context)
        self._live[req_context] = None
        return RequestOffloadingContext(OffloadPolicy.BLOCK_LEVEL)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._live.pop(req_context, None)
        if self._opened_tier is not None:
            self._opened_tier.on_request_finished(req_context)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._opened_tier is None:
            return LookupResult.MISS
        return self._opened_tier.lookup(key, req_context)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        if self._opened_tier is not None:
            self._opened_tier.touch(keys, req_context)

    # -- jobs -----------------------------------------------------------------------------------

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._open_tier().submit_store(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._open_tier().submit_load(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """See `SecondaryTierManager`; takes the tier over when it has been opened."""
        if self._opened_tier is None and self._opened:
            self._take_over(self._opened.popleft())
        return () if self._opened_tier is None else self._opened_tier.get_finished_jobs()

    def get_released_jobs(self) -> Sequence[JobId]:
        return () if self._opened_tier is None else self._opened_tier.get_released_jobs()

    def on_schedule_end(self, context: ScheduleEndContext | None = None) -> None:
        if self._opened_tier is not None:
            self._opened_tier.on_schedule_end(context)

    def has_pending_work(self) -> bool:
        return self._opened_tier is not None and self._opened_tier.has_pending_work()

    def take_events(self) -> Iterator[OffloadingEvent]:
        return iter(()) if self._opened_tier is None else self._opened_tier.take_events()

    def announce_anew(self) -> None:
        if self._opened_tier is not None:
            self._opened_tier.announce_anew()

    def stats(self, taken: Figures | None = None) -> TierStatistics:
        if self._opened_tier is not None:
            return SecondaryTierManager.stats(self._opened_tier, taken)
        idle = TierState(self.tier_type, ExactIndex(), 0, EventLog(self.medium, enabled=False))
        return read_tier(
            take_tier(idle) if taken is None else taken,
            idle,
            name=self._name or self.tier_type,
            row_bytes=self._row_bytes,
        )

    @property
    def ownership(self) -> str | None:
        return self._name

    @ownership.setter
    def ownership(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        state = "not open yet" if self._opened_tier is None else repr(self._opened_tier)
        return f"<{type(self).__name__} {self._name or self.tier_type}: {state}>"

    # -- the calls that wait --------------------------------------------------------------------

    def drain_jobs(self, timeout: float = 30.0) -> bool:
        return self._opened_tier is None or self._opened_tier.drain_jobs(timeout)

    def abandon_jobs(self) -> Sequence[JobId]:
        return () if self._opened_tier is None else self._opened_tier.abandon_jobs()

    def shutdown(self, timeout: float | None = None) -> CloseReport:
        """See `SecondaryTierManager`; also while the tier is being opened."""
        self._stop.set()
        limit_s = 30.0 if timeout is None else timeout
        begun_s = time.monotonic()
        self._thread.join(limit_s)
        left_s = max(0.0, limit_s - (time.monotonic() - begun_s))
        with contextlib.suppress(IndexError):
            self._opened_tier = self._opened.popleft()
        if self._opened_tier is not None:
            return self._opened_tier.shutdown(left_s)
        if self._thread.is_alive():  # it closes what it opens; until then it may use the primary
            return CloseReport(error=TierTimeoutError(f"{self.tier_type} is still being opened"))
        return CloseReport()

    # -- inside ---------------------------------------------------------------------------------

    def _open_tier(self) -> SecondaryTierManager:
        if self._opened_tier is None:
            raise TierUnavailableError(f"tier {self.tier_type} is not open yet")
        return self._opened_tier

    def _take_over(self, tier: SecondaryTierManager) -> None:
        tier.flushes_on_poll = self.flushes_on_poll
        if self._name is not None:
            tier.ownership = self._name
        self.medium, self.locality = tier.medium, tier.locality
        self.backpressure_detector = tier.backpressure_detector
        self.io_timeout_s = tier.io_timeout_s
        self._opened_tier = tier
        state = self._state
        if state is not None:
            state.medium, state.locality = tier.medium, tier.locality
            state.backpressure = tier.backpressure_detector
            share_knowledge(state, tier)
            state.is_available = True
        live, self._live = self._live, {}
        for ctx in live:
            try:
                tier.on_new_request(ctx)
            except GUARDED as error:
                logger.error("tier %s: on_new_request failed: %s", self.tier_type, text_of(error))  # noqa: TRY400 - no frames
                drop_tracebacks(error)
        seconds = time.monotonic() - self._failed_at_s
        logger.warning("tier %s was opened after %.1f s", self.tier_type, seconds)

    def _reopen(self) -> None:
        """Try until it works. Thread: its own."""
        for pause_s in pauses_s(self._longest_pause_s):
            if self._stop.wait(pause_s):
                return
            if self._hangs():
                continue
            try:
                tier = self._create()
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is tried again
                drop_tracebacks(error)
                logger.debug("tier %s cannot be opened: %s", self.tier_type, text_of(error))
                continue
            self._opened.append(tier)
            if self._stop.is_set():
                with contextlib.suppress(IndexError):  # else `shutdown` has it
                    self._opened.popleft().shutdown()
            return
