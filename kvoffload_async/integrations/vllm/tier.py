"""Adapter that runs one of this package's tiers under vLLM's tiering manager.

vLLM reuses a job's slots as soon as it has the job's result. Therefore an overdue job whose copy
still runs is reported, as failed, only when its copy has ended. Until then vLLM sees a slow job:
its slots stay pinned or reserved, and a request that waits for it keeps waiting. If the copy does
not end, `drain_jobs` raises, so that vLLM's reset fails (restart the engine then). So does
`shutdown`, after which vLLM leaves the primary's memory mapped.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.tiering import base as tiering
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

from kvoffload_async.config import OffloadConfig, reject_unknown
from kvoffload_async.core.ledger import refused
from kvoffload_async.errors import ConfigError, StateError, TierTimeoutError
from kvoffload_async.facade.secondary import SecondaryTierManager, owner_name
from kvoffload_async.facade.tier_factory import SecondaryTierFactory, options_of
from kvoffload_async.facade.tier_options import TierOptions
from kvoffload_async.integrations.vllm import convert, metrics
from kvoffload_async.integrations.vllm.identity import (
    IDENTITY_OPTIONS,
    Identity,
    IdentityOptions,
    ModelContent,
    identify,
)
from kvoffload_async.integrations.vllm.process_folder import ProcessFolder
from kvoffload_async.integrations.vllm.row_layout import announced_layout, layout_of_layers
from kvoffload_async.integrations.vllm.surroundings import surroundings_of
from kvoffload_async.runtime.bridge import Bridge, RuntimeHost
from kvoffload_async.runtime.log_level import show_log
from kvoffload_async.types import JobId, JobMetadata, JobResult, OffloadKey

logger = logging.getLogger(__name__)

_DRAIN_GRACE_S = 5.0

_TIER_TYPES: WeakKeyDictionary[base.OffloadingSpec, Counter[str]] = WeakKeyDictionary()
"""Number of tiers per type in each spec."""


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """The spec's settings that a tier needs."""

    runtime: Bridge
    config: OffloadConfig


class UnusablePlaceError(ConfigError, OSError):
    """A tier's storage location is unusable; also an `OSError`, like the errors of vLLM's tiers."""


class VllmTier(tiering.SecondaryTierManager):
    """Runs a tier of this package under vLLM's `TieringOffloadingManager`.

    A subclass sets the tier's name and the options that vLLM's configuration determines.

    Thread: any, one at a time. vLLM calls under its manager's lock, from different threads.
    """

    kind: ClassVar[str]
    """Name of the tier in this package's `SecondaryTierFactory`."""
    decided: ClassVar[frozenset[str]] = frozenset()
    """Options that `layout` sets, so that users must not."""
    medium: ClassVar[base.Medium] = base.Medium.STORAGE
    fixed_locality: ClassVar[base.Locality | None] = None
    """Locality of all such tiers; None: configured by the user."""

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
        self._reject_unknown(options)
        self.identity_options = IdentityOptions.take_from(options)
        self._process_folder: ProcessFolder | None = None
        own = {"enable_kv_events": enable_kv_events, "io_timeout_s": io_timeout_s}
        TierOptions.take(own)
        self.locality = self.fixed_locality or convert.locality_of(locality)
        if self.fixed_locality is not None and locality is not None:
            raise ConfigError(
                f"locality: {locality!r} is not for {self.kind!r}, whose blocks always are "
                f"{self.fixed_locality.value}; leave it out"
            )
        if self.fixed_locality is None and self.locality is not None:
            options["locality"] = self.locality.value
        if enable_kv_events and not offloading_spec.kv_events_config.enable_kv_cache_events:
            logger.warning(
                "%s: enable_kv_events has no effect, as vLLM's kv_events_config has "
                "enable_kv_cache_events off",
                tier_type,
            )
            own["enable_kv_events"] = False
        options |= own
        self._drain_timeout_s = io_timeout_s + _DRAIN_GRACE_S
        self._overdue: dict[JobId, JobResult] = {}
        self._finished: list[tiering.JobResult] = []
        self._counted: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._rows = convert.rows_of(primary_kv_view)
        self._host = RuntimeHost()
        try:
            config = {"type": self.kind, **options, **self.layout(offloading_spec, options)}
            given = offloading_spec.config
            geometry = OffloadConfig(
                cpu_bytes_to_use=0,
                block_bytes=0,
                num_workers=1 if given.replicated_layout else given.parallel.world_size,
            )
            self._tier: SecondaryTierManager = SecondaryTierFactory.create_secondary_tier(
                config,
                self._rows,
                _Surroundings(self._host.bridge, geometry),
            )
            self._state = self._tier.tier_state
        except BaseException as error:
            self._host.close()
            self._rows.release()
            self._remove_process_folder()
            if isinstance(error, ConfigError) and isinstance(error.__cause__, OSError):
                raise UnusablePlaceError(str(error)) from error
            raise
        seen = _TIER_TYPES.setdefault(offloading_spec, Counter())
        self._tier.ownership = owner_name(tier_type, seen)

    def layout(
        self, offloading_spec: base.OffloadingSpec, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the options that vLLM's configuration determines."""
        return {}

    def identify(self, offloading_spec: base.OffloadingSpec) -> Identity:
        """Return the identity of the tier's blocks; called from `layout`."""
        config = offloading_spec.config
        surroundings = surroundings_of(config.extra_config)
        # With several ranks, the workers' tensors are in other processes.
        is_alone = config.parallel.world_size == 1
        layers = surroundings.registered_layers() if surroundings and is_alone else {}
        groups = [group.layer_names for group in config.groups]
        layout = layout_of_layers(layers, groups) if layers else announced_layout(surroundings)
        self._content = ModelContent.of(offloading_spec, surroundings)
        return identify(offloading_spec, self.identity_options, layout, self._content)

    def own_directory(self, directory: str, identity: Identity) -> str:
        """Return the directory to use: a private one if the model's content is unknown."""
        if not identity.unknown:
            return directory
        self._process_folder = ProcessFolder(directory)
        self._content.warn_of_unknown(self.tier_type, self._process_folder.path)
        return self._process_folder.path

    # -- a request's life -----------------------------------------------------------------------

    def on_new_request(self, req_context: base.ReqContext) -> base.RequestOffloadingContext:
        """Begin a request."""
        return convert.offloading_context(
            self._tier.on_new_request(convert.request_of(req_context))
        )

    def on_request_finished(self, req_context: base.ReqContext) -> None:
        """End a request; nothing more is submitted for it."""
        self._tier.on_request_finished(convert.request_of(req_context))

    def lookup(self, key: OffloadKey, req_context: base.ReqContext) -> base.LookupResult:
        """Return HIT, MISS, or RETRY while an existence probe is in flight. Does no I/O."""
        return convert.lookup_result(self._tier.lookup(key, convert.request_of(req_context)))

    def touch(self, keys: Collection[OffloadKey], req_context: base.ReqContext) -> None:
        """Record a use of blocks, first block first."""
        self._tier.touch(tuple(keys), convert.request_of(req_context))

    # -- jobs -----------------------------------------------------------------------------------

    def submit_store(self, job_metadata: tiering.TransferJob) -> None:
        """Submit a cascade; if it cannot be run, it gets a failed result."""
        self._submit(convert.job_of(job_metadata))

    def submit_load(self, job_metadata: tiering.TransferJob) -> None:
        """Submit a promotion; if it cannot be run, it gets a failed result."""
        self._submit(convert.job_of(job_metadata))

    def get_finished_jobs(self) -> Iterable[tiering.JobResult]:
        """Return jobs whose copies have ended since the last call, once each. Non-blocking."""
        self._collect()
        finished, self._finished = self._finished, []
        return finished

    def on_schedule_end(self, context: base.ScheduleEndContext) -> None:
        """End a step: start the step's existence probes and submitted jobs."""
        self._tier.on_schedule_end()

    def has_pending_work(self) -> bool:
        """Return whether a job is unreported or a probe unanswered."""
        return bool(self._overdue or self._finished) or self._tier.has_pending_work()

    def take_events(self) -> Iterable[base.OffloadingEvent]:
        """Remove and return the events of blocks added to and removed from the tier."""
        return [convert.event(event, self.locality) for event in self._tier.take_events()]

    # -- blocking calls --------------------------------------------------------------------

    def drain_jobs(self) -> None:
        """Wait until no job's copy is running; results stay for `get_finished_jobs`.

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
            self._host.bridge.wait_for_progress(left_s)
            self._collect()
        self._tier.announce_anew()

    def shutdown(self) -> None:
        """Stop accepting jobs, let running ones end, fail the rest, close the tier; idempotent.

        Raises:
            TierTimeoutError: Copies still run after `close_timeout_s`, so the primary's memory must
                stay mapped.
        """
        report = self._tier.shutdown()
        self._host.close()
        if report.unfinished_jobs:
            jobs = ", ".join(map(str, report.unfinished_jobs))
            raise TierTimeoutError(
                f"{self.tier_type}: the copies of jobs {jobs} still run; "
                "the primary's memory must stay mapped"
            )
        self._rows.release()
        self._primary_kv_view = memoryview(b"")
        self._remove_process_folder()
        if report.error is not None:
            logger.warning("%s: closing failed: %s", self.tier_type, report.error)

    # -- monitoring ------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, base.OffloadingMetricMetadata]:
        """Return the counters that `get_stats` adds to vLLM's own per-tier metrics."""
        return metrics.definitions()

    def get_stats(self) -> metrics.Stats | None:
        """Return the increments since the last call, or None."""
        counted, self._counted = self._counted, Counter()
        return metrics.stats(counted)

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        """Return the labels of `config_info`."""
        return metrics.CONFIG_INFO_KEYS

    def config_info(self) -> Mapping[str, str]:
        """Return constant labels: the tier's kind and location."""
        return metrics.config_info(self.kind, self._tier.tier.describe())

    # -- inside ---------------------------------------------------------------------------------

    def _reject_unknown(self, options: Mapping[str, Any]) -> None:
        own = options_of(SecondaryTierFactory.get_tier_class(self.kind)).keys()
        known = (own | IDENTITY_OPTIONS) - self.decided
        reject_unknown(options, known, f"secondary tier {self.tier_type!r}")

    def _remove_process_folder(self) -> None:
        folder, self._process_folder = self._process_folder, None
        if folder is not None:
            folder.close()

    def _submit(self, job: JobMetadata) -> None:
        try:
            (self._tier.submit_load if job.is_promotion else self._tier.submit_store)(job)
        except StateError as error:
            logger.error("Job %s was refused: %s", job.job_id, error)  # noqa: TRY400 - expected
            self._report(job.keys, refused(job, error))

    def _collect(self) -> None:
        """Collect ended jobs; hold back an overdue job until its copy has ended."""
        self._tier.poll_tier()
        for job, result in self._state.jobs.take_ended():
            if result.orphaned:
                self._overdue[result.job_id] = result
                self._counted[metrics.OVERDUE_JOBS, (self.tier_type,)] += 1
            else:
                self._report(job.keys, result)
        for record in self._state.jobs.take_released():
            self._report(record.job.keys, self._overdue.pop(record.job.job_id))

    def _report(self, keys: tuple[OffloadKey, ...], result: JobResult) -> None:
        self._finished.append(convert.job_result(result, keys))
        if result.error is not None:
            cause = type(result.error).__name__
            self._counted[metrics.FAILED_JOBS, (self.tier_type, cause)] += 1
