"""This package's whole engine as an offloading spec of vLLM's.

    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {
        "spec_name": "KVOffloadSpec", "spec_module_path": "kvoffload_async.integrations.vllm",
        "cpu_bytes_to_use": "4GiB", "secondary_tiers": [{"type": "fs", "root_dir": "/kv"}]
    }

vLLM makes one instance in the process of its scheduler and one in the process of every worker. The
first is asked for a manager and the others for a worker each; what they have in common is the
primary's memory, which lies in a mapping that all of them share, on one host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.config import OffloadingConfig

from kvoffload_async.config import OffloadConfig, accepted_keys, reject_unknown
from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.facade.tier_factory import SecondaryTierFactory, accepted_options
from kvoffload_async.integrations.vllm import convert, engine_metrics
from kvoffload_async.integrations.vllm.manager import KVOffloadManager
from kvoffload_async.integrations.vllm.worker import KVOffloadWorker
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.runtime.shared_region import SharedBuffer

_DECIDED: Final = {
    "block_bytes",
    "block_size",
    "enable_kv_cache_events",
    "num_workers",
    "prefault",
}
"""Keys of `OffloadConfig` that follow from vLLM's own configuration, or are always so here."""

_DECIDED_OF_TIERS: Final = ("model", "rank", "run_config")
"""Keys of a tier's configuration that follow from vLLM's own."""

_VLLMS_OWN: Final = {
    "block_size",
    "blocks_per_chunk",
    "offload_prompt_only",
    "self_describing_kv_events",
    "spec_module_path",
    "spec_name",
    "sync_load_budget_bytes",
}
"""Keys that vLLM reads beside the spec."""

_SCHEDULER: Final = 0
"""The scheduler's number among the participants; worker `rank` has number `rank + 1`."""


class KVOffloadSpec(base.OffloadingSpec):
    """Offloads to a primary in shared memory and to this package's tiers behind it.

    Runs on CUDA devices and on vLLM's CPU platform. All workers must be on one host.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        """Check everything that can be checked; nothing is mapped or started.

        Raises:
            ConfigError: A key or a value is unusable; the message names it and the remedy.
        """
        super().__init__(config)
        if config.canonical_layout:
            raise ConfigError("canonical_layout: true is not supported here; leave it out")
        self.replicated_layout = config.replicated_layout
        self._num_participants = config.parallel.world_size + 1
        self._engine = _SharedSpec(self._options(), self)
        self._manager: KVOffloadManager | None = None
        self._worker: KVOffloadWorker | None = None

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, base.OffloadingMetricMetadata]:
        """Return what `get_stats` of the manager tells."""
        return engine_metrics.definitions()

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """Return the labels of the manager's `config_info`."""
        return engine_metrics.CONFIG_INFO_KEYS

    def get_manager(self) -> KVOffloadManager:
        """Return the manager; the first call maps the memory and opens the tiers, and waits.

        Raises:
            ConfigError: There is no room for the primary, or a tier cannot work here.
            TimeoutError: The worker that makes the mapping did not do so in time.
        """
        if self._manager is None:
            manager = self._engine.get_manager()
            self._manager = KVOffloadManager(
                manager, self._engine.slot_flags, self._engine.shutdown
            )
        return self._manager

    def get_worker(self, kv_caches: base.CanonicalKVCaches) -> KVOffloadWorker:
        """Return this rank's worker; the first call maps the memory, and pins it for a device.

        Raises:
            ConfigError: There is no room for the primary, the tensors cannot be addressed by
                block or do not fit, or the device cannot be used.
            TimeoutError: Whoever makes the mapping did not do so in time.
        """
        if self._worker is None:
            self._worker = self._create_worker(kv_caches)
        return self._worker

    def map_primary(self, participant: int) -> SharedBuffer:
        """Make or join the mapping; see `SharedBuffer` for what it raises."""
        return SharedBuffer(
            self.config.engine_id,
            self._engine.num_blocks,
            self._engine.stride_bytes,
            participant=participant,
            num_participants=self._num_participants,
        )

    # -- inside ---------------------------------------------------------------------------------

    def _create_worker(self, kv_caches: base.CanonicalKVCaches) -> KVOffloadWorker:
        options = self._engine.config
        layout = convert.kv_layout(kv_caches, self.blocks_per_chunk)
        if layout.chunk_bytes > options.block_bytes:
            raise ConfigError(
                f"a chunk of the KV caches takes {layout.chunk_bytes} bytes, and vLLM announced "
                f"{options.block_bytes}: this model's caches are not supported"
            )
        rank = self.config.parallel.rank
        return KVOffloadWorker(
            layout,
            self.map_primary(1 + rank),
            cell_offset_bytes=0 if self.replicated_layout else rank * options.block_bytes,
            timeout_s=options.drain_timeout_s,
        )

    def _options(self) -> OffloadConfig:
        given = dict(self.extra_config)
        own = accepted_keys() - _DECIDED
        reject_unknown(given, own | _VLLMS_OWN, "kv_connector_extra_config")
        options = {key: given[key] for key in given if key in own}
        options["blocks_per_chunk"] = self.blocks_per_chunk
        options["block_bytes"] = self.config.worker_kv_bytes_per_block * self.blocks_per_chunk
        options["block_size"] = min(self.tokens_per_block)
        options["num_workers"] = 1 if self.replicated_layout else self.config.parallel.world_size
        options["enable_kv_cache_events"] = self.config.enable_kv_cache_events
        tiers = options.get("secondary_tiers")
        if isinstance(tiers, list | tuple):
            options["secondary_tiers"] = [self._tier_options(tier) for tier in tiers]
        return OffloadConfig.parse(options)

    def _tier_options(self, tier: Any) -> Any:  # noqa: ANN401 - a user's JSON, checked later
        """Add what vLLM knows: a tier that outlives the process keeps each layout apart.

        The namespace is that of vLLM's own fs tier, and a row is vLLM's row: a directory that
        vLLM's `TieringOffloadingSpec` has filled serves hits here, and the other way round.
        """
        if not isinstance(tier, Mapping) or tier.get("type") not in SecondaryTierFactory.names():
            return tier  # somebody else's tier, or a mistake: the factory tells
        for key in _DECIDED_OF_TIERS:
            if key in tier:
                raise ConfigError(
                    f"{key}: {tier[key]!r} is not for vLLM, which knows it itself; leave it out"
                )
        known = accepted_options(SecondaryTierFactory.get_tier_class(str(tier["type"])))
        mapper = convert.file_mapper_of(self, str(tier.get("root_dir", "")))
        decided = {"run_config": mapper.get_run_config(), "rank": mapper.rank}
        return {**tier, **{key: decided[key] for key in decided if key in known}}


class _SharedSpec(TieringOffloadingSpec):
    """The engine's own spec, its primary in the mapping."""

    def __init__(self, config: OffloadConfig, outer: KVOffloadSpec) -> None:
        super().__init__(config)
        self._outer = outer
        self._buffer: SharedBuffer | None = None

    @property
    def slot_flags(self) -> memoryview:
        """See `SharedBuffer`; there once the manager is."""
        if self._buffer is None:
            raise ConfigError("the primary is not mapped yet: call get_manager first")
        return self._buffer.slot_flags

    def shutdown(self, timeout: float | None = None) -> None:
        try:
            super().shutdown(timeout)
        finally:
            if self._buffer is not None:
                self._buffer.leave(remove=True)

    def _create_buffer(self) -> PrimaryBuffer:
        self._buffer = self._outer.map_primary(_SCHEDULER)
        return self._buffer
