"""Tiers for a host that calls from threads of its own, such as LMCache or SGLang.

`PluggedTiers` drives `SecondaryTierManager`s without a planner. Any thread may call; one lock
guards the managers, and is held for decisions only, never for I/O. The event loop's thread takes in
what the tiers report and completes the futures that the calls returned, so callbacks of the futures
wake the host without another change of threads.

A copy cannot be cancelled. A transfer over its deadline has *ended*, as failed, while its copy may
still access its rows; it is *at rest* when no byte moves any more. A host whose own memory is the
primary must wait for rest before it reuses the memory. A host that copies from and to rows of this
package can act at the end, and keeps only the rows until rest.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from itertools import count, islice
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeVar

from kvoffload_async.abc.tier import CloseReport
from kvoffload_async.config import Parser, shown
from kvoffload_async.core.ledger import JobRecord
from kvoffload_async.error_log import ErrorLog
from kvoffload_async.errors import (
    BlockMissingError,
    ClosedError,
    ConfigError,
    TierBusyError,
    TierClosedError,
    TierUnavailableError,
    naming_shortage,
)
from kvoffload_async.facade.external import closed, is_external
from kvoffload_async.facade.host_rows import HostRows
from kvoffload_async.facade.secondary import SecondaryTierManager, owner_name
from kvoffload_async.facade.tier_factory import SecondaryTierFactory, naming_tier
from kvoffload_async.facade.tier_options import ManagerSpec
from kvoffload_async.runtime.bridge import Bridge
from kvoffload_async.runtime.lifetime import Closing, guard_forks
from kvoffload_async.runtime.loop import LoopThread
from kvoffload_async.statistics import (
    OffloadingStatistics,
    PrimaryStatistics,
    SlotStatistics,
    TierStatistics,
)
from kvoffload_async.types import (
    BlockIds,
    JobId,
    JobMetadata,
    JobResult,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
)

logger = logging.getLogger(__name__)

_host_errors: Final = ErrorLog(logger, "the host's call for an event of its tiers")

T = TypeVar("T")

OnEvents = Callable[[SecondaryTierManager, Sequence[OffloadingEvent]], object]
"""Called with a tier's manager and the tier's events."""

MOST_LOOKUPS: Final = 1024
"""Maximum number of lookups that wait for existence probes; further lookups use only the index."""

_inbox_of = attrgetter("manager.link.inbox")


class JobEnd(NamedTuple):
    """A job's result, and whether its copy has ended.

    Attributes:
        job: The job.
        result: Its result.
        is_at_rest: Whether its copy has ended. An overdue job is reported twice: at its deadline,
            and when its copy has ended.
    """

    job: JobMetadata
    result: JobResult
    is_at_rest: bool

    @property
    def is_late_rest(self) -> bool:
        """Whether this is the second report of an overdue job."""
        return self.is_at_rest and self.result.orphaned


class OverdueJobs:
    """Matches results of overdue jobs with the ends of their copies.

    Not thread-safe; call only from the owner's thread.
    """

    def __init__(self) -> None:
        """Start without overdue jobs."""
        self._results: dict[JobId, JobResult] = {}

    def __len__(self) -> int:
        return len(self._results)

    def __iter__(self) -> Iterator[JobId]:
        """Iterate over the jobs whose copies still run."""
        return iter(self._results)

    def take(
        self, ended: Iterable[tuple[JobMetadata, JobResult]], released: Iterable[JobRecord]
    ) -> Iterator[JobEnd]:
        """Yield the ends of jobs from a ledger's `take_ended`, then from its `take_released`."""
        for job, result in ended:
            if result.orphaned:
                self._results[result.job_id] = result
            yield JobEnd(job, result, is_at_rest=not result.orphaned)
        for record in released:
            yield JobEnd(record.job, self._results.pop(record.job.job_id), is_at_rest=True)


class Ended(NamedTuple):
    """The outcome of a transfer.

    Attributes:
        keys: The keys that were transferred: loaded, or stored in at least one tier.
        error: The first error of a key that was not transferred; None if there is none.
    """

    keys: frozenset[OffloadKey]
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class Transfer:
    """A store or load that was submitted to the tiers.

    Attributes:
        keys: Its keys.
        block_ids: Its rows of the primary, parallel to `keys`.
        ended: Completed at its end, at the latest at the jobs' deadline, with an `Ended`.
        at_rest: Completed with None when its rows may be reused; not before `ended`.
        jobs: Number of its jobs without a result.
        moving: Number of its jobs whose copies may run.
        errors: Errors of its jobs, and of tiers that were not used.
    """

    keys: tuple[OffloadKey, ...]
    block_ids: BlockIds
    ended: Future[Ended] = field(default_factory=Future)
    at_rest: Future[None] = field(default_factory=Future)
    jobs: int = 0
    moving: int = 0
    errors: list[Exception] = field(default_factory=list)
    _has_ended: bool = False
    _landed: set[OffloadKey] = field(default_factory=set)

    def take(self, end: JobEnd) -> None:
        """Record the result of a job, or that its copy has ended."""
        if not end.is_late_rest:
            self.jobs -= 1
            landed = end.job.keys if end.result.success else end.result.successful_keys or ()
            self._landed.update(landed)
            if end.result.error is not None:
                self.errors.append(end.result.error)
        self.moving -= end.is_at_rest

    def missing(self) -> list[int]:
        """Return the positions of the keys that have not been transferred so far."""
        return [index for index, key in enumerate(self.keys) if key not in self._landed]

    def completions(self) -> Iterator[Callable[[], object]]:
        """Yield the calls that complete the transfer's futures, as far as they are due."""
        if not self.jobs and not self._has_ended:
            self._has_ended = True
            is_whole = len(self._landed) == len(self.keys)
            error = None if is_whole or not self.errors else self.errors[0]
            ended = Ended(frozenset(self._landed), error)
            yield partial(self.ended.set_result, ended)
        if not self.moving:
            yield partial(self.at_rest.set_result, None)


class ListPosition(NamedTuple):
    """A position in the listing of all tiers' blocks.

    Attributes:
        tier: Number of the tier.
        key: The last key before the position; None: the position is before the tier's first one.
    """

    tier: int = 0
    key: OffloadKey | None = None


@dataclass(slots=True, eq=False)
class _Lookup:
    """A lookup that waits for existence probes.

    Attributes:
        port: Number of the tier that is asked.
    """

    keys: Sequence[OffloadKey]
    deadline_s: float
    stops_at_miss: bool
    context: ReqContext = field(default_factory=partial(ReqContext, "lookup"))
    found: set[OffloadKey] = field(default_factory=set)
    port: int = 0
    future: Future[list[bool]] = field(default_factory=Future)


class _Pins(NamedTuple):
    """Keys that one call has pinned.

    Attributes:
        keys: Those that are still pinned.
        deadline_s: When their pins expire.
    """

    keys: set[OffloadKey]
    deadline_s: float


class _Port:
    """One tier's manager, state and unfinished transfers.

    Attributes:
        manager: Drives the tier.
        state: The tier's state.
        overdue: Its jobs with a result whose copies still run.
        transfers: Job -> its transfer, and the numbers of the tiers that a load asks next.
    """

    def __init__(self, manager: SecondaryTierManager) -> None:
        if is_external(manager):
            closed(manager)
            raise ConfigError(
                f"type: {type(manager).__name__} overrides methods of SecondaryTierManager, which "
                "only a TieringOffloadingManager can drive; give an AsyncTier"
            )
        self.manager = manager
        self.state = manager.tier_state
        self.overdue = OverdueJobs()
        self.transfers: dict[JobId, tuple[Transfer, int]] = {}

    def ends(self, now_s: float) -> Iterator[JobEnd]:
        """Apply the tier's reports, and yield the jobs that ended or whose copies ended."""
        self.state.health.now_s = now_s
        self.manager.poll_tier()
        jobs = self.state.jobs
        if not jobs.ended and not jobs.released:
            return
        ended = jobs.take_ended()
        yield from self.overdue.take(ended, jobs.take_released())


_DECIDED: Final = frozenset({"enable_kv_events", "model", "rank", "run_config"})
"""Options of a tier that a host's keys and settings determine."""


def tiers_under(host: str) -> Parser:
    """Return a parser for one tier configuration or a list of tier configurations.

    Args:
        host: Determines some options of a tier, which the user must leave out.
    """

    def parse(value: object, key: str) -> tuple[Mapping[str, Any], ...]:
        tiers = value if isinstance(value, list | tuple) else [value]
        if not tiers or not all(isinstance(tier, Mapping) for tier in tiers):
            raise ConfigError(
                f"{key}: {shown(value)} is not valid; it must be a tier, such as "
                '{"type": "slab", "root_dir": "/kv", "capacity_bytes": "200GiB"}, or a '
                "list of tiers"
            )
        for index, tier in enumerate(tiers):
            for name in sorted(_DECIDED & tier.keys()):
                raise ConfigError(
                    f"{key}[{index}]: {name}: {shown(tier[name])} is determined by {host}; "
                    "leave it out, and give namespace or fingerprint to keep blocks apart"
                )
        return tuple(tiers)

    return parse


class PluggedTiers:
    """Secondary tiers under a host, in the order in which they are looked up and loaded from.

    Stores go to every tier. A load asks the first tier that may have a key, then the next one. A
    tier whose breaker is open, or that is closed, has no blocks and takes none.

    Thread-safe. The futures are completed on the event loop's thread, so that their callbacks must
    return at once, or, if nothing has to be awaited, on the calling thread.
    """

    def __init__(
        self,
        tiers: Sequence[Mapping[str, Any]],
        rows: memoryview,
        on_events: OnEvents | None = None,
    ) -> None:
        """Open the tiers; blocks, at most for the tiers' `open_timeout_s`.

        Args:
            tiers: Configuration of each tier, as for `SecondaryTierFactory`.
            rows: The primary, shape `[num_slots, slot_bytes]`, item size 1 byte. The memory must
                stay valid until `close` has returned, and as long as it reports unfinished jobs.
            on_events: Called with the events of tiers with `enable_kv_events`, in order; with those
                of a transfer before it ends. Thread: the loop's, perhaps before this constructor
                returns.

        Raises:
            ConfigError: A tier's configuration is unusable; nothing is left running.
            TierUnavailableError: A tier's storage cannot be reached.
            TierTimeoutError: A tier did not open in time.
        """
        self._lock = threading.Lock()
        self._job_ids = count()
        self._context = ReqContext("host")
        self._lookups: list[_Lookup] = []
        self._pins: deque[_Pins] = deque()
        """The pins that have not expired, ordered by deadline."""
        self._pins_of: dict[OffloadKey, deque[_Pins]] = {}
        self._on_events = on_events
        self._is_open = self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._closing: Closing[CloseReport] = Closing()
        with naming_shortage("the event loop of the tiers cannot be started"):
            self._bridge = Bridge(LoopThread(on_progress=self._progressed))
        self._runner = self._bridge.runner
        self._ports: list[_Port] = []
        try:
            spec = ManagerSpec(self._bridge)
            for index, tier in enumerate(tiers):
                with naming_tier(index, tier, "tier"):
                    manager = SecondaryTierFactory.create_secondary_tier(tier, rows, spec)
                    self._ports.append(_Port(manager))
            self._pinning = [port for port in self._ports if port.manager.tier.capabilities.pins]
            self._is_open = True
            self._runner.notify()
        except BaseException:
            for port in self._ports:
                port.manager.shutdown()
            self._bridge.close()
            raise
        guard_forks(self, _closing=Closing.closed(CloseReport()))

    # -- calls of the host ----------------------------------------------------------------------

    def lookup(
        self, keys: Sequence[OffloadKey], timeout_s: float, *, stops_at_miss: bool = False
    ) -> Future[list[bool]]:
        """Look up which keys can probably be loaded. Non-blocking.

        Args:
            keys: The keys, without duplicates; those of one prompt in prompt order.
            timeout_s: Seconds after which a key without an answer counts as absent.
            stops_at_miss: Whether only the leading run matters; keys after it may count as absent.

        Returns:
            For each key, whether it was found.
        """
        now_s = self._runner.now_s()
        lookup = _Lookup(keys, now_s + timeout_s, stops_at_miss)
        with self._lock:
            waits = not (self._is_closed or self._advance(lookup, now_s))
            if waits and len(self._lookups) < MOST_LOOKUPS:
                self._lookups.append(lookup)
                self._runner.notify()  # for its deadline
                return lookup.future
            self._forget(lookup)
        self._answer(lookup)
        return lookup.future

    def store(self, keys: Sequence[OffloadKey], block_ids: BlockIds) -> Transfer:
        """Store rows in every tier. Non-blocking.

        Args:
            keys: The keys, without duplicates.
            block_ids: The rows, parallel to `keys`; unchanged until the transfer is at rest.
        """
        transfer = Transfer(tuple(keys), block_ids)
        with self._lock:
            now_s = self._runner.now_s()
            for port in self._ports:
                if self._is_closed or not port.state.takes_store(now_s):
                    transfer.errors.append(self._refusal(port, "stores"))
                else:
                    self._submit(port, transfer, range(len(keys)), now_s)
            calls = self._hand_over(transfer)
        _make(calls)
        return transfer

    def load(self, keys: Sequence[OffloadKey], block_ids: BlockIds) -> Transfer:
        """Load blocks into rows. Non-blocking.

        Args:
            keys: The keys, without duplicates.
            block_ids: The rows, parallel to `keys`; not accessed until the transfer is at rest.
        """
        transfer = Transfer(tuple(keys), block_ids)
        with self._lock:
            self._load_from(0, transfer, self._runner.now_s())
            calls = self._hand_over(transfer)
        _make(calls)
        return transfer

    def pin(self, keys: Sequence[OffloadKey], timeout_s: float) -> None:
        """Protect present blocks from eviction, in tiers that can, until `unpin` or the deadline.

        Args:
            keys: The keys, without duplicates. Their pins are counted.
            timeout_s: Seconds until the pins expire; the same for all calls.
        """
        with self._lock:
            if self._pinning and not self._is_closed:
                pins = _Pins(set(keys), self._runner.now_s() + timeout_s)
                self._pins.append(pins)
                for key in keys:
                    self._pins_of.setdefault(key, deque()).append(pins)
                self._call_tiers("pin", self._pinning, keys)
                self._runner.notify()  # for the deadline

    def unpin(self, keys: Sequence[OffloadKey]) -> None:
        """Remove the oldest pin of each pinned key. Non-blocking; never fails."""
        with self._lock:
            self._unpin(keys)

    def discard(self, keys: Sequence[OffloadKey]) -> list[str]:
        """Remove blocks that are not in use; their removal is announced. Non-blocking.

        Returns:
            The names of the tiers that cannot remove blocks.
        """
        with self._lock:
            able = [port for port in self._ports if port.manager.tier.capabilities.discards]
            if not self._is_closed:
                self._call_tiers("discard", able, keys)
            return [port.state.name for port in self._ports if port not in able]

    def list_keys(
        self, position: ListPosition, count: int
    ) -> tuple[list[OffloadKey], ListPosition | None]:
        """Return the keys of the tiers' blocks, each once, and the position after the last key.

        A block that is present throughout a listing is listed. A tier without events, or that
        announces no removals, has no list.

        Args:
            position: Where to begin.
            count: Maximum number of keys.

        Returns:
            At most `count` keys, and where to continue; None at the end.
        """
        with self._lock:
            logs = [port.state.event_log.announced for port in self._ports]
            for tier in range(position.tier, len(logs)):
                key = position.key if tier == position.tier else None
                log = logs[tier]
                if log is None or not (found := log.following(key, count)):
                    continue
                before = [other for other in logs[:tier] if other is not None]
                news = [one for one in found if not any(one in other for other in before)]
                return news, ListPosition(tier, found[-1])
        return [], None

    @property
    def unlisted(self) -> list[str]:
        """The names of the tiers that `list_keys` leaves out."""
        logs = [(port.state.name, port.state.event_log) for port in self._ports]
        return [name for name, log in logs if log.announced is None]

    def stats(self) -> list[TierStatistics]:
        """Return the statistics of each tier, also after closing."""
        with self._lock:
            return [port.manager.stats() for port in self._ports]

    @property
    def managers(self) -> list[SecondaryTierManager]:
        """The tiers' managers, for inspection only."""
        return [port.manager for port in self._ports]

    def close(self, timeout_s: float) -> CloseReport:
        """Refuse new transfers, wait for running ones, fail the rest, close the tiers; idempotent.

        Every transfer has ended afterwards; one whose copy still runs is not at rest. A call while
        another thread closes them waits for it. In a forked child it does nothing.

        Args:
            timeout_s: Seconds for running transfers to end, for all tiers together.

        Returns:
            The unfinished jobs, whose rows must stay allocated, and the first error.

        Raises:
            StateError: Called out of a callback, for which it would wait; nothing is changed.
            TierTimeoutError: Another thread has not closed them within its time; all rows must stay
                allocated.
        """
        self._runner.refuse_own_thread("close()")
        return self._closing.run(self._close, timeout_s)

    def _close(self, timeout_s: float) -> CloseReport:
        with self._lock:
            self._is_closed = True
        deadline_s = time.monotonic() + timeout_s
        reports = [
            port.manager.shutdown(max(0.0, deadline_s - time.monotonic())) for port in self._ports
        ]
        calls = self._collect()
        for lookup in self._lookups:
            self._forget(lookup)
            calls.append(partial(self._answer, lookup))
        self._lookups.clear()
        _make(calls)
        self._bridge.close()
        errors = (report.error for report in reports if report.error is not None)
        unfinished = tuple(job for report in reports for job in report.unfinished_jobs)
        return CloseReport(unfinished, next(errors, None))

    # -- inside: the lock is held -----------------------------------------------------------------

    def _unpin(self, keys: Iterable[OffloadKey]) -> None:
        gone = []
        for key in keys:
            if pins := self._pins_of.get(key):
                pins.popleft().keys.discard(key)
                gone.append(key)
                if not pins:
                    del self._pins_of[key]
        while self._pins and not self._pins[0].keys:
            self._pins.popleft()
        if gone and not self._is_closed:
            self._call_tiers("unpin", self._pinning, gone)

    def _call_tiers(self, hook: str, ports: Iterable[_Port], keys: Sequence[OffloadKey]) -> None:
        """Call a hook of each tier on the loop, after all effects handed over before."""
        for port in ports:
            with suppress(ClosedError):  # the loop has ended, and the tiers with it
                self._runner.call_soon(getattr(port.manager.link.tier, hook), tuple(keys))

    def _advance(self, lookup: _Lookup, now_s: float) -> bool:
        """Continue a lookup, tier by tier; return False if it must wait for a probe."""
        while lookup.port < len(self._ports):
            port = self._ports[lookup.port]
            asked = [key for key in lookup.keys if key not in lookup.found]
            if not asked:
                break
            port.state.health.now_s = now_s
            counters = port.state.counters
            if (reason := port.state.skips_load(lookup.context, now_s)) is not None:
                counters.skipped_lookups[reason] += len(asked)
            else:
                answers = self._ask(port, asked, lookup)
                if LookupResult.RETRY in answers:
                    return False
                found = zip(asked, answers, strict=False)  # the answers may end at a miss
                hits = [key for key, answer in found if answer is LookupResult.HIT]
                lookup.found.update(hits)
                counters.lookups += len(answers)
                counters.hits += len(hits)
                counters.misses += len(answers) - len(hits)
            lookup.port += 1
        return True

    def _ask(
        self, port: _Port, keys: Sequence[OffloadKey], lookup: _Lookup
    ) -> Sequence[LookupResult]:
        """Look keys up in a tier's index; start an existence probe if the index needs one."""
        ask = partial(port.state.lookup_many, keys, lookup.context)
        answers = ask(stop_at_miss=lookup.stops_at_miss)
        if LookupResult.RETRY in answers:
            port.manager.on_schedule_end()
            answers = ask(stop_at_miss=lookup.stops_at_miss)  # the step's end may have decided
        return answers

    def _forget(self, lookup: _Lookup) -> None:
        for port in self._ports:
            port.state.finish_request(lookup.context)

    def _load_from(self, first: int, transfer: Transfer, now_s: float) -> None:
        """Submit a load of missing blocks to the first tier, from `first` on, that may have any."""
        for number in range(first, len(self._ports)):
            port, missing = self._ports[number], transfer.missing()
            if self._is_closed or port.state.skips_load(self._context, now_s) is not None:
                transfer.errors.append(self._refusal(port, "loads"))
                continue
            absent = set(port.state.index.lacks([transfer.keys[index] for index in missing]))
            if absent:
                transfer.errors.append(BlockMissingError(f"{port.state.name} has no such block"))
            if wanted := [index for index in missing if transfer.keys[index] not in absent]:
                self._submit(port, transfer, wanted, now_s, following=number + 1)
                return

    def _refusal(self, port: _Port, direction: str) -> Exception:
        if self._is_closed:
            return TierClosedError(f"tier {port.state.name} is closed")
        if port.state.is_available and direction == "stores" and port.state.health.stores.is_closed:
            return TierBusyError(f"tier {port.state.name} is slow: back-pressure")
        return TierUnavailableError(f"tier {port.state.name} is suspended: no {direction}")

    def _submit(
        self,
        port: _Port,
        transfer: Transfer,
        indices: Sequence[int],
        now_s: float,
        following: int = 0,
    ) -> None:
        """Submit a transfer's job; `following` is the tier to load from next, 0 for a store."""
        is_whole = len(indices) == len(transfer.keys)
        job = JobMetadata(
            next(self._job_ids),
            transfer.keys if is_whole else tuple(transfer.keys[index] for index in indices),
            transfer.block_ids if is_whole else transfer.block_ids[list(indices)],
            bool(following),
            self._context,
            now_s,
        )
        transfer.jobs += 1
        transfer.moving += 1
        port.transfers[job.job_id] = transfer, following
        port.state.submit(job)
        if port.state.jobs.ended:  # it was refused
            self._runner.notify()

    def _hand_over(self, transfer: Transfer) -> list[Callable[[], object]]:
        """Hand submitted jobs to the tiers; return the calls that complete the transfer, if any."""
        if not self._is_closed:
            self._bridge.flush()
        return list(transfer.completions())

    def _collect(self) -> list[Callable[[], object]]:
        """Apply the tiers' reports; return the calls to make once the lock is released."""
        calls: list[Callable[[], object]] = []
        now_s = self._runner.now_s()
        for port in self._ports:
            ends = list(port.ends(now_s))
            if self._on_events is not None and (events := list(port.manager.take_events())):
                calls.append(partial(self._on_events, port.manager, events))
            for end in ends:
                calls += self._take(port, end, now_s)
        while self._pins and now_s >= self._pins[0].deadline_s:
            self._unpin(tuple(self._pins[0].keys))
        waiting, self._lookups = self._lookups, []
        for lookup in waiting:
            if self._advance(lookup, now_s) or now_s >= lookup.deadline_s:
                self._forget(lookup)
                calls.append(partial(self._answer, lookup))
            else:
                self._lookups.append(lookup)
        return calls

    def _take(self, port: _Port, end: JobEnd, now_s: float) -> list[Callable[[], object]]:
        """Record the end of a job; continue a load with the next tier."""
        job_id = end.job.job_id
        transfer, following = port.transfers[job_id]
        transfer.take(end)
        if end.is_at_rest:
            del port.transfers[job_id]
            # Not after an overdue job: the transfer has ended.
            if following and not end.is_late_rest and transfer.missing():
                self._load_from(following, transfer, now_s)
        return self._hand_over(transfer)

    # -- the loop's thread ------------------------------------------------------------------------

    def _progressed(self) -> None:
        """Apply the tiers' reports, and schedule the next call of this method at a deadline."""
        with self._lock:
            if not self._is_open or self._is_closed:
                return
            calls = self._collect()
            if any(map(_inbox_of, self._ports)):
                self._runner.notify()
            deadlines = [lookup.deadline_s for lookup in self._lookups]
            deadlines += [pins.deadline_s for pins in islice(self._pins, 1)]
            if self._timer is not None:
                self._timer.cancel()
            if deadlines:
                delay_s = min(deadlines) - self._runner.now_s()
                self._timer = asyncio.get_running_loop().call_later(delay_s, self._progressed)
        _make(calls)

    @staticmethod
    def _answer(lookup: _Lookup) -> None:
        lookup.future.set_result([key in lookup.found for key in lookup.keys])


def statistics_of(hosts: Iterable[tuple[PluggedTiers, HostRows]]) -> OffloadingStatistics:
    """Return the statistics of tiers under a host, for metrics and `kvoffload top`.

    The primary's slots are the own rows: those taken count as pinned. The tiers have names of their
    own, as in `TierStatistics`.

    Args:
        hosts: Tiers and their rows.
    """
    free = pinned = 0
    sizes, tiers, seen = set(), [], Counter[str]()
    for plugged, rows in hosts:
        free += rows.num_free
        pinned += rows.num_own - rows.num_free
        sizes.add(rows.row_bytes)
        tiers += [replace(tier, name=owner_name(tier.name, seen)) for tier in plugged.stats()]
    figures: dict[str, Any] = {
        figure.name: 0 for figure in fields(PrimaryStatistics) if figure.default_factory is MISSING
    }
    figures["hints"] = {}
    figures["slots"] = SlotStatistics(free=free, writing=0, idle=0, pinned=pinned, held=0)
    figures["row_bytes"] = sizes.pop() if len(sizes) == 1 else 0
    return OffloadingStatistics(primary=PrimaryStatistics(**figures), tiers=tuple(tiers))


def _make(calls: Iterable[Callable[[], object]]) -> None:
    """Complete futures while the lock is not held: their callbacks may call `PluggedTiers`."""
    for call in calls:
        with _host_errors.survived():  # the other futures must be completed
            call()
