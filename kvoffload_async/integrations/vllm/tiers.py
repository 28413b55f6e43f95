"""This package's tiers for vLLM's `TieringOffloadingSpec`: `VllmTier`, and a class for each tier.

vLLM's manager does not suspend a failing tier, so the tiers do: see `core.health`. While a tier is
suspended, its lookups are misses and its stores fail at once, so no request and no reset waits.

vLLM reuses a job's slots as soon as it has the job's result. Therefore an overdue job whose copy
still runs is reported, as failed, only when its copy has ended. Until then vLLM sees a slow job:
its slots stay pinned or reserved, and a request that waits for it keeps waiting. If the copy does
not end, `drain_jobs` raises, so that vLLM's reset fails (restart the engine then). So does
`shutdown`, after which vLLM leaves the primary's memory mapped.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any, ClassVar, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.tiering import base as tiering
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

from kvoffload_async.config import OffloadConfig, TierOptions
from kvoffload_async.core.ledger import refused
from kvoffload_async.errors import (
    ConfigError,
    StateError,
    TierTimeoutError,
    TierUnavailableError,
    naming_shortage,
)
from kvoffload_async.facade.plugged import OverdueJobs
from kvoffload_async.facade.secondary import SecondaryTierManager, owner_name
from kvoffload_async.facade.tier_factory import SecondaryTierFactory
from kvoffload_async.facade.tier_group import BreakerLog
from kvoffload_async.facade.tier_options import ManagerSpec, options_of
from kvoffload_async.integrations.vllm import convert
from kvoffload_async.integrations.vllm.identity import ModelContent, canonical_format, completed
from kvoffload_async.integrations.vllm.options import (
    NAMES_UNDER_VLLM,
    check_no_tenants,
    check_place_of_options,
    parse_locality,
    take_identity_options,
)
from kvoffload_async.integrations.vllm.row_layout import announced_layout, layout_of_layers
from kvoffload_async.runtime.bridge import KEYS_A_STEP, Bridge
from kvoffload_async.runtime.log_level import show_log
from kvoffload_async.runtime.loop import LoopThread
from kvoffload_async.tiers.fs.layout import Namespace
from kvoffload_async.types import JobMetadata, JobResult, OffloadKey, make_offload_key

logger = logging.getLogger(__name__)

FAILED_JOBS: Final = "vllm:kvoffload_async_failed_jobs"
OVERDUE_JOBS: Final = "vllm:kvoffload_async_overdue_jobs"
"""Names of this package's counters; vLLM unregisters only metrics named `vllm:...`."""
CONFIG_INFO_KEYS: Final = (
    "kvoffload_async_version",
    "kvoffload_async_tier",
    "kvoffload_async_location",
)
_DRAIN_GRACE_S: Final = 5.0


class VllmTier(tiering.SecondaryTierManager):
    """Runs this package's tier `kind` under vLLM's `TieringOffloadingManager`.

    Accepts the options of the tier, except those that vLLM determines, plus `namespace`,
    `fingerprint` and `trust_vllm_directory`; see `identity`. If the model's content is unknown,
    blocks are used by this process only. Each data-parallel replica has its own store of a tier for
    one process; a store whose blocks are invalid because the model's weights or settings changed is
    emptied (`on_mismatch`).

    Thread: any, one at a time. vLLM calls under its manager's lock, from different threads.
    """

    kind: ClassVar[str]
    """Name of the tier in this package's `SecondaryTierFactory`."""
    medium: ClassVar[base.Medium] = base.Medium.STORAGE

    def __init__(
        self,
        offloading_spec: base.OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        *,
        enable_kv_events: bool = False,
        locality: str | None = None,
        io_timeout_s: float = 30.0,
        **options: Any,  # noqa: ANN401 - a user's JSON; checked by the tier itself
    ) -> None:
        """Open the tier; blocks until it is open.

        Args:
            offloading_spec: vLLM's spec.
            primary_kv_view: The primary's buffer, shape `[num_slots, slot_bytes]`; no view of it
                remains after `shutdown`.
            tier_type: The `type` in the tier's configuration.
            backpressure_detector: vLLM's.
            enable_kv_events: Announce stored and evicted blocks; needs events to be enabled in
                vLLM's `kv_events_config`.
            locality: "LOCAL", "REMOTE", or None if not configured.
            io_timeout_s: Seconds from a job's submission to its deadline.
            **options: The other options of the tier.

        Raises:
            ConfigError: An option is unknown or invalid; nothing is left running.
            TierUnavailableError: The tier's storage cannot be reached.
            TierTimeoutError: The tier did not open in time.
        """
        show_log()
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        check_place_of_options(offloading_spec.config.extra_config)
        check_no_tenants(offloading_spec.config.extra_config)
        self.identity_options = take_identity_options(self.kind, options, tier_type)
        self._process_folders = ExitStack()
        own = {"enable_kv_events": enable_kv_events, "io_timeout_s": io_timeout_s}
        TierOptions.take(own)
        self.locality = convert.locality_of(parse_locality(self.kind, locality))
        if locality is not None:
            options["locality"] = locality
        if enable_kv_events and not offloading_spec.kv_events_config.enable_kv_cache_events:
            logger.warning(
                "%s: enable_kv_events has no effect, as vLLM's kv_events_config has "
                "enable_kv_cache_events off",
                tier_type,
            )
            own["enable_kv_events"] = False
        options |= own
        self._drain_timeout_s = io_timeout_s + _DRAIN_GRACE_S
        self._overdue = OverdueJobs()
        self._finished: list[tiering.JobResult] = []
        self._counted: Counter[tuple[str, tuple[str, ...]]] = Counter()
        with naming_shortage("the event loop of the tier cannot be started"):
            self._bridge = Bridge(LoopThread())
        self._rows = convert.rows_of(primary_kv_view)
        try:
            config = self.layout(offloading_spec, options)
            given = offloading_spec.config
            has_one_cell = given.replicated_layout or given.canonical_layout
            geometry = OffloadConfig(
                cpu_bytes_to_use=0,
                block_bytes=0,
                num_workers=1 if has_one_cell else given.parallel.world_size,
            )
            self._tier: SecondaryTierManager = SecondaryTierFactory.create_secondary_tier(
                config,
                self._rows,
                ManagerSpec(self._bridge, geometry),
            )
            self._state = self._tier.tier_state
            self._state.health.now_s = time.monotonic()  # from now on it suspends the tier
            self._breaker_log = BreakerLog([self._state])
        except BaseException:
            self._bridge.close()
            self._rows.release()
            self._process_folders.close()
            raise
        self._tier.ownership = owner_name(tier_type, ModelContent.of(offloading_spec).tier_types)

    def layout(
        self, offloading_spec: base.OffloadingSpec, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the tier's configuration, completed with the keys that vLLM's determines."""
        tier = {"type": self.kind, **options}
        if "root_dir" in options_of(SecondaryTierFactory.get_tier_class(self.kind)):
            tier["root_dir"] = _absolute(options.get("root_dir"))
        config = offloading_spec.config
        arguments = ModelContent.of(offloading_spec).arguments
        # With several ranks, the workers' tensors are in other processes. vLLM's rows have room for
        # a copy of each rank, so the sizes of rows of replicated heads differ.
        if canonical := canonical_format(config):
            canonical += f" in {self._rows.nbytes // len(self._rows)} bytes"
        is_alone = config.parallel.world_size == 1 and not canonical
        layers = arguments.registered_layers() if arguments and is_alone else {}
        groups = [group.layer_names for group in config.groups]
        layout = (
            layout_of_layers(layers, groups) if layers else announced_layout(arguments, canonical)
        )
        identity, folders = self.identity_options, self._process_folders
        return completed(tier, offloading_spec, identity, layout, folders, name=self.tier_type)

    # -- a request's life -----------------------------------------------------------------------

    def on_new_request(self, req_context: base.ReqContext) -> base.RequestOffloadingContext:
        """Begin a request."""
        return convert.offloading_context(
            self._tier.on_new_request(convert.request_of(req_context))
        )

    def on_request_finished(self, req_context: base.ReqContext) -> None:
        """End a request; no more jobs are submitted for it."""
        self._tier.on_request_finished(convert.request_of(req_context))

    def lookup(self, key: OffloadKey, req_context: base.ReqContext) -> base.LookupResult:
        """Return HIT, MISS, or RETRY while an existence probe is in flight. Does no I/O.

        While the tier is suspended, every answer is MISS, also for the request of the trial.
        """
        health = self._state.health
        health.now_s = time.monotonic()
        if not health.loads.permits(health.now_s):
            return base.LookupResult.MISS
        return convert.lookup_result(self._tier.lookup(key, convert.request_of(req_context)))

    def touch(self, keys: Collection[OffloadKey], req_context: base.ReqContext) -> None:
        """Record a use of blocks, first block first."""
        self._tier.touch(tuple(keys), convert.request_of(req_context))

    # -- jobs -----------------------------------------------------------------------------------

    def submit_store(self, job_metadata: tiering.TransferJob) -> None:
        """Submit a store to the tier; a job that cannot be run gets a failed result."""
        self._submit(convert.job_of(job_metadata))

    def submit_load(self, job_metadata: tiering.TransferJob) -> None:
        """Submit a load from the tier; a job that cannot be run gets a failed result."""
        self._submit(convert.job_of(job_metadata))

    def get_finished_jobs(self) -> Iterable[tiering.JobResult]:
        """Return the results of jobs whose copies have ended since the last call. Non-blocking."""
        self._collect()
        finished, self._finished = self._finished, []
        return finished

    def on_schedule_end(self, context: base.ScheduleEndContext) -> None:
        """End a scheduler step: start its existence probes and submitted jobs."""
        self._state.health.now_s = now_s = time.monotonic()
        self._tier.on_schedule_end()
        self._breaker_log.update(now_s)

    def has_pending_work(self) -> bool:
        """Return whether a job's result is unreported or a probe is unanswered."""
        return bool(self._overdue or self._finished) or self._tier.has_pending_work()

    def take_events(self) -> Iterable[base.OffloadingEvent]:
        """Remove and return a batch of events of blocks added to and removed from the tier."""
        events = self._tier.link.take_events(KEYS_A_STEP)
        return [convert.event(event, self.locality) for event in events]

    # -- blocking calls --------------------------------------------------------------------

    def drain_jobs(self) -> None:
        """Wait until no job's copy is running; `get_finished_jobs` returns the results.

        vLLM drains tiers to reset its cache and announces to event consumers that all blocks are
        gone. So blocks that are stored again are announced again.

        Raises:
            TierTimeoutError: Copies still run after the jobs' deadline. No job was abandoned: the
                caller may retry, and must not access the slots.
        """
        deadline_s = time.monotonic() + self._drain_timeout_s
        self._collect()
        while moving := [*self._overdue, *(job.job_id for job in self._state.jobs.unreported())]:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                jobs = ", ".join(map(str, sorted(moving)))
                raise TierTimeoutError(
                    f"{self.tier_type}: after {self._drain_timeout_s} s the copies of jobs {jobs} "
                    "still run; their slots cannot be reused"
                )
            self._bridge.wait_for_progress(left_s)
            self._collect()
        self._tier.announce_anew()

    def shutdown(self) -> None:
        """Stop accepting jobs, let running ones end, fail the rest, close the tier; idempotent.

        Raises:
            TierTimeoutError: Copies still run after `close_timeout_s`, so the primary's memory must
                stay mapped.
        """
        self._state.health.close()
        report = self._tier.shutdown()
        self._bridge.close()
        if report.unfinished_jobs:
            jobs = ", ".join(map(str, report.unfinished_jobs))
            raise TierTimeoutError(
                f"{self.tier_type}: the copies of jobs {jobs} still run; "
                "the primary's memory must stay mapped"
            )
        self._rows.release()
        self._primary_kv_view = memoryview(b"")
        self._process_folders.close()
        if report.error is not None:
            logger.warning("%s: closing failed: %s", self.tier_type, report.error)

    # -- monitoring ------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, base.OffloadingMetricMetadata]:
        """Return the counters that `get_stats` adds to vLLM's own per-tier metrics."""
        failed = "Jobs of a secondary tier with a failed block, by the kind of error."
        overdue = "Jobs of a secondary tier whose copy still ran at their deadline."
        return convert.definitions(
            base.OffloadingCounterMetadata, {FAILED_JOBS: failed}, "tier", "error"
        ) | convert.definitions(base.OffloadingCounterMetadata, {OVERDUE_JOBS: overdue}, "tier")

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return the counters' increments since the last call, or None."""
        counted, self._counted = self._counted, Counter()
        return convert.counter_stats((*counter, amount) for counter, amount in counted.items())

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the labels in `config_info`."""
        return CONFIG_INFO_KEYS

    def config_info(self) -> Mapping[str, str]:
        """Return constant labels: the tier's kind and location."""
        values = (version("kvoffload-async"), self.kind, self._tier.tier.describe())
        return dict(zip(CONFIG_INFO_KEYS, values, strict=True))

    # -- inside ---------------------------------------------------------------------------------

    def _submit(self, job: JobMetadata) -> None:
        health = self._state.health
        if not job.is_promotion and not health.stores.permits(job.submit_time):
            reason = f"stores are suspended: {health.stores.reason}"
            self._report(job.keys, refused(job, TierUnavailableError(reason)))
            return
        try:
            # Not the manager's call, which checks the length of each key: these have vLLM's hashes.
            self._state.submit(job)
        except StateError as error:
            logger.error("Job %s was refused: %s", job.job_id, error)  # noqa: TRY400 - expected
            self._report(job.keys, refused(job, error))

    def _collect(self) -> None:
        """Collect ended jobs; hold back an overdue job until its copy has ended."""
        self._tier.poll_tier()
        jobs = self._state.jobs
        for job, result, is_at_rest in self._overdue.take(jobs.take_ended(), jobs.take_released()):
            if is_at_rest:
                self._report(job.keys, result)
            else:
                self._counted[OVERDUE_JOBS, (self.tier_type,)] += 1

    def _report(self, keys: tuple[OffloadKey, ...], result: JobResult) -> None:
        self._finished.append(convert.job_result(result, keys))
        if result.error is not None:
            cause = type(result.error).__name__
            self._counted[FAILED_JOBS, (self.tier_type, cause)] += 1


class FsTier(VllmTier):
    """One file per block. Replicas and hosts serving the same model can share a directory.

    Accepts the options of vLLM's own `fs` tier as well.

    Attributes:
        file_mapper: `get_file_name(key)` returns the path of a block.
    """

    kind: ClassVar[str] = "fs"

    file_mapper: Namespace

    def layout(
        self, offloading_spec: base.OffloadingSpec, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        found = super().layout(offloading_spec, options)
        trust, directory = self.identity_options.trust_vllm_directory, found["root_dir"]
        self.file_mapper = Namespace(directory, found["run_config"], found["rank"], is_vllms=trust)
        if trust:
            _check_common_name(offloading_spec, directory, self.file_mapper)
        return found


for _name, _kind in NAMES_UNDER_VLLM.items():
    if _name not in globals():  # it has no class of its own above
        globals()[_name] = type(_name, (VllmTier,), {"kind": _kind, "__module__": __name__})


def _check_common_name(
    offloading_spec: base.OffloadingSpec, directory: str, namespace: Namespace
) -> None:
    """Check that vLLM's `fs` tier and this tier use the same file names; raises ConfigError."""
    probe = make_offload_key(bytes(range(32)))
    ours = namespace.get_file_name(probe)
    theirs = convert.file_mapper_of(offloading_spec, directory).get_file_name(probe)
    if ours != theirs:
        raise ConfigError(
            f"root_dir: {directory!r}: vLLM would keep blocks as {theirs!r} and this package as "
            f"{ours!r}; a model name this long cannot be shared, so serve it under a short path"
        )


def _absolute(root_dir: object) -> str:
    """Return a directory's absolute path, relative to the working directory as under vLLM."""
    if not isinstance(root_dir, str) or not root_dir:
        raise ConfigError(f"root_dir: {root_dir!r} is not valid; give the path of a directory")
    return os.path.abspath(root_dir)  # noqa: PTH100 - Path.absolute keeps the dots
