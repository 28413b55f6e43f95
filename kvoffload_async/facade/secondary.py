"""A secondary tier with a synchronous interface: wraps any async tier."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from kvoffload_async.abc.maintenance import StoreMaintenance
from kvoffload_async.abc.tier import AsyncTier, CloseReport, KVIdentity, TierPlace
from kvoffload_async.config import Options
from kvoffload_async.core.backpressure import Backpressure
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.index import BreakEven, CostGatedIndex, ExactIndex, KeyIndex, ProbedIndex
from kvoffload_async.core.readings import take_tier
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.errors import StateError
from kvoffload_async.facade.manager import counted
from kvoffload_async.facade.tier_options import (
    TierOptions,
    config_of,
    identity_of,
    reject_unknown_options,
    signature_of,
)
from kvoffload_async.runtime.bridge import Bridge, RuntimeHost, TierLink
from kvoffload_async.runtime.io_pool import suitable_threads
from kvoffload_async.statistics import TierStatistics
from kvoffload_async.tables.keymap import LEAST_KEY_BYTES, MAX_KEY_BYTES, require_keys
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


def create_index(
    tier: AsyncTier, min_blocks: int, prefill_blocks_per_s: float | None = None
) -> KeyIndex:
    """Return the index of a tier that is asked for requests that miss enough blocks.

    Those are `min_blocks` at least, and with `prefill_blocks_per_s` as many as loading pays for.
    """
    index: KeyIndex = (
        ExactIndex()
        if tier.capabilities.exclusive
        else ProbedIndex(
            tier.bounds.concurrent_probes,
            keeps_order=tier.capabilities.probes_prefixes,
            keys_before=tier.capabilities.keys_before,
        )
    )
    if prefill_blocks_per_s is not None:
        return CostGatedIndex(index, min_blocks, BreakEven(prefill_blocks_per_s))
    return index if min_blocks == 1 else CostGatedIndex(index, min_blocks)


def create_state(
    name: str,
    tier: AsyncTier,
    index: KeyIndex,
    slot_bytes: int,
    *,
    enable_kv_events: bool,
    backpressure: Backpressure | None,
) -> TierState:
    """Return the state of a tier that has nothing to do yet."""
    capabilities = tier.capabilities
    events = EventLog(
        capabilities.medium,
        capabilities.locality,
        enabled=enable_kv_events,
        ownership=name,
        announces_removals=capabilities.announces_removals,
        # Else nobody bounds what would be remembered.
        remembers=capabilities.exclusive or capabilities.announces_removals,
    )
    return TierState(
        name,
        index,
        slot_bytes,
        events,
        medium=capabilities.medium,
        locality=capabilities.locality,
        backpressure=backpressure,
    )


def read_threads(wanted: int | None) -> int:
    """Return how many I/O threads prefer loads."""
    return suitable_threads() - 1 if wanted is None else wanted


def owner_name(tier_type: str, seen: Counter[str]) -> str:
    """Return the name that a tier's events carry, unique among tiers that share `seen`."""
    seen[tier_type] += 1
    return tier_type if seen[tier_type] == 1 else f"{tier_type}-{seen[tier_type]}"


class SecondaryTierManager:
    """One secondary tier with a synchronous interface: submit jobs, poll for results.

    Only the constructor, `drain_jobs` and `shutdown` wait, each with a deadline. Every accepted
    job gets exactly one `JobResult`, also through failure, deadline and shutdown.

    A class outside this package may implement the same methods in its own way: it derives from this
    class, overrides all methods from `on_new_request` to `shutdown`, and need not call this
    constructor. `TieringOffloadingManager` then calls these methods; no error of theirs escapes.
    The classes in this package that derive from it are not for deriving: to alter a tier, wrap its
    `AsyncTier`.

    Thread: owner, for all of it. One thread at a time is enough; its identity does not matter.

    Attributes:
        tier_type: The name under which the tier was configured.
        medium: Where its blocks lie.
        locality: How far away that is.
        backpressure_detector: Drops cascades to the tier while it is slow; None: none is dropped.
        link: Connects the tier to its event loop. A `TieringOffloadingManager` drives it itself.
        io_timeout_s: Seconds until a job is reported as failed. A manager that overrides methods
            has twice as long; then its jobs fail, and their slots stay out of use.
    """

    tier_type: str = ""
    medium: Medium = Medium.STORAGE
    locality: Locality = Locality.LOCAL
    backpressure_detector: Backpressure | None = None
    io_timeout_s: float = TierOptions.io_timeout_s
    declares: ClassVar[type[Options]] = Options
    """Declares the options that the constructor takes besides those of `TierOptions`."""
    __signature__: ClassVar[inspect.Signature | None] = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if vars(cls).keys() & {"__init__", "declares"}:
            cls.__signature__ = None  # not the base's
        if "declares" in vars(cls):
            cls.__signature__ = signature_of(cls, cls.declares, TierOptions)

    def __init__(
        self,
        offloading_spec: object,
        primary_kv_view: memoryview,
        tier_type: str,
        tier: AsyncTier,
        **options: Any,  # noqa: ANN401 - their classes declare the types
    ) -> None:
        """Open the tier; waits for that.

        Args:
            offloading_spec: The spec that the tier belongs to. Its `runtime` is shared, if it has
                one; otherwise the tier starts threads of its own.
            primary_kv_view: The primary's buffer, shape `[num_slots, slot_bytes]`, one byte an
                item, C-contiguous.
            tier_type: The name under which the tier was configured.
            tier: What to wrap; owned from now on.
            **options: The options of every tier; see docs/reference/configuration.md.

        Raises:
            ConfigError: The tier cannot work with its options; nothing is left running.
            TierUnavailableError: The tier's place cannot be reached.
            TierTimeoutError: It did not open in time.
        """
        common = self.take_options(tier_type, options)
        shape = primary_kv_view.shape
        if shape is None or len(shape) != 2 or primary_kv_view.itemsize != 1:  # noqa: PLR2004 - 2-D
            raise StateError("primary_kv_view must have shape [num_slots, slot_bytes], in bytes")
        self.tier_type = tier_type
        self.tier = tier
        self.medium = tier.capabilities.medium
        self.locality = tier.capabilities.locality
        self.backpressure_detector = common.backpressure_detector
        self.io_timeout_s = common.io_timeout_s
        self._close_timeout_s = common.close_timeout_s
        state = create_state(
            tier_type,
            tier,
            create_index(tier, common.min_blocks, common.prefill_blocks_per_s),
            shape[1],
            enable_kv_events=common.enable_kv_events,
            backpressure=common.backpressure_detector,
        )
        bridge: Bridge | None = common.runtime or getattr(offloading_spec, "runtime", None)
        host = None
        if bridge is None:
            host = RuntimeHost()
            bridge = host.bridge
        self.link = TierLink(
            bridge,
            state,
            tier,
            kv_view=memoryview(primary_kv_view),
            pool=bridge.create_pool(
                read_threads(common.n_read_threads),
                common.n_write_threads,
                tier.bounds.concurrent_probes,
            ),
            io_timeout_s=common.io_timeout_s,
            probe_timeout_s=common.probe_timeout_s,
            identity=identity_of(common, config_of(offloading_spec), shape[1]),
            host=host,
        )
        self.link.open(common.open_timeout_s)
        self.link.pump()

    def __repr__(self) -> str:
        jobs = counted(self.tier_state.jobs.unreported_count, "job")
        place = self.link.actor.place
        return f"<{type(self).__name__} {self.ownership}: {place}, {jobs} in flight>"

    @property
    def tier_state(self) -> TierState:
        """What the owner knows of the tier."""
        return self.link.state

    @classmethod
    def take_options(cls, tier_type: str, options: Mapping[str, Any]) -> TierOptions:
        """Return those of the constructor's options that every tier takes.

        Raises:
            UnknownOptionError: The constructor does not take an option.
            ConfigError: A value is invalid.
        """
        names = TierOptions.declared() | cls.declares.declared()
        reject_unknown_options(options, names, cls.declares, tier_type)
        return TierOptions.take(options)

    @classmethod
    def check_options(cls, options: Mapping[str, Any], identity: KVIdentity) -> Iterable[TierPlace]:
        """Check a subclass's options before anything is made; see `AsyncTier.check_options`."""
        return ()

    @classmethod
    def maintenance(cls) -> type[StoreMaintenance] | None:
        """Return the class that maintains the stores of these tiers; None: there is none."""
        return None

    # -- a request's life -----------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Begin a request; returns which of its blocks the tier wants."""
        wants_all = self.link.begin_request(req_context)
        return RequestOffloadingContext(
            OffloadPolicy.REQUEST_LEVEL if wants_all else OffloadPolicy.BLOCK_LEVEL
        )

    def on_request_finished(self, req_context: ReqContext) -> None:
        """End a request: nothing more will be submitted for it; its jobs may still run."""
        self.tier_state.finish_request(req_context)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return HIT, MISS, or RETRY while an existence probe is under way. From memory.

        Raises:
            StateError: The key is too long or too short to be one.
        """
        if not LEAST_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
            require_keys([key])
        answer = self.tier_state.index.lookup(key, req_context)
        if answer is LookupResult.RETRY and self.link.inbox:  # its verdict may be in there
            self.link.pump()
            answer = self.tier_state.index.lookup(key, req_context)
        return answer

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Note a use of blocks, head to tail; errors as in `lookup`."""
        require_keys(keys)
        self.tier_state.touch(keys)

    # -- jobs -----------------------------------------------------------------------------------

    def submit_store(self, job_metadata: JobMetadata) -> None:
        """Accept a cascade: its keys are copied from the primary's slots.

        The slots must stay as they are until the job is reported, or, if the result says
        `orphaned`, until `get_released_jobs` names it. Copies nothing on this thread. A job that
        names a key twice, or a slot that is not there, fails with a `RepeatedKeyError` or an
        `UnknownSlotError`.

        Raises:
            StateError: Lengths differ, or a key is too long or too short; nothing was accepted.
        """
        require_keys(job_metadata.keys)
        self.tier_state.submit(job_metadata)

    def submit_load(self, job_metadata: JobMetadata) -> None:
        """Accept a promotion: its keys are copied into the primary's slots.

        Ownership and errors as in `submit_store`.
        """
        require_keys(job_metadata.keys)
        self.tier_state.submit(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that ended since the last call, each once. Never waits."""
        self.poll_tier()
        if not self.tier_state.jobs.has_ended:
            return ()
        ended = self.tier_state.jobs.take_ended()
        for job, result in ended:
            self.tier_state.counters.count(job, result)
        return [result for _, result in ended]

    def get_released_jobs(self) -> Sequence[JobId]:
        """Return the orphaned jobs whose copies ended since the last call, each once."""
        return [record.job.job_id for record in self.tier_state.jobs.take_released()]

    def poll_tier(self) -> None:
        """Hand submitted jobs over, and apply what has happened in the tier."""
        if self.tier_state.effects:
            self.link.bridge.flush()
        self.link.pump()

    def on_schedule_end(self, context: ScheduleEndContext | None = None) -> None:
        """End a step: existence probes and submitted jobs start."""
        self.link.pump()
        self.link.end_step(context)
        self.link.bridge.flush()

    def has_pending_work(self) -> bool:
        """Return whether a job has no result, a result waits, or a probe is unanswered."""
        self.link.pump()
        return self.link.has_pending_work()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Detach and return what appeared in and disappeared from the tier."""
        return self.link.take_events()

    def announce_anew(self) -> None:
        """Announce blocks again when they are stored again: consumers have forgotten everything."""
        self.link.announce_anew()

    def stats(self) -> TierStatistics:
        """Return what the tier has done so far, and how it is now; also when it is closed."""
        return self.link.stats(take_tier(self.tier_state))

    @property
    def ownership(self) -> str | None:
        """The name that the tier's events carry; by default `tier_type`."""
        return self.tier_state.event_log.ownership

    @ownership.setter
    def ownership(self, name: str) -> None:
        self.tier_state.event_log.ownership = name

    # -- the calls that wait --------------------------------------------------------------------

    def drain_jobs(self, timeout: float = 30.0) -> bool:
        """Wait until every submitted job has its result; False if `timeout` seconds ran out.

        The results are left for `get_finished_jobs`. Running copies are not aborted.
        """
        return self.link.drain(timeout)

    def abandon_jobs(self) -> Sequence[JobId]:
        """Give up every job that has no result yet: it fails now; return those still running."""
        return self.tier_state.abandon_rest()

    def shutdown(self, timeout: float | None = None) -> CloseReport:
        """Stop the intake, let running jobs end, fail the rest, close the tier; idempotent.

        Results wait for `get_finished_jobs`; a job that comes later fails at once.

        Args:
            timeout: Seconds for running jobs to end; by default `close_timeout_s`.

        Returns:
            What was left behind: while a job's copy still runs, the primary's memory must stay.
        """
        return self.link.close(self._close_timeout_s if timeout is None else timeout)


SecondaryTierManager.__signature__ = signature_of(SecondaryTierManager, TierOptions)

S = TypeVar("S")


class DeclaredTierManager(SecondaryTierManager, Generic[S]):
    """A manager that creates its tier from the options that `declares` declares.

    `S` is the class of the tier's settings, which are made from the options.
    """

    kind: ClassVar[str]
    """Default of `tier_type`."""

    def __init__(
        self,
        offloading_spec: object,
        primary_kv_view: memoryview,
        tier_type: str = "",
        **options: Any,  # noqa: ANN401 - their classes declare the types
    ) -> None:
        """Create and open the tier; waits for that.

        Args:
            offloading_spec: See `SecondaryTierManager`.
            primary_kv_view: See `SecondaryTierManager`.
            tier_type: See `SecondaryTierManager`; by default the tier's own.
            **options: The options of this tier and of every tier; see
                docs/reference/configuration.md.

        Raises:
            ConfigError: An option is unusable or unknown, or the tier cannot work with its options.
            TierUnavailableError: The tier's directory or server cannot be reached.
            TierTimeoutError: It did not open in time.
        """
        tier_type = tier_type or self.kind
        common = self.take_options(tier_type, options)
        row_bytes = primary_kv_view.nbytes // len(primary_kv_view)
        identity = identity_of(common, config_of(offloading_spec), row_bytes)
        settings = self.settings_of(options, identity)
        options |= self.implied_options(settings)
        tier = self.create_tier(settings)
        super().__init__(offloading_spec, primary_kv_view, tier_type, tier, **options)

    @classmethod
    def check_options(cls, options: Mapping[str, Any], identity: KVIdentity) -> list[TierPlace]:
        """Check every option without creating or connecting anything."""
        return cls.places_of(cls.settings_of(options, identity), identity)

    @classmethod
    @abstractmethod
    def settings_of(cls, options: Mapping[str, Any], identity: KVIdentity) -> S:
        """Return the tier's settings; raises ConfigError."""

    @classmethod
    @abstractmethod
    def create_tier(cls, settings: S) -> AsyncTier:
        """Return the tier, not open yet."""

    @classmethod
    def places_of(cls, settings: S, identity: KVIdentity) -> list[TierPlace]:
        """Return where the tier keeps its blocks; raises ConfigError if they have no room there."""
        return []

    @classmethod
    def implied_options(cls, settings: S) -> dict[str, Any]:
        """Return options of every tier that follow from the tier's own."""
        return {}
