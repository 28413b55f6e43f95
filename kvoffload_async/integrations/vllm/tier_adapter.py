"""Tiers written for vLLM's own tiering, as secondary tiers of the engine under `KVOffloadSpec`.

`facade.external` drives them like any external manager and catches their errors. This module maps
the contract, and adds deadlines to vLLM's two calls that wait without one.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, ClassVar

from vllm.v1.kv_offload.tiering import base as tiering

from kvoffload_async.abc.tier import CloseReport
from kvoffload_async.config import TierOptions
from kvoffload_async.errors import ClosedError, ConfigError, TierTimeoutError, naming_shortage
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.tier_options import ManagerOptions, options_of
from kvoffload_async.integrations.vllm import convert
from kvoffload_async.runtime.helper_thread import HelperThread, result_of
from kvoffload_async.types import (
    JobId,
    JobMetadata,
    JobResult,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)

_OWN: dict[str, Any] = {"io_timeout_s": TierOptions.io_timeout_s, "backpressure_detector": None}
"""Options of a tier that only the engine reads, with their defaults."""


class AdaptedTierManager(SecondaryTierManager):
    """Adapts a tier manager written for vLLM; `adapted` creates a subclass for each such class.

    vLLM's `drain_jobs` and `shutdown` take no timeout. They run on a thread of their own, which
    exists from the start; while one of them has not returned, every other call raises
    TierTimeoutError.

    Not thread-safe; call from one thread at a time.
    """

    manager_class: ClassVar[type[tiering.SecondaryTierManager]]

    def __init__(
        self,
        offloading_spec: object,
        primary_kv_view: memoryview,
        tier_type: str,
        **options: Any,  # noqa: ANN401 - a user's JSON; vLLM's class has their types
    ) -> None:
        """Create vLLM's manager; blocks as long as its constructor does.

        Args:
            offloading_spec: The engine's own spec under `KVOffloadSpec`.
            primary_kv_view: See `SecondaryTierManager`.
            tier_type: See `SecondaryTierManager`.
            **options: `io_timeout_s`, and the options of vLLM's class.

        Raises:
            ConfigError: `io_timeout_s` is invalid, or the engine does not run under vLLM.
        """
        common = ManagerOptions.take({key: options.pop(key) for key in _OWN if key in options})
        outer = getattr(offloading_spec, "outer", None)
        if outer is None:
            raise ConfigError(
                f"type: {tier_type!r} is written for vLLM's tiering; use it under KVOffloadSpec"
            )
        self.tier_type = tier_type
        self.io_timeout_s = common.io_timeout_s
        self.backpressure_detector = common.backpressure_detector
        self._waits_for = ""
        self._last_results: list[JobResult] = []
        with naming_shortage(f"the thread of tier {tier_type} cannot be started"):
            self._helper = HelperThread("kvoffload-vllm-tier")
        self._view = memoryview(primary_kv_view)
        self._manager: Any = None
        try:
            self._manager = self.manager_class(
                offloading_spec=outer, primary_kv_view=self._view, tier_type=tier_type, **options
            )
        except BaseException:
            self._release()
            raise
        self.medium, self.locality = convert.own_location(self._manager)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.tier_type}, written for vLLM>"

    # -- a request's life -----------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return convert.own_offloading_context(
            self._idle.on_new_request(convert.context_of(req_context))
        )

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._idle.on_request_finished(convert.context_of(req_context))

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        answer: LookupResult = convert.own_lookup(
            self._idle.lookup(key, convert.context_of(req_context))
        )
        return answer

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._idle.touch(keys, convert.context_of(req_context))

    # -- jobs -----------------------------------------------------------------------------------

    def submit_store(self, job_metadata: JobMetadata) -> None:
        self._idle.submit_store(convert.transfer_job(job_metadata))

    def submit_load(self, job_metadata: JobMetadata) -> None:
        self._idle.submit_load(convert.transfer_job(job_metadata))

    def get_finished_jobs(self) -> Iterator[JobResult]:
        if self._manager is None:
            results, self._last_results = self._last_results, []
            yield from results
        else:
            yield from map(convert.own_result, self._idle.get_finished_jobs())

    def get_released_jobs(self) -> Sequence[JobId]:
        """Return nothing: in vLLM's contract a result also means that the copy has ended."""
        return ()

    def on_schedule_end(self, context: ScheduleEndContext | None = None) -> None:
        self._idle.on_schedule_end(convert.step_end(context))

    def has_pending_work(self) -> bool:
        return bool(self._idle.has_pending_work())

    def take_events(self) -> Iterator[OffloadingEvent]:
        yield from map(convert.own_event, self._idle.take_events())

    def announce_anew(self) -> None:
        """Do nothing: vLLM's tiers announce every store."""

    # -- the calls that wait --------------------------------------------------------------------

    def drain_jobs(self, timeout: float = TierOptions.close_timeout_s) -> bool:
        """Wait until every job has its result; raises TimeoutError after `timeout` seconds."""
        self._wait_for("drain_jobs", time.monotonic() + timeout)
        return True

    def abandon_jobs(self) -> Sequence[JobId]:
        """Do nothing: the engine fails these jobs, and vLLM's manager reports their copies' end."""
        return ()

    def shutdown(self, timeout: float | None = None) -> CloseReport:
        """Drain the jobs, then shut vLLM's manager down, even if draining fails; idempotent.

        Raises:
            TimeoutError: They have not returned after `timeout` seconds, and may still run.
        """
        if self._manager is None:
            return CloseReport()
        timeout_s = TierOptions.close_timeout_s if timeout is None else timeout
        deadline_s = time.monotonic() + timeout_s
        with ExitStack() as steps:
            steps.callback(self._release)
            steps.callback(self._wait_for, "shutdown", deadline_s)
            self._wait_for("drain_jobs", deadline_s)
            self._last_results = list(self.get_finished_jobs())
        return CloseReport()

    # -- inside ---------------------------------------------------------------------------------

    @property
    def _idle(self) -> Any:  # noqa: ANN401 - vLLM's class is Any where vLLM is not installed
        """The manager of vLLM's tier; raises TierTimeoutError while an earlier call still runs."""
        if self._waits_for:
            raise TierTimeoutError(f"{self.tier_type}: {self._waits_for} has not returned yet")
        if self._manager is None:
            raise ClosedError(f"{self.tier_type} was shut down")
        return self._manager

    def _wait_for(self, method: str, deadline_s: float) -> None:
        """Call a blocking method of vLLM's manager; raises TimeoutError at the deadline."""
        call = getattr(self._idle, method)
        self._waits_for = method

        def make_call() -> None:
            try:
                call()
            finally:
                self._waits_for = ""

        result_of(self._helper.call(make_call), max(0.0, deadline_s - time.monotonic()))

    def _release(self) -> None:
        """Drop vLLM's manager and its view of the primary, unless one of its calls still runs."""
        self._helper.end()
        if not self._waits_for:
            self._manager = None
            with suppress(BufferError):  # the primary warns of a view that is left
                self._view.release()


def adapted(manager_class: type[tiering.SecondaryTierManager]) -> type[AdaptedTierManager]:
    """Return the manager class that drives a tier class of vLLM's contract.

    Raises:
        ConfigError: The class serves blocks to other engines, for which it needs vLLM's manager.
    """
    contract = tiering.SecondaryTierManager
    if manager_class.serve_external_requests is not contract.serve_external_requests:
        raise ConfigError(
            f"type: {manager_class.__qualname__} serves blocks to other engines, which only vLLM's "
            "own TieringOffloadingSpec supports; use it there"
        )
    options = {**options_of(manager_class), **_OWN}
    parameters = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default)
        for key, default in options.items()
    ]
    members = {
        "manager_class": manager_class,
        "__module__": manager_class.__module__,
        "__signature__": inspect.Signature(parameters),
    }
    return type(manager_class.__name__, (AdaptedTierManager,), members)
