"""A secondary tier behind plain calls: wraps any async tier for a synchronous owner."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from kvoffload_async.abc.maintenance import StoreMaintenance
from kvoffload_async.abc.tier import AsyncTier, CloseReport, KVIdentity, TierPlace
from kvoffload_async.core.backpressure import Backpressure
from kvoffload_async.core.eventlog import EventLog
from kvoffload_async.core.index import BreakEven, CostGatedIndex, ExactIndex, KeyIndex, ProbedIndex
from kvoffload_async.core.readings import Figures, read_tier, take_tier
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.errors import StateError, drop_tracebacks, text_of
from kvoffload_async.facade.manager import counted
from kvoffload_async.facade.tier_options import check_tier_options, config_of, identity_of
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


logger = logging.getLogger(__name__)

_KEYS_A_STEP: Final = 4096
"""How many keys that a tier announces the owner takes in at once: about a millisecond's worth."""


def read_threads(wanted: int | None) -> int:
    """Return how many I/O threads prefer loads."""
    return suitable_threads() - 1 if wanted is None else wanted


def owner_name(tier_type: str, seen: Counter[str]) -> str:
    """Return the name that a tier's events carry, unique among tiers that share `seen`."""
    seen[tier_type] += 1
    return tier_type if seen[tier_type] == 1 else f"{tier_type}-{seen[tier_type]}"


class SecondaryTierManager:
    """One secondary tier, as a scheduler sees it: submit jobs, poll for results.

    Only the constructor, `drain_jobs` and `shutdown` wait, each with a deadline. Every accepted
    job gets exactly one `JobResult`, also through failure, deadline and shutdown.

    Thread: owner, for all of it. One thread at a time is enough; its identity does not matter.

    Attributes:
        tier_type: The name under which the tier was configured.
        medium: Where its blocks lie.
        locality: How far away that is.
        backpressure_detector: Spares the tier some cascades when it is slow, or None.
        tier_state: What the owner knows of the tier. A `TieringOffloadingManager` drives it itself.
        io_timeout_s: Seconds that a job may take. A manager that reports its jobs itself has twice
            as long to do so; then they have failed, whatever becomes of them.
    """

    io_timeout_s: float = 30.0

    def __init__(
        self,
        offloading_spec: object,
        primary_kv_view: memoryview,
        tier_type: str,
        tier: AsyncTier,
        *,
        runtime: Bridge | None = None,
        io_timeout_s: float = 30.0,
        probe_timeout_s: float = 2.0,
        open_timeout_s: float = 30.0,
        close_timeout_s: float = 30.0,
        n_read_threads: int | None = None,
        n_write_threads: int = 1,
        enable_kv_events: bool = False,
        min_blocks: int = 1,
        prefill_blocks_per_s: float | None = None,
        backpressure_detector: Backpressure | None = None,
        model: str | None = None,
        fingerprint: str | None = None,
        namespace: str | None = None,
        rank: int = 0,
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the tier; waits for that.

        Args:
            offloading_spec: The spec that the tier belongs to. Its `runtime` is shared, if it has
                one; a tier on its own starts threads of its own.
            primary_kv_view: The primary's buffer, shape `[num_slots, slot_bytes]`, one byte an
                item, C-contiguous.
            tier_type: The name under which the tier was configured.
            tier: What to wrap; owned from now on.
            runtime: Where the tier runs, if not in the spec's runtime.
            io_timeout_s: Seconds from a job's submission until it is reported failed.
            probe_timeout_s: Seconds until an unanswered existence probe counts as "absent".
            open_timeout_s: Seconds for opening; `slab` has 10 s more for each million blocks that
                fit.
            close_timeout_s: Seconds for `shutdown`, where the call does not say.
            n_read_threads: I/O threads that prefer loads; None: one less than usable CPUs, 1 to 3.
            n_write_threads: I/O threads that prefer stores.
            enable_kv_events: Record events for `take_events`.
            min_blocks: Blocks that a request must miss in the primary and the tiers before this
                one, at least, for this one to be asked: where loading fewer takes longer than
                computing them.
            prefill_blocks_per_s: Blocks that the accelerator computes in a second of prefill. With
                it, this tier is asked only for so many missed blocks that loading them, at the
                latency and bandwidth measured lately, takes less time than computing them; None:
                `min_blocks` alone decides.
            backpressure_detector: See the class.
            model: Name of the model whose blocks these are; by default the spec's.
            fingerprint: Content of the model's weights and whatever else KV bytes depend on; by
                default the spec's.
            namespace: Keeps blocks apart from those of other namespaces.
            rank: Which engine's blocks these are, where several have other bytes under one key.
            run_config: Everything that the layout of a block's bytes depends on; by default the
                spec's geometry and the slot size. What `model`, `fingerprint` and `namespace` say
                is added to it.

        Raises:
            ConfigError: The tier cannot work with its options; nothing is left running.
            TierUnavailableError: The tier's place cannot be reached.
            TierTimeoutError: It did not open in time.
        """
        labels: dict[str, Any] = {
            "model": model,
            "fingerprint": fingerprint,
            "namespace": namespace,
            "rank": rank,
            "run_config": run_config,
        }
        check_tier_options(
            {
                "io_timeout_s": io_timeout_s,
                "probe_timeout_s": probe_timeout_s,
                "open_timeout_s": open_timeout_s,
                "close_timeout_s": close_timeout_s,
                "n_read_threads": n_read_threads,
                "n_write_threads": n_write_threads,
                "enable_kv_events": enable_kv_events,
                "min_blocks": min_blocks,
                "prefill_blocks_per_s": prefill_blocks_per_s,
                **labels,
            }
        )
        shape = primary_kv_view.shape
        if shape is None or len(shape) != 2 or primary_kv_view.itemsize != 1:  # noqa: PLR2004 - 2-D
            raise StateError("primary_kv_view must have shape [num_slots, slot_bytes], in bytes")
        self.tier_type = tier_type
        self.tier = tier
        self.medium: Medium = tier.capabilities.medium
        self.locality: Locality = tier.capabilities.locality
        self.backpressure_detector = backpressure_detector
        self._policy = (
            OffloadPolicy.REQUEST_LEVEL
            if tier.capabilities.request_level
            else OffloadPolicy.BLOCK_LEVEL
        )
        self.io_timeout_s = io_timeout_s
        self._close_timeout_s = close_timeout_s
        self._report: CloseReport | None = None
        self._view = memoryview(primary_kv_view)
        self._row_bytes = shape[1]
        self._gauges_failed = False
        self.tier_state = create_state(
            tier_type,
            tier,
            create_index(tier, min_blocks, prefill_blocks_per_s),
            shape[1],
            enable_kv_events=enable_kv_events,
            backpressure=backpressure_detector,
        )
        self._events = self.tier_state.event_log
        shared: Bridge | None = runtime or getattr(offloading_spec, "runtime", None)
        self._host: RuntimeHost | None = None
        if shared is None:
            self._host = RuntimeHost()
            shared = self._host.bridge
        self._bridge: Bridge = shared
        self.flushes_on_poll = True
        """Whether polling hands submitted jobs over; a composing manager does it once a step."""
        self._link = TierLink(
            self._bridge,
            self.tier_state,
            tier,
            kv_view=self._view,
            pool=self._bridge.create_pool(
                read_threads(n_read_threads), n_write_threads, tier.bounds.concurrent_probes
            ),
            io_timeout_s=io_timeout_s,
            probe_timeout_s=probe_timeout_s,
            identity=identity_of(labels, config_of(offloading_spec), shape[1]),
        )
        try:
            self._link.open(open_timeout_s)
        except BaseException:
            self._release_view()
            if self._host is not None:
                self._host.close()
            raise
        self._link.pump()

    def __repr__(self) -> str:
        jobs = counted(self.tier_state.jobs.unreported_count, "job")
        place = self._link.actor.place
        return f"<{type(self).__name__} {self.ownership}: {place}, {jobs} in flight>"

    @classmethod
    def check_options(cls, options: Mapping[str, Any], identity: KVIdentity) -> Iterable[TierPlace]:
        """Check a subclass's options before anything is made; see `AsyncTier.check_options`."""
        return ()

    @classmethod
    def maintenance(cls) -> type[StoreMaintenance] | None:
        """Return what looks after such tiers' stores; None: nothing does."""
        return None

    # -- a request's life -----------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Begin a request; returns which of its blocks the tier wants."""
        return RequestOffloadingContext(self._policy)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Learn that nothing more will be submitted for a request; its jobs may still run."""
        self.tier_state.finish_request(req_context)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return HIT, MISS, or RETRY while an existence probe is under way. From memory.

        Raises:
            StateError: The key is too long or too short to be one.
        """
        if not LEAST_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
            require_keys([key])
        answer = self.tier_state.index.lookup(key, req_context)
        if answer is LookupResult.RETRY and self._link.inbox:  # its verdict may be in there
            self._link.pump(_KEYS_A_STEP)
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
        """Take in what has happened in the tier; with `flushes_on_poll`, hand jobs over first."""
        if self.flushes_on_poll and self.tier_state.effects:
            self._bridge.flush()
        if self._link.inbox:
            self._link.pump(_KEYS_A_STEP)

    def on_schedule_end(self, context: ScheduleEndContext | None = None) -> None:
        """End a step: take in what the tier did; its existence probes and submitted jobs start."""
        if self._link.inbox:
            self._link.pump(_KEYS_A_STEP)
        self.tier_state.tell_time(self._bridge.runner.now_s)
        self.tier_state.end_step()
        if self.flushes_on_poll:
            self._bridge.flush()

    def has_pending_work(self) -> bool:
        """Tell whether a job has no result yet, a result waits, or a probe is unanswered."""
        if self._link.inbox:
            self._link.pump(_KEYS_A_STEP)
        return bool(self._link.inbox) or self.tier_state.has_pending_work

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Detach and return what appeared in and disappeared from the tier."""
        return self.tier_state.take_events()

    def announce_anew(self) -> None:
        """Announce blocks again when they are stored again: consumers have forgotten everything."""
        self._events.announce_anew()

    def stats(self, taken: Figures | None = None) -> TierStatistics:
        """Return what the tier has done so far, and how it is now; also when it is closed.

        Args:
            taken: What the planner knows of the tier, from `take_tier`; then the call is any
                thread's. None: there is no planner.
        """
        try:
            gauges = dict(self.tier.gauges())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - third-party code
            gauges = {}
            if not self._gauges_failed:
                self._gauges_failed = True
                drop_tracebacks(error)  # before it is logged, as logs may be kept
                logger.warning("tier %s: gauges() failed: %s", self.tier_type, text_of(error))
        return read_tier(
            take_tier(self.tier_state) if taken is None else taken,
            self.tier_state,
            name=self.ownership or self.tier_type,
            row_bytes=self._row_bytes,
            waiting_jobs=self._link.actor.waiting_jobs,
            gauges=gauges,
        )

    @property
    def ownership(self) -> str | None:
        """The name that the tier's events carry; by default `tier_type`."""
        return self._events.ownership

    @ownership.setter
    def ownership(self, name: str) -> None:
        self._events.ownership = name

    # -- the calls that wait --------------------------------------------------------------------

    def drain_jobs(self, timeout: float = 30.0) -> bool:
        """Wait until every submitted job has its result; False if `timeout` seconds ran out.

        The results are left for `get_finished_jobs`. Running copies are not aborted.
        """
        return self._link.drain(timeout)

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
        timeout_s = self._close_timeout_s if timeout is None else timeout
        if self._report is None:
            self._report = self._link.close(timeout_s)
            if self._host is not None:
                self._host.close(timeout_s)
                self._link.pump()
            if not self._report.unfinished_jobs:
                self._release_view()
        return self._report

    def _release_view(self) -> None:
        try:
            self._view.release()
        except BufferError:
            logger.warning("%s: the tier still holds the primary's buffer", self.tier_type)
