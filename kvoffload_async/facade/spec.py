"""Offloading specs: create and shut down a manager from a configuration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kvoffload_async.abc.transport import Transport
from kvoffload_async.config import OffloadConfig
from kvoffload_async.core.health import BreakerSettings
from kvoffload_async.core.primary import Tenancy
from kvoffload_async.errors import ClosedError, ConfigError, naming_shortage
from kvoffload_async.facade.connector.worker import OffloadingConnectorWorker
from kvoffload_async.facade.driver import PlannerDriver
from kvoffload_async.facade.primary import CPUPrimaryTierOffloadingManager
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.tenant_keys import with_tenant_keys
from kvoffload_async.facade.tenants import Tenants
from kvoffload_async.facade.tier_factory import (
    check_tiers,
    naming_tier,
    reuse_capacity,
    with_quotas,
)
from kvoffload_async.facade.tier_group import UnopenedTier, close_unused, create_tier, tiers_text
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.registry import check_policy
from kvoffload_async.runtime.bridge import Bridge
from kvoffload_async.runtime.buffer import PrimaryBuffer, rows_within
from kvoffload_async.runtime.lifetime import guard_forks, warn_unclosed
from kvoffload_async.runtime.loop import LoopThread
from kvoffload_async.runtime.machine import Limit, memory_limit
from kvoffload_async.runtime.trace_recorder import TraceRecorder, check_trace_files
from kvoffload_async.status.server import EngineStatus, ReadStatistics
from kvoffload_async.waiting import seconds

if TYPE_CHECKING:  # do not import torch before a caller passes tensors
    import torch

    from kvoffload_async.transport.streams import DeviceRuntime


D = TypeVar("D", bound=PlannerDriver)


class _Spec(ABC):
    """A validated configuration and the derived geometry.

    Attributes:
        config: The configuration.
        stride_bytes: Bytes per slot: one cell per worker, padded to whole pages.
        num_blocks: Slots of the primary.
        tenants: The tenants; None: the option `tenants` is not given.
        accepts_prefixes: Whether a store that does not fit is granted in part, since the scheduler
            offers the rest again.
    """

    accepts_prefixes = True

    def __init__(self, config: Mapping[str, Any] | OffloadConfig) -> None:
        """Validate the configuration; starts nothing.

        Raises:
            ConfigError: A key or value is invalid; the message names it and the fix.
            TierUnavailableError: The storage of a tier does not respond.
        """
        self.config = config if isinstance(config, OffloadConfig) else OffloadConfig.parse(config)
        self.num_blocks, self.stride_bytes = rows_within(
            self.config.cpu_bytes_to_use, self.config.block_bytes, self.config.num_workers
        )
        check_policy(self.config.eviction_policy)
        memory_bytes = self.num_blocks * self.stride_bytes
        for limit in self._memory_limits():
            if memory_bytes > limit.size_bytes:
                raise ConfigError(
                    f"cpu_bytes_to_use: {self.config.cpu_bytes_to_use} bytes are more than "
                    f"{limit.name}, which is {limit.size_bytes} bytes; use less"
                )
        self.tenants: Tenants | None = None
        self._tenancy: Tenancy | None = None
        if self.config.tenants is not None:
            self.tenants = tenants = Tenants(self.config.tenants, self.config.unknown_tenant)
            slots = tenants.quotas.blocks(self.num_blocks, self.stride_bytes, "cpu_bytes_to_use")
            self._tenancy = Tenancy(slots, tenants.tenant_of, tenants.names)
        tiers = self._with_tenants(self.config.secondary_tiers)
        check_tiers(tiers, self.config, memory_bytes=memory_bytes)

    def __repr__(self) -> str:
        tiers = tiers_text([str(tier["type"]) for tier in self.config.secondary_tiers])
        size = f"{self.num_blocks:,} blocks of {self.config.block_bytes:,} bytes"
        return f"<{type(self).__name__}: {size}, {tiers}>"

    @abstractmethod
    def get_manager(self) -> CPUPrimaryTierOffloadingManager | TieringOffloadingManager:
        """Return the manager; the first call creates it."""

    def transport_maker(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        groups: Sequence[Sequence[str]] | None = None,
        *,
        block_dim: int | None = None,
        worker_index: int = 0,
        runtime: DeviceRuntime | None = None,
    ) -> Callable[[memoryview], Transport]:
        """Return a function that creates the tensors' transport, given the primary's buffer.

        Args:
            kv_caches: One worker's tensors: layer name -> tensor, of any dtype, on one device.
            groups: Layer names of each KV-cache group; default: all layers in one group.
            block_dim: Index of the device block dimension; None: the first, unless that looks
                like key and value.
            worker_index: Index of the worker's cell among the `num_workers` cells of a slot.
            runtime: Runtime of the tensors' device; see `create_transport`.

        Raises:
            ConfigError: The tensors cannot be addressed by block, one chunk of them is larger than
                `block_bytes`, or `worker_index` is out of range.
        """
        if not 0 <= worker_index < self.config.num_workers:
            raise ConfigError(
                f"worker_index: {worker_index} is not valid; num_workers is "
                f"{self.config.num_workers}"
            )
        from kvoffload_async.transport.choice import create_transport  # noqa: PLC0415 - torch
        from kvoffload_async.transport.layout import register_kv_caches  # noqa: PLC0415 - torch

        layout = register_kv_caches(kv_caches, groups, self.config.blocks_per_chunk, block_dim)
        if layout.chunk_bytes > self.config.block_bytes:
            raise ConfigError(
                f"block_bytes: {self.config.block_bytes} bytes do not hold a chunk of the KV "
                f"caches, which takes {layout.chunk_bytes}"
            )
        offset = worker_index * self.config.block_bytes
        return partial(create_transport, layout, cell_offset_bytes=offset, runtime=runtime)

    def create_handlers(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        groups: Sequence[Sequence[str]] | None = None,
        *,
        block_dim: int | None = None,
        worker_index: int = 0,
        flush_timeout_s: float = 30.0,
        runtime: DeviceRuntime | None = None,
    ) -> OffloadingConnectorWorker:
        """Return a new worker on the manager's buffer; shut it down before the manager.

        Args:
            kv_caches: The worker's tensors; see `transport_maker`.
            groups: See `transport_maker`.
            block_dim: See `transport_maker`.
            worker_index: See `transport_maker`.
            flush_timeout_s: Timeout of the worker's `handle_preemptions` in seconds.
            runtime: See `transport_maker`.

        Raises:
            ConfigError: As `transport_maker`, or the device is unusable.
            TierUnavailableError: Threads cannot be started.
        """
        create_transport = self.transport_maker(
            kv_caches, groups, block_dim=block_dim, worker_index=worker_index, runtime=runtime
        )
        transport = create_transport(self.get_manager().get_primary_kv_view())
        try:
            with naming_shortage("the event loop of the worker cannot be started"):
                return OffloadingConnectorWorker(transport, flush_timeout_s=flush_timeout_s)
        except BaseException:
            transport.close(_STOP_THREADS_S)
            raise

    def _with_tenants(self, tiers: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return configurations of tiers that know the tenants, if there are any."""
        if self.tenants is None:
            return tiers
        return with_quotas(with_tenant_keys(tiers, self.tenants), self.tenants.quotas)

    def _memory_limits(self) -> Sequence[Limit]:
        """Return the limits on the primary's memory."""
        limit = memory_limit()
        return () if limit is None else (limit,)

    def _create_buffer(self) -> PrimaryBuffer:
        """Allocate the primary's memory; a subclass may map shared memory instead."""
        return PrimaryBuffer(self.num_blocks, self.stride_bytes, prefault=self.config.prefault)

    def _create_primary(self) -> CPUPrimaryTierOffloadingManager:
        config, buffer = self.config, self._create_buffer()
        primary = CPUPrimaryTierOffloadingManager(
            self.num_blocks,
            cache_policy=config.eviction_policy,
            buffer=buffer,
            accept_prefix=self.accepts_prefixes,
            store_threshold=config.store_threshold,
            enable_events=config.enable_kv_cache_events,
            tenancy=self._tenancy,
        )
        primary.tenants = self.tenants
        return primary


class CPUOffloadingSpec(_Spec):
    """Offloading to host memory without secondary tiers."""

    def __init__(self, config: Mapping[str, Any] | OffloadConfig) -> None:
        super().__init__(config)
        for key in ("secondary_tiers", "record_trace", "status_socket"):
            if getattr(self.config, key):
                raise ConfigError(
                    f"{key}: CPUOffloadingSpec has none; use TieringOffloadingSpec, also without "
                    "tiers"
                )
        self._manager: CPUPrimaryTierOffloadingManager | None = None

    def get_manager(self) -> CPUPrimaryTierOffloadingManager:
        """Return the manager, which owns its memory; the caller shuts it down."""
        if self._manager is None:
            self._manager = self._create_primary()
        return self._manager


class TieringOffloadingSpec(_Spec):
    """Offloading to host memory and secondary tiers; a context manager.

    Owns the threads that run the tiers.
    """

    _path_suffix = ""
    """Suffix of the status socket's and trace's paths if several specs share a configuration."""

    def __init__(
        self,
        config: Mapping[str, Any] | OffloadConfig,
        runtime: Bridge | None = None,
        read_stats: ReadStatistics | None = None,
    ) -> None:
        """Validate the configuration; starts nothing.

        Args:
            config: See `OffloadConfig`.
            runtime: Threads to run the tiers on; default: threads owned by this spec.
            read_stats: Method that returns the statistics for the status socket; default: the
                manager's `stats`.

        Raises:
            ConfigError: A key or value is invalid; the message names it and the fix.
            TierUnavailableError: The storage of a tier does not respond.
        """
        super().__init__(config)
        if (path := self._trace_path()) is not None:
            check_trace_files(path)
        self._runtime = runtime
        self._own_runtime: Bridge | None = None
        self._status = EngineStatus(self.config.model, read_stats)
        self._recorder: TraceRecorder | None = None
        self._is_shut_down = False
        self._driver: PlannerDriver | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.shutdown()

    @property
    def runtime(self) -> Bridge:
        """The threads that run the tiers; started on first use.

        Raises:
            ClosedError: The spec was shut down, for instance while a tier was being opened.
            TierUnavailableError: Threads, descriptors or memory are exhausted.
        """
        if self._runtime is not None:
            return self._runtime
        if self._is_shut_down:
            raise ClosedError("the spec was shut down")
        if self._own_runtime is None:
            with naming_shortage("the event loop of the tiers cannot be started"):
                self._own_runtime = Bridge(LoopThread())
        return self._own_runtime

    def get_manager(self) -> TieringOffloadingManager:
        """Return the manager; the first call maps the memory and opens the tiers, and blocks.

        After an error, everything already started is closed again.

        Raises:
            ConfigError: A tier is unusable, or another engine uses the status socket.
            TierUnavailableError: The storage of a tier cannot be reached.
            TierTimeoutError: A tier did not open in time.
        """
        return self.get_driver(TieringOffloadingManager)

    def get_driver(self, kind: type[D]) -> D:
        """Return a driver of class `kind`; otherwise like `get_manager`.

        Args:
            kind: The class to return an object of: `PlannerDriver` or a subclass; the same in each
                call.
        """
        driver = self._driver
        if driver is None:
            try:
                with naming_shortage("the threads of the engine cannot be started"):
                    self._status.listen(
                        self.config.status_socket,
                        self._path_suffix,
                        needs_socket=self.config.status_socket_commands,
                    )
                    driver = self._driver = self._create_driver(kind)
                    commands = None
                    if self.config.status_socket_commands:
                        commands = driver.accept_commands().answer
                    self._status.serve(driver.stats, driver.slowest_requests, commands)
            except BaseException:
                try:
                    self._close(self.config.shutdown_timeout_s)
                finally:
                    self._driver = None
                raise
            guard_forks(self, _driver=None, _own_runtime=None)
        assert isinstance(driver, kind)  # noqa: S101 - for the type checker
        return driver

    def _trace_path(self) -> str | None:
        """Return the path of the trace of requests, or None."""
        path = self.config.record_trace
        return None if path is None else path + self._path_suffix

    def __del__(self) -> None:
        if getattr(self, "_own_runtime", None) is not None:
            warn_unclosed(self, "shutdown()")

    def shutdown(self, timeout: float | None = None) -> None:
        """Shut the manager down, then stop the threads; idempotent.

        Raises:
            OffloadError: A tier failed to close; everything else was closed.
        """
        limit_s = self.config.shutdown_timeout_s
        timeout_s = limit_s if timeout is None else seconds(timeout, "timeout")
        self._is_shut_down = True
        self._close(timeout_s)

    def _close(self, timeout_s: float) -> None:
        self._status.close()
        try:
            if self._driver is not None:
                self._driver.shutdown(timeout_s)
        finally:
            recorder, self._recorder = self._recorder, None
            if recorder is not None:
                recorder.close(min(timeout_s, _STOP_THREADS_S))
            runtime, self._own_runtime = self._own_runtime, None
            if runtime is not None:
                runtime.close(min(timeout_s, _STOP_THREADS_S))

    def _tier_configs(self) -> Sequence[Mapping[str, Any]]:
        """Return the tiers' configurations; called after the primary was mapped."""
        return self.config.secondary_tiers

    def _create_driver(self, kind: type[D]) -> D:
        config = self.config
        primary = self._create_primary()
        tiers: list[SecondaryTierManager | UnopenedTier] = []
        try:
            tier_configs = self._with_tenants(self._tier_configs())
            for index, tier_config in enumerate(tier_configs):
                with naming_tier(index, tier_config):
                    tiers.append(create_tier(tier_config, primary.get_primary_kv_view(), self))
            if (path := self._trace_path()) is not None:
                self._recorder = TraceRecorder(path)
                primary.core.on_request_ended = self._recorder.note
        except BaseException:
            for tier in reversed(tiers):
                close_unused(tier, config.shutdown_timeout_s)
            primary.shutdown()
            raise
        return kind(
            primary,
            tiers,
            bridge=self.runtime,
            write_back=config.write_back,
            deferral_timeout_s=config.deferral_timeout_s,
            breaker=BreakerSettings(config.breaker_fault_threshold, config.breaker_retry_s),
            drain_timeout_s=config.drain_timeout_s,
            shutdown_timeout_s=config.shutdown_timeout_s,
            check_invariants=config.check_invariants,
            clock=self.runtime.runner.now_s,
            generation=config.generation,
            explain_requests=config.explain_requests,
            reuse_capacities=[
                reuse_capacity(tier_config, self.stride_bytes) for tier_config in tier_configs
            ],
        )


_STOP_THREADS_S = 0.5
