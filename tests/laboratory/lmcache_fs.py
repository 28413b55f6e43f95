"""LMCache's native file tier, adapted to the benchmark of this package's tiers.

It is LMCache's unmodified L2 adapter `fs_native`, operating on the primary's rows instead of
LMCache's memory objects. Its lookups are batched and asynchronous, so lookups are not benchmarked.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvoffload_async.bench.contender import Contender, OpenTier, Place
from kvoffload_async.config import at_least, parse_bool
from kvoffload_async.types import BlockIds, LookupResult, OffloadKey

_L2 = "lmcache.v1.distributed.l2_adapters"
_DEFAULT_WORKERS = 4


class Row(NamedTuple):
    """A row of the primary, with the one attribute of LMCache's memory objects that is used."""

    byte_array: memoryview


class Job(NamedTuple):
    """A submitted job; `keys` and `rows` are parallel."""

    job_id: int
    keys: list[Any]
    rows: list[Row]


class Ended(NamedTuple):
    """Result of a job."""

    job_id: int
    success: bool


class LmcacheManager:
    """A scheduler's calls, mapped to the adapter's."""

    def __init__(self, adapter: Any) -> None:
        """Use an open adapter."""
        self._adapter = adapter
        self._stores: dict[int, int] = {}
        """Adapter's task id -> job id."""
        self._loads: dict[int, Job] = {}

    def submit_store(self, job: Job, /) -> None:
        """Submit a store."""
        self._stores[self._adapter.submit_store_task(job.keys, job.rows)] = job.job_id

    def submit_load(self, job: Job, /) -> None:
        """Submit a load."""
        self._loads[self._adapter.submit_load_task(job.keys, job.rows)] = job

    def get_finished_jobs(self) -> list[Ended]:
        """Return the results of jobs that ended since the last call."""
        results = []
        if self._stores:
            for task, result in self._adapter.pop_completed_store_tasks().items():
                results.append(Ended(self._stores.pop(task), result.is_successful()))
        for task, job in list(self._loads.items()):
            loaded = self._adapter.query_load_result(task)
            if loaded is not None:
                del self._loads[task]
                is_whole = loaded.popcount() == len(job.keys)
                results.append(Ended(job.job_id, is_whole))
        return results

    def on_schedule_end(self, context: object, /) -> None:
        """Do nothing: submitted jobs have already started."""

    def lookup(self, key: object, request: object, /) -> LookupResult:
        """Return MISS: lookups are not benchmarked."""
        return LookupResult.MISS


class OpenLmcacheFs(OpenTier):
    """The adapter, open on a directory; it takes no contexts."""

    manager: Any
    request: Any
    step: Any

    def __init__(self, adapter: Any, key_class: Any, view: memoryview) -> None:
        """Wrap an open adapter over the primary's rows."""
        self.manager = LmcacheManager(adapter)
        self.request = None
        self.step = None
        self._adapter = adapter
        self._key_class = key_class
        self._flat = view.cast("B", (view.nbytes,))
        self._row_bytes = view.nbytes // len(view)

    def make_job(
        self, job_id: int, keys: Sequence[OffloadKey], rows: BlockIds, *, is_load: bool
    ) -> Any:
        """Return a job; the same type for both directions."""
        size = self._row_bytes
        return Job(
            job_id,
            [self._key_class(chunk_hash=bytes(key), model_name="bench", kv_rank=0) for key in keys],
            [Row(self._flat[row * size : (row + 1) * size]) for row in rows.tolist()],
        )

    def close(self) -> None:
        """Close the adapter; waits for its threads."""
        self._adapter.close()
        self._flat.release()


class LmcacheFsPeer(Contender):
    """LMCache's native file tier in its default configuration.

    Its `options` include LMCache's version.
    """

    def __init__(self, name: str, options: Mapping[str, Any], place: Place) -> None:
        """Import LMCache and check the options `num_workers` and `use_odirect`.

        Raises:
            ImportError: LMCache or its native file client is not installed.
            ConfigError: An option is invalid.
        """
        importlib.import_module("lmcache.lmcache_fs")
        config = importlib.import_module(f"{_L2}.fs_native_l2_adapter")
        self._config_class = config.FSNativeL2AdapterConfig
        self._create = importlib.import_module(f"{_L2}.factory").create_l2_adapter_from_registry
        self._key_class = importlib.import_module("lmcache.v1.distributed.api").ObjectKey
        self.name = name
        self.place = place
        self._settings = {
            "num_workers": at_least(1)(options.get("num_workers", _DEFAULT_WORKERS), "num_workers"),
            "use_odirect": parse_bool(options.get("use_odirect", False), "use_odirect"),
        }
        version = importlib.import_module("lmcache._version").__version__
        self.options = {**self._settings, "lmcache": version}

    def capacity_bytes(self, stored_bytes: int) -> int | None:
        """Return None: there is no capacity limit."""
        return None

    def open(self, view: memoryview, directory: str | None, stored_bytes: int) -> OpenLmcacheFs:
        """Open the tier on an empty directory, without a capacity limit."""
        adapter = self._create(self._config_class(base_path=directory, **self._settings))
        return OpenLmcacheFs(adapter, self._key_class, view)
