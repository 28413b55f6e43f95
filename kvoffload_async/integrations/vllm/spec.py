"""The whole engine as an offloading spec for vLLM.

    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {
        "spec_name": "KVOffloadSpec", "spec_module_path": "kvoffload_async.integrations.vllm",
        "cpu_bytes_to_use": "4GiB", "secondary_tiers": [{"type": "fs", "root_dir": "/kv"}]
    }

vLLM creates one instance in the scheduler's process and one in each worker's process. It asks the
first for a manager and the others for a worker. They share the primary's memory, a mapping on one
host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering import base as tiering

from kvoffload_async.config import OffloadConfig
from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.commands import HashTokens
from kvoffload_async.facade.spec import D, TieringOffloadingSpec
from kvoffload_async.facade.tier_factory import SecondaryTierFactory
from kvoffload_async.integrations.vllm import convert, engine_metrics
from kvoffload_async.integrations.vllm.identity import (
    ModelContent,
    canonical_format,
    completed,
    identified,
    takes_identity,
)
from kvoffload_async.integrations.vllm.manager import KVOffloadManager
from kvoffload_async.integrations.vllm.options import (
    OFFLOADING_CONNECTORS,
    OWN_CONNECTOR,
    engine_options,
    parse_tenant_field,
)
from kvoffload_async.integrations.vllm.row_layout import (
    layout_of_canonical_pages,
    layout_of_layers,
    layout_of_pages,
    layout_of_ranks,
)
from kvoffload_async.integrations.vllm.tenants import TenantManager
from kvoffload_async.integrations.vllm.tier_adapter import adapted
from kvoffload_async.integrations.vllm.token_hashes import token_hasher
from kvoffload_async.integrations.vllm.version import CONTRACT
from kvoffload_async.integrations.vllm.worker import SCHEDULER, KVOffloadWorker
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.runtime.log_level import show_log
from kvoffload_async.runtime.machine import Limit, filesystem_limit
from kvoffload_async.runtime.shared_region import SHARED_MEMORY, SharedBuffer
from kvoffload_async.status.server import EngineStatus

SecondaryTierFactory.register_adapter(tiering.SecondaryTierManager, adapted)

logger = logging.getLogger(__name__)


class KVOffloadSpec(base.OffloadingSpec):
    """Offloads vLLM's KV cache to a primary in shared memory and the tiers behind it.

    Supports CUDA devices and vLLM's CPU platform. All workers must be on one host.

    Attributes:
        process_folders: Removes the folders of this process when it is closed.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        """Validate the configuration; maps no memory and starts nothing.

        Raises:
            ConfigError: A key or value is invalid; the message names it and the fix.
        """
        show_log()
        super().__init__(config)
        if config.canonical_layout:
            _require_certified(config)
        self._arguments = ModelContent.of(self).arguments
        self._require_to_be_alone()
        self.process_folders = ExitStack()
        self.replicated_layout = config.replicated_layout
        self._engine = _SharedSpec(self._options(), self)
        self._manager: KVOffloadManager | None = None
        self._worker: KVOffloadWorker | None = None

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, base.OffloadingMetricMetadata]:
        """Return the definitions of the metrics that the manager's `get_stats` returns."""
        return engine_metrics.definitions()

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the labels in the manager's `config_info`."""
        return engine_metrics.CONFIG_INFO_KEYS

    def get_manager(self) -> KVOffloadManager:
        """Return the manager; the first call maps the memory and opens the tiers, and blocks.

        Raises:
            ConfigError: There is no memory for the primary, or a tier is unusable.
            TimeoutError: The process that creates the mapping did not do so in time.
        """
        if self._manager is None:
            self._engine.accepts_prefixes = self._is_offered_again()
            self._warn_of_failed_loads()
            self._warn_of_incomplete_chunks()
            manager, buffer = self._engine.get_manager(), self._engine.buffer
            if manager.commands is not None:
                manager.commands.hash_tokens = self._token_hasher()
            assert buffer is not None  # noqa: S101 - for the type checker
            create: Callable[..., KVOffloadManager] = KVOffloadManager
            if manager.tenants is not None:
                create = partial(TenantManager, tenants=manager.tenants, parameter=self._tenant)
            self._manager = create(
                manager,
                buffer.slot_flags,
                self._engine.shutdown,
                self._groups_with_windows(),
                offers_again=self._engine.accepts_prefixes,
            )
        return self._manager

    def get_worker(self, kv_caches: base.CanonicalKVCaches) -> KVOffloadWorker:
        """Return this rank's worker; the first call maps the memory and pins it for a device.

        Raises:
            ConfigError: There is no memory for the primary, the tensors have an unsupported layout
                or do not fit, or the device is unusable.
            TimeoutError: The process that creates the mapping did not do so in time.
        """
        if self._worker is None:
            self._worker = self._create_worker(kv_caches)
        return self._worker

    def map_primary(self, participant: int, layout: str = "", cell_bytes: int = 0) -> SharedBuffer:
        """Create or join the primary's shared mapping; see `SharedBuffer` for the errors.

        Args:
            participant: The caller's number; see `SharedBuffer`.
            layout: Digest of a worker's tensors, for the scheduler; see `row_layout`.
            cell_bytes: Bytes of a cell that all workers share, which only they know.
        """
        options, count = self._engine.config, self.config.parallel.world_size + 1
        return SharedBuffer(
            self.config.engine_id,
            options.cpu_bytes_to_use,
            cell_bytes or options.block_bytes,
            num_cells=options.num_workers,
            participant=participant,
            num_participants=count,
            # vLLM may give pipeline ranks unequal numbers of layers; its scheduler only knows rank
            # 0's, or none of canonical pages, and maps the memory after all workers, which do it at
            # the same time.
            unequal=range(1, count)
            if self.config.parallel.pp_size > 1 or self.config.canonical_layout
            else (),
            note=bytes.fromhex(layout),
        )

    def identified_tiers(
        self, tiers: Sequence[Mapping[str, Any]], buffer: SharedBuffer
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the tiers' configurations, completed with the identity of their blocks.

        Rows have vLLM's layout. If one process contains scheduler and worker, this spec and vLLM's
        `TieringOffloadingSpec` with this package's tiers therefore hit each other's blocks in a
        shared directory.

        Raises:
            TimeoutError: A worker has not registered its tensors in time.
        """
        layout = ""
        for tier, options in zip(tiers, self._identity_options, strict=True):
            if options is None and not takes_identity(tier):
                yield tier
                continue
            if not layout:
                layout = layout_of_ranks(
                    self.layouts_of_ranks(buffer), is_shared=self._has_one_cell
                )
            if options is None:
                yield identified(tier, self, layout)
            else:
                folders, name = self.process_folders, tier["type"]
                yield completed(tier, self, options, layout, folders, name=name)

    def layouts_of_ranks(self, buffer: SharedBuffer) -> list[str]:
        """Return the layout digests of the workers' tensors, by rank.

        Raises:
            ConfigError: Ranks that share a cell of canonical pages would see different pages in it.
            TimeoutError: A worker has not registered its tensors in time.
        """
        layouts = [note.hex() for note in buffer.notes()[SCHEDULER + 1 :]]
        if self.config.canonical_layout and len(set(layouts)) > 1:
            raise ConfigError(
                "canonical_layout: the ranks have KV caches of different layouts; leave it out"
            )
        return layouts

    # -- inside ---------------------------------------------------------------------------------

    @property
    def _has_one_cell(self) -> bool:
        """Whether all ranks share the cell of a row."""
        return bool(self.replicated_layout or self.config.canonical_layout)

    @property
    def _has_own_connector(self) -> bool:
        around = self._arguments
        connector = None if around is None else around.vllm_config.kv_transfer_config.kv_connector
        return bool(connector == OWN_CONNECTOR)

    def _is_offered_again(self) -> bool:
        """Return whether the connector offers blocks again that a store has left out."""
        return self._has_own_connector and CONTRACT.has_private_names(
            "KVOffloadConnector: offering again what had no room, and looking blocks up in batches,"
        )

    def _token_hasher(self) -> HashTokens | None:
        """Return what hashes prompts as vLLM does; None if its configuration is not accessible."""
        if self._arguments is None:
            return None
        return token_hasher(
            self._arguments.vllm_config.cache_config.prefix_caching_hash_algo,
            self.tokens_per_hash,
            {
                group.group_id: tokens * self.blocks_per_chunk
                for group, tokens in zip(self.config.groups, self.tokens_per_block, strict=True)
            },
        )

    def _warn_of_failed_loads(self) -> None:
        """Warn if vLLM will not recompute the blocks of a failed load."""
        around = self._arguments
        if around is None:
            return
        transfer = around.vllm_config.kv_transfer_config
        decides = (around.outer or around.vllm_config).kv_transfer_config  # vLLM reads the outer
        remedy = '"kv_load_failure_policy": "recompute" next to "kv_connector": "{}"'
        if transfer.kv_connector == "OffloadingConnector":
            logger.warning(
                "a failed load ends the engine, because kv_connector is OffloadingConnector, which "
                'cannot report it; set "kv_connector": "KVOffloadConnector", '
                '"kv_connector_module_path": "kvoffload_async.integrations.vllm" and %s, '
                "and vLLM computes those blocks instead",
                remedy.format("KVOffloadConnector" if around.outer is None else "MultiConnector"),
            )
        elif decides.kv_load_failure_policy != "recompute":
            logger.warning(
                "vLLM ends a request whose load failed with an error, because "
                "kv_load_failure_policy is %r, vLLM's default; set %s, and vLLM computes those "
                "blocks instead",
                decides.kv_load_failure_policy,
                remedy.format(decides.kv_connector),
            )

    def _require_to_be_alone(self) -> None:
        """Check that a `MultiConnector` has no second connector that offloads.

        Its connectors have one engine_id, which names the memory, and vLLM registers the metrics of
        offloading once per class of connectors, and cannot register them twice.
        """
        outer = None if self._arguments is None else self._arguments.outer
        if outer is None:
            return
        connectors = outer.kv_transfer_config.kv_connector_extra_config["connectors"]
        names = [one["kv_connector"] for one in connectors]
        offloading = [name for name in names if name in OFFLOADING_CONNECTORS]
        if len(offloading) > 1:
            raise ConfigError(
                f"connectors: {' and '.join(offloading)} cannot be in one MultiConnector; keep "
                "one of them, with the secondary_tiers of all"
            )

    def _warn_of_incomplete_chunks(self) -> None:
        """Warn if vLLM will store chunks that are dropped because they lack blocks."""
        if self.blocks_per_chunk > 1 and self._groups_with_windows():
            logger.warning(
                "blocks_per_chunk is %d, and this model has layers with a sliding window: chunks "
                "of which the window has let a block go are not stored; leave blocks_per_chunk out",
                self.blocks_per_chunk,
            )

    def _kv_cache_specs(self) -> dict[int, Any]:
        """Return vLLM's `KVCacheSpec` of each group id; empty if they are not accessible."""
        config = None if self._arguments is None else self._arguments.kv_cache_config
        if config is None:
            return {}
        ids = [group.group_id for group in self.config.groups]
        return {number: config.kv_cache_groups[number].kv_cache_spec for number in ids}

    def _groups_with_windows(self) -> list[int]:
        """Return the ids of the groups that free blocks of running requests."""
        specs = self._kv_cache_specs().items()
        return [number for number, spec in specs if not isinstance(spec, FullAttentionSpec)]

    def _create_worker(self, kv_caches: base.CanonicalKVCaches) -> KVOffloadWorker:
        options, is_canonical = self._engine.config, self.config.canonical_layout
        if is_canonical:
            _require_certified(self.config, kv_caches)
        layout = convert.kv_layout(kv_caches, self.blocks_per_chunk, is_canonical=is_canonical)
        convert.require_announced(layout, options.block_bytes)
        rank = self.config.parallel.rank
        cell_bytes = layout.chunk_bytes if is_canonical else 0
        buffer = self.map_primary(1 + rank, self._digest_of(kv_caches), cell_bytes)
        return KVOffloadWorker(
            layout,
            buffer,
            cell_offset_bytes=0 if self._has_one_cell else rank * buffer.cell_bytes,
            timeout_s=options.drain_timeout_s,
            state_groups=[
                index
                for index, spec in enumerate(self._kv_cache_specs().values())
                if isinstance(spec, MambaSpec)
            ],
        )

    def _options(self) -> OffloadConfig:
        options, self._identity_options = engine_options(self.extra_config)
        self._tenant = parse_tenant_field(self.extra_config)
        if options.get("tenants") and self._tenant is None and not self._has_own_connector:
            raise ConfigError(
                'tenant_field: "cache_salt" is passed on by KVOffloadConnector only; use "kv_connec'
                f'tor": "{OWN_CONNECTOR}"'
            )
        if not self.config.worker_kv_bytes_per_block:
            raise ConfigError(
                f"pipeline_parallel_size: rank {self.config.parallel.rank} has no layers with a KV "
                "cache to offload; use fewer pipeline ranks, or set VLLM_PP_LAYER_PARTITION"
            )
        options["blocks_per_chunk"] = self.blocks_per_chunk
        num_copies = 1 if self.replicated_layout else self.config.parallel.world_size
        options["block_bytes"] = self.config.worker_kv_bytes_per_block * self.blocks_per_chunk
        if self.config.canonical_layout:  # at most this, which the workers know
            options["block_bytes"] *= num_copies
        options["block_size"] = min(self.tokens_per_block)
        options["num_workers"] = 1 if self._has_one_cell else num_copies
        options["enable_kv_cache_events"] = self.config.enable_kv_cache_events
        for number, identity in enumerate(self._identity_options):
            if identity is not None:  # for the checks; the workers' tensors are not known yet
                run_config = convert.file_mapper_of(self, "").get_run_config()
                options["secondary_tiers"][number]["run_config"] = run_config
        return OffloadConfig.parse(options)

    def _digest_of(self, kv_caches: base.CanonicalKVCaches) -> str:
        """Return the layout digest of this worker's tensors."""
        layers = {} if self._arguments is None else self._arguments.registered_layers()
        groups = [group.layer_names for group in self.config.groups]
        if canonical := canonical_format(self.config):
            return layout_of_canonical_pages(kv_caches, layers, groups, canonical)
        return layout_of_layers(layers, groups) if layers else layout_of_pages(kv_caches)


def _require_certified(
    config: OffloadingConfig, kv_caches: base.CanonicalKVCaches | None = None
) -> None:
    """Check that pages are independent of the parallel sizes, as far as vLLM certifies it.

    Args:
        config: vLLM's configuration.
        kv_caches: A worker's tensors; None: only what the configuration says.

    Raises:
        ConfigError: They are not; the message is vLLM's.
    """
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec  # noqa: PLC0415 - large

    parallel = config.parallel
    if kv_caches is None:
        if parallel.is_parallelism_agnostic and parallel.world_size == parallel.tp_size:
            return
        kv_caches = base.CanonicalKVCaches([], [[base.CanonicalKVCacheRef(0, 0)]])  # no mapping
    wanted: Any = SimpleNamespace(config=config)
    try:
        TieringOffloadingSpec._validate_canonical_refs(wanted, kv_caches)  # noqa: SLF001 - its words
    except RuntimeError as error:
        raise ConfigError(f"canonical_layout: {error}") from error


class _SharedSpec(TieringOffloadingSpec):
    """The spec of this package's engine, with the primary in the shared mapping.

    Attributes:
        outer: vLLM's spec.
        buffer: The primary; None until it is mapped.
    """

    def __init__(self, config: OffloadConfig, outer: KVOffloadSpec) -> None:
        self.outer = outer
        if replica := outer.config.parallel.data_parallel_index:  # the first one has no suffix
            self._path_suffix = f"-{replica}"
        super().__init__(config)
        self._status = EngineStatus(outer.config.model.name)
        self.buffer: SharedBuffer | None = None

    def shutdown(self, timeout: float | None = None) -> None:
        try:
            super().shutdown(timeout)
        finally:
            if self.buffer is not None:
                self.buffer.remove_name()
            self.outer.process_folders.close()

    def _memory_limits(self) -> Sequence[Limit]:
        limit = filesystem_limit(SHARED_MEMORY)
        return (*super()._memory_limits(), *([limit] if limit else []))

    def _create_buffer(self) -> PrimaryBuffer:
        self.buffer = buffer = self.outer.map_primary(SCHEDULER)
        self.config = replace(self.config, block_bytes=buffer.cell_bytes)
        self.num_blocks, self.stride_bytes = len(buffer.view), buffer.stride_bytes
        return buffer

    def _create_driver(self, kind: type[D]) -> D:
        try:
            return super()._create_driver(kind)
        except BaseException:
            self.outer.process_folders.close()
            raise

    def _tier_configs(self) -> Sequence[Mapping[str, Any]]:
        assert self.buffer is not None  # noqa: S101 - for the type checker
        if self.outer.config.canonical_layout:
            self.outer.layouts_of_ranks(self.buffer)
        return list(self.outer.identified_tiers(self.config.secondary_tiers, self.buffer))
