"""A secondary tier with a synchronous interface: wraps any async tier."""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any, ClassVar, Final

from kvoffload_async.abc.maintenance import StoreMaintenance
from kvoffload_async.abc.tier import AsyncTier, CloseReport, KVIdentity, TierLocation
from kvoffload_async.config import TierOptions
from kvoffload_async.core.backpressure import Backpressure
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.index import BreakEven, CostGatedIndex, ExactIndex, KeyIndex, ProbedIndex
from kvoffload_async.core.tier_state import TIER_FIGURES, TierState
from kvoffload_async.errors import Remedies, StateError, check_remedies, naming_shortage
from kvoffload_async.facade.tier_options import (
    ManagerOptions,
    arguments_for,
    config_of,
    identity_of,
    options_of,
    reject_unknown_options,
    signature_of,
)
from kvoffload_async.runtime.bridge import Bridge, TierLink
from kvoffload_async.runtime.lifetime import Closing, guard_forks
from kvoffload_async.runtime.loop import LoopThread
from kvoffload_async.statistics import TierStatistics
from kvoffload_async.tables.keymap import LEAST_KEY_BYTES, MAX_KEY_BYTES, require_keys
from kvoffload_async.tiers._sealed_names import NameKeys, SealedNames
from kvoffload_async.tiers.example import ExampleTier
from kvoffload_async.tiers.fs.tier import FsTier
from kvoffload_async.tiers.slab.tier import SlabTier
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
    counted,
)
from kvoffload_async.waiting import seconds

_DIGEST_DIGITS: Final = 12
_STOP_THREADS_S: Final = 0.2
"""Seconds to wait for the end of idle threads."""


def create_index(
    tier: AsyncTier, min_blocks: int, prefill_blocks_per_s: float | None = None
) -> KeyIndex:
    """Return a tier's key index; it declines requests missing too few blocks to justify a load.

    The minimum is `min_blocks` or, with `prefill_blocks_per_s`, the break-even point if that is
    higher.
    """
    index: KeyIndex = ExactIndex()
    if not tier.capabilities.exclusive:
        keeps_order = tier.capabilities.probes_prefixes
        index = ProbedIndex(tier.bounds.concurrent_probes, keeps_order=keeps_order)
    if prefill_blocks_per_s is not None:
        return CostGatedIndex(index, min_blocks, BreakEven(prefill_blocks_per_s))
    return index if min_blocks == 1 else CostGatedIndex(index, min_blocks)


def create_state(name: str, tier: AsyncTier, options: ManagerOptions, slot_bytes: int) -> TierState:
    """Return the initial state of a tier."""
    capabilities = tier.capabilities
    events = EventLog(
        capabilities.medium,
        capabilities.locality,
        enabled=options.enable_kv_events,
        ownership=name,
        announces_removals=capabilities.announces_removals,
        # For other tiers the table would grow without bound: they announce no removals.
        remembers=capabilities.exclusive or capabilities.announces_removals,
    )
    return TierState(
        name,
        create_index(tier, options.min_blocks, options.prefill_blocks_per_s),
        slot_bytes,
        events,
        backpressure=options.backpressure_detector,
        remedies=check_remedies(tier.remedies, type(tier)),
    )


def owner_name(tier_type: str, seen: Counter[str]) -> str:
    """Return the name of a tier in its events, unique among the tiers that share `seen`."""
    seen[tier_type] += 1
    return tier_type if seen[tier_type] == 1 else f"{tier_type}-{seen[tier_type]}"


class SecondaryTierManager:
    """One secondary tier with a synchronous interface: submit jobs, poll for results.

    A subclass with a `tier_class` creates its tier, from the options that the class declares.

    Only the constructor, `drain_jobs` and `shutdown` block, each with a timeout. Every accepted
    job gets exactly one `JobResult`, also after a failure, a timeout or a shutdown.

    An external manager derives from this class and overrides all methods from `on_new_request` to
    `shutdown`; it need not call this constructor. `TieringOffloadingManager` calls these methods
    and catches their errors. Do not subclass the managers of this package: to change a tier, wrap
    its `AsyncTier`.

    Not thread-safe; call from one thread at a time. In a forked child, every call but `shutdown`,
    which has no effect there, raises `StateError`.

    Attributes:
        tier_type: The name under which the tier was configured.
        medium: Storage medium of the blocks.
        locality: Distance of the storage.
        backpressure_detector: Drops cascades while the tier is slow; None: no cascade is dropped.
        link: Connects the tier to its event loop. A `TieringOffloadingManager` drives it itself.
        io_timeout_s: Seconds until a job is reported as failed. A manager that overrides methods
            has twice as long; then its jobs fail, and their slots stay out of use.
    """

    tier_type: str = ""
    medium: Medium = Medium.STORAGE
    locality: Locality = Locality.LOCAL
    backpressure_detector: Backpressure | None = None
    io_timeout_s: float = TierOptions.io_timeout_s
    remedies: ClassVar[Remedies] = {}
    """Remedies for failures of an external manager; see `AsyncTier.remedies`."""
    tier_class: ClassVar[type[AsyncTier] | None] = None
    """Class of the tier that the constructor creates; None: the constructor is given the tier."""
    __signature__: ClassVar[inspect.Signature | None] = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if vars(cls).keys() & {"__init__", "tier_class"}:
            cls.__signature__ = None  # the options of the base do not apply
        if "tier_class" in vars(cls):
            cls.__signature__ = signature_of(cls, cls.tier_class)

    def __init__(
        self,
        offloading_spec: object,
        primary_kv_view: memoryview,
        tier_type: str = "",
        tier: AsyncTier | None = None,
        **options: Any,  # noqa: ANN401 - their classes declare the types
    ) -> None:
        """Create the tier if it is not given, and open it; blocks.

        Args:
            offloading_spec: The spec that the tier belongs to. Its `runtime` is shared, if it has
                one; otherwise the tier starts threads of its own.
            primary_kv_view: The primary's buffer, shape `[num_slots, slot_bytes]`, item size
                1 byte, C-contiguous.
            tier_type: The name under which the tier was configured; by default the class's.
            tier: The tier to wrap; owned by the manager. By default a new one of `tier_class`.
            **options: The options of every tier and, unless it is given, those of the tier; see
                docs/reference/configuration.md.

        Raises:
            ConfigError: An option is unknown or invalid, a library is not installed, or the tier
                rejects its options; everything started is stopped again.
            TierUnavailableError: The tier's directory or server cannot be reached, or threads,
                descriptors or memory are exhausted.
            TierTimeoutError: It did not open in time.
        """
        self.tier_type = tier_type = tier_type or self.tier_type
        names = ManagerOptions.declared().keys() | options_of(self.tier_class).keys()
        reject_unknown_options(options, names, self.tier_class, tier_type)
        common = self.common_options(options)
        shape = primary_kv_view.shape
        if shape is None or len(shape) != 2 or primary_kv_view.itemsize != 1:  # noqa: PLR2004 - 2-D
            raise StateError("primary_kv_view must have shape [num_slots, slot_bytes], in bytes")
        identity = identity_of(common, config_of(offloading_spec), shape[1])
        if tier is None:
            if self.tier_class is None:
                raise StateError(f"{type(self).__name__} has no tier_class: give it a tier")
            arguments = arguments_for(self.tier_class, options)
            tier = self.tier_class.from_options(arguments, identity)
        self.tier = tier
        if (keys := common.read_name_keys()) is not None:
            tier = SealedNames(tier, NameKeys(keys))
        self.medium = tier.capabilities.medium
        self.locality = tier.capabilities.locality
        self.backpressure_detector = common.backpressure_detector
        self.io_timeout_s = common.io_timeout_s
        self._close_timeout_s = common.close_timeout_s
        state = create_state(tier_type, self.tier, common, shape[1])
        able = tier.capabilities
        state.deletes, state.lists, state.ages = able.deletes, able.lists, able.ages
        bridge: Bridge | None = common.runtime or getattr(offloading_spec, "runtime", None)
        owns_loop = bridge is None
        if tier.io_threads is None:
            loads = common.read_threads(waits_for_device=tier.waits_for_device)
            stores = common.n_write_threads
        else:
            loads, stores = tier.io_threads - 1, 1
        with ExitStack() as undo:
            with naming_shortage(
                f"n_read_threads: {loads}, n_write_threads: {stores}: the threads of tier "
                f"{tier_type} cannot be started"
            ):
                if bridge is None:
                    bridge = Bridge(LoopThread())
                    undo.callback(bridge.close)
                pool = bridge.create_pool(loads, stores, tier.bounds.concurrent_probes)
            undo.callback(pool.close, _STOP_THREADS_S)
            self.link = TierLink(
                bridge,
                state,
                tier,
                kv_view=memoryview(primary_kv_view),
                pool=pool,
                io_timeout_s=common.io_timeout_s,
                probe_timeout_s=common.probe_timeout_s,
                identity=identity,
                owns_loop=owns_loop,
            )
            undo.pop_all()
        if self.locality is Locality.REMOTE and not tier.capabilities.exclusive:
            store = f"{self.link.actor.location}\n{identity.digest}".encode()
            digest = hashlib.sha256(store).hexdigest()[:_DIGEST_DIGITS]
            state.event_log.shared_store = f"{tier_type}@{digest}"
        self.link.open(common.open_timeout_s)
        self.link.pump()
        guard_forks(self)
        guard_forks(self.link, _closing=Closing.closed(CloseReport()))

    def __repr__(self) -> str:
        jobs = counted(self.tier_state.jobs.unreported_count, "job")
        location = self.link.actor.location
        return f"<{type(self).__name__} {self.ownership}: {location}, {jobs} in flight>"

    @property
    def tier_state(self) -> TierState:
        """The tier's state on the owner's thread."""
        return self.link.state

    @classmethod
    def common_options(cls, options: Mapping[str, Any]) -> ManagerOptions:
        """Return the options common to all tiers; raises ConfigError if a value is invalid.

        An option of the tier with the name of a common one is the tier's alone.
        """
        own = options_of(cls.tier_class)
        return ManagerOptions.take({key: options[key] for key in options if key not in own})

    @classmethod
    def check_options(
        cls, options: Mapping[str, Any], identity: KVIdentity
    ) -> Iterable[TierLocation]:
        """Check the tier's options, without side effects; see `AsyncTier.check_options`."""
        cls.common_options(options).read_name_keys()
        if cls.tier_class is None:
            return ()
        return cls.tier_class.check_options(arguments_for(cls.tier_class, options), identity)

    @classmethod
    def maintenance(cls) -> type[StoreMaintenance] | None:
        """Return the maintenance class of the tier's stores, or None."""
        return None if cls.tier_class is None else cls.tier_class.maintenance()

    # -- requests --------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Begin a request; return the tier's offload policy for its blocks."""
        wants_all = self.link.begin_request(req_context)
        return RequestOffloadingContext(
            OffloadPolicy.REQUEST_LEVEL if wants_all else OffloadPolicy.BLOCK_LEVEL
        )

    def on_request_finished(self, req_context: ReqContext) -> None:
        """End a request: no further job is submitted for it; its jobs may still run."""
        self.tier_state.finish_request(req_context)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return HIT, MISS, or RETRY while an existence probe is running. Non-blocking.

        Raises:
            StateError: The key has an invalid length.
        """
        if not LEAST_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
            require_keys([key])
        answer = self.tier_state.index.lookup(key, req_context)
        if answer is LookupResult.RETRY and self.link.inbox:  # may contain the probe's answer
            self.link.pump()
            answer = self.tier_state.index.lookup(key, req_context)
        return answer

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Record a use of blocks, given in prompt order; errors as in `lookup`."""
        require_keys(keys)
        self.tier_state.touch(keys)

    # -- jobs -----------------------------------------------------------------------------------

    def submit_store(self, job_metadata: JobMetadata) -> None:
        """Submit a cascade: copy blocks from the primary's slots to the tier. Non-blocking.

        The slots must not change until the job is reported or, if its result is `orphaned`, until
        `get_released_jobs` returns it. A job with a duplicate key or an invalid slot fails with a
        `RepeatedKeyError` or an `UnknownSlotError`.

        Raises:
            StateError: Lengths differ, or a key has an invalid length; the job is not accepted.
        """
        require_keys(job_metadata.keys)
        self.tier_state.submit(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        """Submit a promotion: copy blocks from the tier into the primary's slots.

        Ownership and errors as in `submit_store`.
        """
        require_keys(job_metadata.keys)
        self.tier_state.submit(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the results of jobs that ended since the last call, each once. Non-blocking."""
        self.poll_tier()
        return [result for _, result in self.tier_state.jobs.take_ended()]

    def get_released_jobs(self) -> Sequence[JobId]:
        """Return the orphaned jobs whose copies ended since the last call, each once."""
        return [record.job.job_id for record in self.tier_state.jobs.take_released()]

    def poll_tier(self) -> None:
        """Hand submitted jobs to the tier, and apply the tier's events."""
        if self.tier_state.effects:
            self.link.bridge.flush()
        self.link.pump()

    def on_schedule_end(self, context: ScheduleEndContext | None = None) -> None:
        """End a step; start its existence probes and submitted jobs."""
        self.link.pump()
        self.link.end_step(context)
        self.link.bridge.flush()

    def has_pending_work(self) -> bool:
        """Return whether a job is unfinished, a result is uncollected, or a probe is unanswered."""
        self.link.pump()
        return self.link.has_pending_work()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Remove and return the events of stored and removed blocks."""
        return self.link.take_events()

    def announce_anew(self) -> None:
        """Emit events for blocks again when they are next stored or loaded.

        For consumers of events that have lost their state.
        """
        self.link.announce_anew()

    def stats(self) -> TierStatistics:
        """Return the tier's counters and gauges, also after shutdown."""
        return self.link.stats(TIER_FIGURES.take(self.tier_state, 0))

    @property
    def ownership(self) -> str | None:
        """Name of the tier in its events; see `OffloadingEvent`. By default `tier_type`."""
        return self.tier_state.event_log.owner

    @ownership.setter
    def ownership(self, name: str) -> None:
        self.tier_state.event_log.ownership = name

    # -- calls that block ----------------------------------------------------------------------

    def drain_jobs(self, timeout: float = 30.0) -> bool:
        """Wait until every submitted job has its result; return False after `timeout` seconds.

        `get_finished_jobs` returns the results. Running copies are not aborted.
        """
        return self.link.drain(seconds(timeout, "timeout"))

    def abandon_jobs(self) -> Sequence[JobId]:
        """Fail every job without a result; return the jobs whose copies still run."""
        return self.tier_state.abandon_rest()

    def shutdown(self, timeout: float | None = None) -> CloseReport:
        """Refuse new jobs, wait for running ones, fail the rest, close the tier; idempotent.

        `get_finished_jobs` returns the results. A job submitted later fails at once.

        Args:
            timeout: Seconds for running jobs to end; by default `close_timeout_s`.

        Returns:
            The unfinished work; while a copy still runs, the primary must stay allocated.

        Raises:
            StateError: Called on the event loop's thread, for which it would wait.
        """
        timeout_s = self._close_timeout_s if timeout is None else seconds(timeout, "timeout")
        return self.link.close(timeout_s)


SecondaryTierManager.__signature__ = signature_of(SecondaryTierManager, None)


class ExampleSecondaryTierManager(SecondaryTierManager):
    """The manager of the tier `example`."""

    tier_type = "example"
    tier_class = ExampleTier
    tier: ExampleTier

    def get_num_blocks(self) -> int:
        """Return the number of stored blocks."""
        return self.tier.get_num_blocks()


class FileSystemTierManager(SecondaryTierManager):
    """The manager of the tier `fs`. The constructor creates its directory."""

    tier_type = "fs"
    tier_class = FsTier


class SlabTierManager(SecondaryTierManager):
    """The manager of the tier `slab`. The constructor opens the store and reads its index."""

    tier_type = "slab"
    tier_class = SlabTier


@cache
def manager_of(tier_class: type[AsyncTier]) -> type[SecondaryTierManager]:
    """Return the manager class for a tier class."""
    for manager in (ExampleSecondaryTierManager, FileSystemTierManager, SlabTierManager):
        if manager.tier_class is tier_class:
            return manager
    members = {"tier_class": tier_class, "__module__": tier_class.__module__}
    return type(f"{tier_class.__name__}Manager", (SecondaryTierManager,), members)
