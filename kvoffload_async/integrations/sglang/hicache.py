"""A storage backend for SGLang: keeps pages of the host pool in this package's tiers.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "kvoffload", "interface_v1": 1,
        "module_path": "kvoffload_async.integrations.sglang", "class_name": "KVOffloadHiCache",
        "tier": {"type": "slab", "root_dir": "/kv", "capacity_bytes": "200GiB"}}'

SGLang calls `batch_exists` on one thread, the gets on a second, and the sets on a third. Gets and
sets have rows of their own: a call gathers its pages into rows, or scatters them from rows, and the
tiers' jobs access the rows only. So a call returns at the jobs' deadline although a copy of a hung
tier still runs, and SGLang may reuse the pages.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvoffload_async.abc.tier import Direction
from kvoffload_async.config import TenantOptions, UnknownTenant
from kvoffload_async.errors import ConfigError, OffloadError, StateError, text_of
from kvoffload_async.facade.tenants import Tenants
from kvoffload_async.facade.tier_factory import naming_tier
from kvoffload_async.integrations.sglang.page_store import PageStore
from kvoffload_async.integrations.sglang.pages import PoolPages, check_sharing, identified
from kvoffload_async.integrations.sglang.settings import HiCacheOptions
from kvoffload_async.observe.prometheus import MultiprocessMetrics, is_multiprocess, publish
from kvoffload_async.runtime.log_level import show_log
from kvoffload_async.statistics import OffloadingStatistics
from kvoffload_async.status.server import EngineStatus
from kvoffload_async.types import OffloadKey, make_offload_key

logger = logging.getLogger(__name__)

_MOST_PAGES: Final = 128
"""Maximum number of pages per job: SGLang passes as many pages per call."""

_MOST_CALLS: Final = 1024
"""Maximum number of calls per direction whose figures are kept for `get_stats`."""

_HASH_DIGITS: Final = 64

_PAGES, _TENSORS = 0, 1
"""Group indices in keys: one per interface, as the interfaces order a page's bytes differently."""


class KVOffloadHiCache(HiCacheStorage):
    """Keeps SGLang's KV-cache pages in tiers. SGLang creates it in each rank's scheduler.

    Gets, sets and `batch_exists` block, each with a deadline, and never raise because of a tier: a
    page that a tier cannot store or load is reported as such.

    Thread-safe, except `register_mem_pool_host` and `close`.
    """

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Check the configuration; starts nothing, because the pool is not known yet.

        Args:
            storage_config: Ranks, model, and as `extra_config` the user's configuration.
            kwargs: Further arguments of SGLang's factory; ignored.

        Raises:
            ConfigError: An option is missing, unknown or invalid.
        """
        del kwargs
        show_log()
        self._config = storage_config
        given = storage_config.extra_config or {}
        self._options = HiCacheOptions.parse(given)
        if storage_config.tp_lcm_size is not None:
            raise ConfigError(
                f"tp_lcm_size: {storage_config.tp_lcm_size} is not supported, because pages of "
                "different TP sizes are stored separately; leave it out"
            )
        self._group = _PAGES if given.get("interface_v1") else _TENSORS
        if self._group == _TENSORS:
            logger.warning(
                "interface_v1: off, so SGLang copies each page twice; add "
                '"interface_v1": 1 to hicache-storage-backend-extra-config'
            )
        for index, tier in enumerate(self._options.tier):
            with naming_tier(index, tier, "tier"):
                check_sharing(tier, storage_config)
        named = [TenantOptions(name=name) for name in [self._options.tenant] if name is not None]
        self._tenants = Tenants(named, UnknownTenant.DEFAULT) if named else None
        self._pages: PoolPages | None = None
        self._tiers: list[dict[str, Any]] = []
        self._store: PageStore | None = None
        self._status = EngineStatus(storage_config.model_name)
        self._unpublish: Callable[[], None] | None = None
        self._shared: MultiprocessMetrics | None = None
        self._calls: dict[Direction, deque[tuple[int, float]]] = {
            direction: deque(maxlen=_MOST_CALLS) for direction in (Direction.LOAD, Direction.STORE)
        }
        """Transferred pages and seconds of the latest calls in each direction."""

    # -- pools ------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:  # noqa: ANN401 - HostKVCache
        """Examine the host pool; starts nothing, because further pools may follow.

        Raises:
            ConfigError: The pool is not supported, or the configuration does not fit to it.
            StateError: A pool is registered already.
        """
        if self._pages is not None:
            raise StateError("a host pool is registered already")
        super().register_mem_pool_host(mem_pool_host)
        pages = PoolPages(mem_pool_host)
        dtype = _kv_cache_dtype()
        self._tiers = [
            identified(tier, self._config, mem_pool_host, pages, dtype)
            for tier in self._options.tier
        ]
        self._pages = pages

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:  # noqa: ANN401 - SGLang's
        """Accept the KV pool that is registered already, and no other pool.

        Raises:
            ConfigError: The model has a second kind of KV cache. Everything is closed.
        """
        if host_pool_name != PoolName.KV:
            self.close()
            raise ConfigError(
                f"host pool {str(host_pool_name)!r}: models with several kinds of KV cache, and "
                "draft models with a KV cache of their own, are not supported by this storage "
                "backend; use another one for this model"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def on_host_pools_registered(self) -> None:
        """Map the staging rows and open the tiers; blocks until they are open.

        Raises:
            ConfigError: The configuration does not fit to the pool's pages. As for the other
                errors, nothing is left running.
            TierUnavailableError: A tier's storage cannot be reached.
            TierTimeoutError: A tier did not open in time.
        """
        super().on_host_pools_registered()
        if self._pages is None or self._store is not None:
            return
        suffix = self._rank_suffix()
        self._status.listen(self._options.status_socket, suffix)
        try:
            self._store = PageStore(
                self._pages, self._tiers, _MOST_PAGES, self._options.staging_bytes
            )
        except BaseException:
            self._status.close()
            raise
        self._status.serve(self.stats, self._slowest)
        name = f"sglang{suffix}"
        if is_multiprocess():
            self._shared = MultiprocessMetrics(name)
        else:
            self._unpublish = publish(name, self.stats)

    # -- pages of the pool ------------------------------------------------------------------------

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Load pages into the host pool; return for each page whether it was loaded."""
        del extra_info
        return self._move(Direction.LOAD, keys, host_indices)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages of the host pool; return for each page whether it is stored.

        A rank that is not the writer of its pages stores nothing.
        """
        del extra_info
        if not self._config.is_storage_writer:
            return [True] * len(keys)
        return self._move(Direction.STORE, keys, host_indices)

    # -- existence --------------------------------------------------------------------------------

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Return how many leading keys are stored; waits for `probe_timeout_s` at most."""
        del extra_info
        return 0 if self._store is None else self._store.leading_run(self._keys(keys, self._group))

    def exists(self, key: str) -> bool:
        """Return whether a key is stored; waits for `probe_timeout_s` at most."""
        return self.batch_exists([key]) == 1

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return the result of `batch_exists`; empty if SGLang also asks for other pools."""
        if pool_transfers:
            return PoolTransferResult.empty()
        count = self.batch_exists(keys, extra_info)
        return PoolTransferResult(count, {PoolName.KV: count} if count else {})

    # -- pages in tensors -------------------------------------------------------------------------

    def get(
        self,
        key: str,
        target_location: torch.Tensor | None = None,
        target_sizes: Any = None,  # noqa: ANN401 - SGLang's
    ) -> torch.Tensor | None:
        """Load a page into `target_location`, and return this tensor; None if it was not loaded."""
        return self.batch_get([key], [target_location], target_sizes)[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor | None] | None = None,
        target_sizes: Any = None,  # noqa: ANN401 - SGLang's
    ) -> list[torch.Tensor | None]:
        """Load pages into tensors; return each page's tensor, or None if it was not loaded."""
        del target_sizes
        targets = _tensors(target_locations, len(keys), "target_location")
        loaded = self._move(Direction.LOAD, keys, targets)
        return [
            target if is_loaded else None for target, is_loaded in zip(targets, loaded, strict=True)
        ]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any = None,  # noqa: ANN401 - SGLang's
        target_sizes: Any = None,  # noqa: ANN401 - SGLang's
    ) -> bool:
        """Store a page; return whether it is stored."""
        return self.batch_set([key], [value], target_location, target_sizes)

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor | None] | None = None,
        target_locations: Any = None,  # noqa: ANN401 - SGLang's
        target_sizes: Any = None,  # noqa: ANN401 - SGLang's
    ) -> bool:
        """Store pages; return whether all of them are stored."""
        del target_locations, target_sizes
        pages = _tensors(values, len(keys), "value")
        if not self._config.is_storage_writer:
            return True
        return all(self._move(Direction.STORE, keys, pages))

    # -- the whole --------------------------------------------------------------------------------

    def stats(self) -> OffloadingStatistics:
        """Return the statistics of the tiers; thread-safe.

        Raises:
            StateError: No pool is registered, or the backend is closed.
        """
        store = self._store
        if store is None:
            raise StateError("the storage backend is not open")
        return store.stats()

    def get_stats(self) -> Any:  # noqa: ANN401 - SGLang's StorageMetrics
        """Return pages and GB/s of the calls since the previous result, for SGLang's metrics."""
        store = self._store
        if store is None or not self._config.enable_storage_metrics:
            return None
        if self._shared is not None:
            self._shared.update(store.stats)
        metrics = importlib.import_module("sglang.srt.observability.metrics_collector")
        found = metrics.StorageMetrics()
        for calls, pages, bandwidths in (
            (self._calls[Direction.LOAD], found.prefetch_pgs, found.prefetch_bandwidth),
            (self._calls[Direction.STORE], found.backup_pgs, found.backup_bandwidth),
        ):
            while calls:
                count, seconds = calls.popleft()
                pages.append(count)
                bandwidths.append(count * store.page_bytes / seconds / 1e9)
        return found

    def clear(self) -> None:
        """Remove the tenant's pages of this rank from the tiers; blocks until the jobs' deadline.

        Raises:
            NotImplementedError: A tier does not know its contents, or cannot remove single pages.
            TierTimeoutError: Not all pages were removed in time.
        """
        store = self._store
        if store is None:
            return
        if names := store.not_clearable:
            raise NotImplementedError(
                f"tiers of type {', '.join(names)} cannot be cleared, unlike slab, and fs with "
                "capacity_bytes; give the tier another namespace, and its pages are never served"
            )
        store.clear(self._is_own)

    def close(self) -> None:
        """Close the tiers, and release the memory; idempotent. Blocks for `close_timeout_s`."""
        self._status.close()
        if self._unpublish is not None:
            self._unpublish()
        store = self._store
        if store is None:
            return
        report = store.close()
        self._store = None
        if report.unfinished_jobs:
            logger.warning(
                "copies of %d jobs still run; their rows stay mapped", len(report.unfinished_jobs)
            )
        if report.error is not None:
            logger.warning("closing the tiers failed: %s", text_of(report.error))

    # -- inside -----------------------------------------------------------------------------------

    def _keys(self, names: Sequence[str], group: int) -> list[OffloadKey]:
        """Convert SGLang's keys, which are SHA-256 hashes as text or longer texts."""
        keys = [make_offload_key(_hash_of(name), group) for name in names]
        if self._tenants is None:
            return keys
        return [self._tenants.tagged(key, len(self._tenants.names) - 1) for key in keys]

    def _is_own(self, key: OffloadKey) -> bool:
        """Return whether a key in the tiers is of the tenant; all are without one."""
        return self._tenants is None or self._tenants.owns(key, len(self._tenants.names) - 1)

    def _rank_suffix(self) -> str:
        """Return this rank's non-zero coordinates as a suffix, such as `-tp1`."""
        config = self._config
        coordinates = {
            "dp": config.dp_rank,
            "pp": config.pp_rank,
            "cp": config.attn_cp_rank,
            "tp": config.tp_rank,
        }
        return "".join(f"-{name}{number}" for name, number in coordinates.items() if number)

    def _slowest(self) -> None:
        """Return None: SGLang passes no requests to a storage backend."""

    def _move(
        self, direction: Direction, keys: list[str], pages: torch.Tensor | list[torch.Tensor]
    ) -> list[bool]:
        """Store or load pages; return for each page whether it was transferred.

        Args:
            direction: Whether to store or to load.
            keys: SGLang's keys.
            pages: Indices of the pages' tokens in the pool, or a tensor for each page.
        """
        moved, store = [False] * len(keys), self._store
        if store is None:
            return moved
        began_s = time.monotonic()
        try:
            if isinstance(pages, torch.Tensor):
                moved = store.move_pages(direction, self._keys(keys, _PAGES), pages)
            else:
                moved = store.move_tensors(direction, self._keys(keys, _TENSORS), pages)
        except OffloadError as error:
            logger.error(  # noqa: TRY400 - expected
                "%s of %d pages failed: %s", direction.name.lower(), len(keys), text_of(error)
            )
        self._calls[direction].append((sum(moved), time.monotonic() - began_s))
        return moved


def _hash_of(name: str) -> bytes:
    if len(name) == _HASH_DIGITS:
        try:
            return bytes.fromhex(name)
        except ValueError:
            pass
    return hashlib.sha256(name.encode()).digest()


def _tensors(
    given: Sequence[torch.Tensor | None] | None, count: int, name: str
) -> list[torch.Tensor]:
    """Return the tensors passed to the generic interface; raises TypeError if any is missing."""
    tensors = [tensor for tensor in given or () if isinstance(tensor, torch.Tensor)]
    if len(tensors) != count:
        raise TypeError(f"{name}: {count} tensors are needed, and {len(tensors)} were given")
    return tensors


def _kv_cache_dtype() -> str | None:
    """Return the server's `kv_cache_dtype`, which names the kind of FP8; None without a server."""
    try:
        from sglang.srt.runtime_context import get_server_args  # noqa: PLC0415 - of newer releases

        dtype = get_server_args().kv_cache_dtype
    except (AttributeError, ImportError, RuntimeError, ValueError):
        return None
    return str(dtype)
