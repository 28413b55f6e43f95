"""From a configuration to a running manager, and back to nothing."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from kvoffload_async.config import OffloadConfig
from kvoffload_async.core.breaker import BreakerSettings
from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.factory import SecondaryTierFactory
from kvoffload_async.facade.manager import OffloadingManager
from kvoffload_async.facade.primary import CPUPrimaryTierOffloadingManager
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.factory import check_policy
from kvoffload_async.runtime.bridge import Bridge
from kvoffload_async.runtime.buffer import PrimaryBuffer, row_stride_bytes
from kvoffload_async.runtime.host import RuntimeHost


class _Spec:
    """A checked configuration and the geometry that follows from it.

    Attributes:
        config: The configuration.
        stride_bytes: Bytes of one slot: a cell a worker, padded to whole pages.
        num_blocks: Slots of the primary.
    """

    def __init__(self, config: Mapping[str, Any] | OffloadConfig) -> None:
        """Check everything that can be checked; nothing is started.

        Raises:
            ConfigError: A key or a value is unusable; the message names it and the remedy.
        """
        self.config = config if isinstance(config, OffloadConfig) else OffloadConfig.parse(config)
        self.stride_bytes = row_stride_bytes(self.config.block_bytes, self.config.num_workers)
        self.num_blocks = self.config.cpu_bytes_to_use // self.stride_bytes
        if not self.num_blocks:
            raise ConfigError(
                f"cpu_bytes_to_use: {self.config.cpu_bytes_to_use} bytes hold no block; one takes "
                f"{self.stride_bytes} bytes (block_bytes * num_workers, in whole pages)"
            )
        check_policy(self.config.eviction_policy)
        for index, tier in enumerate(self.config.secondary_tiers):
            try:
                SecondaryTierFactory.check_config(tier)
            except ConfigError as error:
                raise type(error)(f"secondary_tiers[{index}]: {error}") from error
            except (ImportError, AttributeError) as error:
                key = "module_path" if "module_path" in tier else "type"
                raise ConfigError(
                    f"secondary_tiers[{index}]: {key}: {tier[key]!r} cannot be used ({error}); "
                    "module_path must name a module that can be imported, and type a class in it"
                ) from error

    def _create_primary(self) -> CPUPrimaryTierOffloadingManager:
        config = self.config
        return CPUPrimaryTierOffloadingManager(
            self.num_blocks,
            cache_policy=config.eviction_policy,
            buffer=PrimaryBuffer(self.num_blocks, self.stride_bytes, prefault=config.prefault),
            accept_prefix=config.accept_prefix,
            store_threshold=config.store_threshold,
            max_tracker_size=config.max_tracker_size,
            enable_events=config.enable_kv_cache_events,
        )


class CPUOffloadingSpec(_Spec):
    """Offloading to host memory alone."""

    def __init__(self, config: Mapping[str, Any] | OffloadConfig) -> None:
        super().__init__(config)
        if self.config.secondary_tiers:
            raise ConfigError(
                "secondary_tiers: CPUOffloadingSpec has none; use TieringOffloadingSpec"
            )

    def get_manager(self) -> OffloadingManager:
        """Return a new manager, which owns its memory; the caller shuts it down."""
        return self._create_primary()


class TieringOffloadingSpec(_Spec):
    """Offloading to host memory and the secondary tiers behind it; a context manager.

    Owns the threads that the tiers run on.
    """

    def __init__(
        self, config: Mapping[str, Any] | OffloadConfig, runtime: Bridge | None = None
    ) -> None:
        """Check everything that can be checked; nothing is started.

        Args:
            config: See `OffloadConfig`.
            runtime: Where the tiers run; by default on threads of this spec's own.

        Raises:
            ConfigError: A key or a value is unusable; the message names it and the remedy.
        """
        super().__init__(config)
        self._runtime = runtime
        self._host: RuntimeHost | None = None
        self._manager: TieringOffloadingManager | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    @property
    def runtime(self) -> Bridge:
        """Where this spec's tiers run; its threads start with the first use."""
        if self._runtime is not None:
            return self._runtime
        if self._host is None:
            self._host = RuntimeHost()
        return self._host.bridge

    def get_manager(self) -> TieringOffloadingManager:
        """Return the manager; the first call maps the memory and opens the tiers, and waits.

        Raises:
            ConfigError: A tier cannot work here. What had been started is closed again.
        """
        if self._manager is None:
            self._manager = self._create_manager()
        return self._manager

    def shutdown(self, timeout: float | None = None) -> None:
        """Shut the manager down, then stop the threads; idempotent.

        Raises:
            OffloadError: A tier failed to close; everything else is closed all the same.
        """
        timeout_s = self.config.shutdown_timeout_s if timeout is None else timeout
        try:
            if self._manager is not None:
                self._manager.shutdown(timeout_s)
        finally:
            host, self._host = self._host, None
            if host is not None:
                host.close(min(timeout_s, _STOP_THREADS_S))

    def _create_manager(self) -> TieringOffloadingManager:
        config = self.config
        primary = self._create_primary()
        tiers: list[SecondaryTierManager] = []
        try:
            for tier_config in config.secondary_tiers:
                tiers.append(  # noqa: PERF401 - each is closed again if a later one fails
                    SecondaryTierFactory.create_secondary_tier(
                        tier_config, primary.get_primary_kv_view(), self
                    )
                )
        except BaseException:
            for tier in reversed(tiers):
                tier.shutdown(config.shutdown_timeout_s)
            primary.shutdown()
            host, self._host = self._host, None
            if host is not None:
                host.close(_STOP_THREADS_S)
            raise
        return TieringOffloadingManager(
            primary,
            tiers,
            bridge=self.runtime,
            promotion_fraction=config.promotion_fraction,
            cascade_fraction=config.cascade_fraction,
            deferral_timeout_s=config.deferral_timeout_s,
            breaker=BreakerSettings(config.breaker_fault_threshold, config.breaker_retry_s),
            drain_timeout_s=config.drain_timeout_s,
            shutdown_timeout_s=config.shutdown_timeout_s,
            check_laws=config.check_laws,
        )


_STOP_THREADS_S = 0.5
