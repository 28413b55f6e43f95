"""vLLM's own `fs` tier, made to stand beside this package's tiers in a measurement.

It is vLLM's class as it is, on a spec with no more than that class reads.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from kvoffload_async.config import at_least, parse_bool
from kvoffload_async.integrations.vllm.version import require_vllm
from kvoffload_async.types import BlockIds, OffloadKey

_DEFAULT_THREADS = 16


class OpenVllmFs:
    """vLLM's `fs` tier, open on a directory.

    Attributes:
        manager: vLLM's tier.
        request: What its `lookup` gets beside the key.
        step: What its `on_schedule_end` gets.
    """

    def __init__(self, manager: Any, base: Any, tiering: Any) -> None:  # noqa: ANN401 - vLLM's
        """Wrap an open tier; `base` and `tiering` are vLLM's modules of those names."""
        self.manager = manager
        self.request = base.ReqContext(req_id="bench")
        self.step = base.ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
        self._job_class = tiering.TransferJob

    def make_job(
        self, job_id: int, keys: Sequence[OffloadKey], rows: BlockIds, *, is_load: bool
    ) -> object:
        """Return a job of vLLM's."""
        return self._job_class(
            job_id=job_id,
            keys=tuple(keys),
            chunk_ids=rows,
            is_promotion=is_load,
            req_context=self.request,
        )

    def close(self) -> None:
        """Close it; waits for its threads."""
        self.manager.shutdown()


class VllmFsPeer:
    """vLLM's `fs` tier as it is configured by default, but with buffered I/O.

    Attributes:
        name: What it is called in the figures.
        options: Its options, and which vLLM it is and whether its C helper is in use.
        place: Where it writes.
    """

    def __init__(self, name: str, options: Mapping[str, Any], place: Any) -> None:  # noqa: ANN401
        """Find vLLM, and check the options: `n_read_threads`, `n_write_threads`, `direct_io`.

        Raises:
            ImportError: There is no vLLM of a supported version.
            ConfigError: An option is unusable.
        """
        require_vllm(f"the peer {name}")
        self._base = importlib.import_module("vllm.v1.kv_offload.base")
        self._tiering = importlib.import_module("vllm.v1.kv_offload.tiering.base")
        self._fs = importlib.import_module("vllm.v1.kv_offload.tiering.fs.manager")
        self.name = name
        self.place = place
        self._direct = parse_bool(options.get("direct_io", False), "direct_io")
        self._threads = {
            key: at_least(1)(options.get(key, _DEFAULT_THREADS), key)
            for key in ("n_read_threads", "n_write_threads")
        }
        self.options: Mapping[str, Any] = {
            **self._threads,
            "direct_io": self._direct,
            "c_helper": _has_c_helper(),
            "vllm": importlib.import_module("vllm").__version__,
        }

    def capacity_bytes(self, stored_bytes: int) -> int | None:
        """Return None: it keeps everything."""
        return None

    def open(self, view: memoryview, directory: str | None, stored_bytes: int) -> OpenVllmFs:
        """Open it on an empty directory; it has no capacity."""
        manager = self._fs.FileSystemTierManager(
            _spec(), view, "fs", root_dir=directory, **self._threads
        )
        if not self._direct:
            # It decides by itself, by what the filesystem can do, and takes no option.
            manager._use_o_direct = False  # noqa: SLF001 - see above
        return OpenVllmFs(manager, self._base, self._tiering)


def _has_c_helper() -> bool:
    try:
        importlib.import_module("vllm.fs_io_C")
    except ImportError:
        return False
    return True


def _spec() -> Any:  # noqa: ANN401 - stands for vLLM's OffloadingSpec
    """Return what the tier reads of a spec: the names and sizes that its paths are made of."""
    return SimpleNamespace(
        blocks_per_chunk=1,
        replicated_layout=False,
        config=SimpleNamespace(
            groups=(),
            canonical_layout=False,
            replicated_layout=False,
            model=SimpleNamespace(name="bench", dtype="bfloat16"),
            cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=SimpleNamespace(
                tp_size=1,
                pp_size=1,
                pcp_size=1,
                dcp_size=1,
                rank=0,
                is_parallelism_agnostic=True,
            ),
        ),
    )
