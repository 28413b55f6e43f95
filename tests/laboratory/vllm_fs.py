"""vLLM's own `fs` tier, adapted to the benchmark of this package's tiers.

It is vLLM's unmodified class, created with a minimal spec.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from kvoffload_async.bench.contender import Contender, OpenTier, Place
from kvoffload_async.config import at_least, parse_bool
from kvoffload_async.integrations.vllm.version import CONTRACT
from kvoffload_async.types import BlockIds, OffloadKey

_DEFAULT_THREADS = 16


class OpenVllmFs(OpenTier):
    """vLLM's `fs` tier, open on a directory; its manager, contexts and jobs are vLLM's."""

    manager: Any
    request: Any
    step: Any

    def __init__(self, manager: Any, base: Any, tiering: Any) -> None:
        """Wrap an open tier; `base` and `tiering` are vLLM's modules with these names."""
        self.manager = manager
        self.request = base.ReqContext(req_id="bench")
        self.step = base.ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
        self._job_class = tiering.TransferJob

    def make_job(
        self, job_id: int, keys: Sequence[OffloadKey], rows: BlockIds, *, is_load: bool
    ) -> Any:
        """Return a job of vLLM's type."""
        return self._job_class(
            job_id=job_id,
            keys=tuple(keys),
            chunk_ids=rows,
            is_promotion=is_load,
            req_context=self.request,
        )

    def close(self) -> None:
        """Close the tier; waits for its threads."""
        self.manager.shutdown()


class VllmFsPeer(Contender):
    """vLLM's `fs` tier in its default configuration, except for buffered I/O.

    Its `options` include vLLM's version, and whether vLLM's C helper is used.
    """

    def __init__(self, name: str, options: Mapping[str, Any], place: Place) -> None:
        """Import vLLM and check the options `n_read_threads`, `n_write_threads` and `direct_io`.

        Raises:
            ImportError: No supported vLLM is installed.
            ConfigError: An option is invalid.
        """
        CONTRACT.require(f"the peer {name}")
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
        self.options = {
            **self._threads,
            "direct_io": self._direct,
            "c_helper": _has_c_helper(),
            "vllm": importlib.import_module("vllm").__version__,
        }

    def capacity_bytes(self, stored_bytes: int) -> int | None:
        """Return None: there is no capacity limit."""
        return None

    def open(self, view: memoryview, directory: str | None, stored_bytes: int) -> OpenVllmFs:
        """Open the tier on an empty directory, without a capacity limit."""
        manager = self._fs.FileSystemTierManager(
            _spec(), view, "fs", root_dir=directory, **self._threads
        )
        if not self._direct:
            # vLLM detects support in the filesystem and has no option for it.
            manager._use_o_direct = False
        return OpenVllmFs(manager, self._base, self._tiering)


def _has_c_helper() -> bool:
    try:
        importlib.import_module("vllm.fs_io_C")
    except ImportError:
        return False
    return True


def _spec() -> Any:
    """Return the attributes of a spec that the tier reads: names and sizes for its paths."""
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
