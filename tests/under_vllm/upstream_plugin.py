"""A pytest plugin: tests on vLLM's sources, and vLLM's own with our tier in the place of theirs.

The sources come from an unpacked source distribution, which has no compiled modules; those of the
installed vLLM are found behind them. Where vLLM's tests look into the private state of its tier,
`UnderTest` answers from what ours has in its place, or injects the fault that they inject.
"""

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

SDIST = "KVOFFLOAD_VLLM_SDIST"
INSTALLED = "KVOFFLOAD_VLLM_INSTALLED"
REPLACES = "KVOFFLOAD_VLLM_REPLACES_TIER"


class _Probes:
    """For `_lookup_manager`: whether a probe was answered, and that none is queued."""

    def __init__(self, tier):
        self._tier = tier
        self._pending_results = self

    def empty(self):
        self._tier.has_pending_work()  # takes in what has come
        return self._tier.tier_state.index.is_waiting

    @property
    def _lookup_batch(self):
        return list(self._tier.tier_state.index._pending)


def pytest_configure():
    import vllm

    vllm.__path__.append(os.environ[INSTALLED])
    source = Path(vllm.__file__).resolve().parent.parent
    assert source == Path(os.environ[SDIST]).resolve(), f"vllm was imported from {source}"
    assert importlib.util.find_spec("vllm.fs_io_C") is not None, "no compiled modules were found"
    if REPLACES not in os.environ:
        return
    from vllm.v1.kv_offload.tiering.fs import manager

    manager.batch_store_block = lambda paths, *rest: None
    manager.FileSystemTierManager = _tier_under_test(manager)


def _tier_under_test(manager):
    from kvoffload_async.integrations.vllm import FsTier
    from kvoffload_async.tiers.files.ops import FileOps

    class Ops(FileOps):
        def publish(self, source, target):
            manager.batch_store_block([target])  # raises where a test has replaced it
            super().publish(source, target)

    class UnderTest(FsTier):
        _use_o_direct = False  # our default, whatever the filesystem can
        _store_job_keys: ClassVar = {}  # nothing of the kind is kept

        def __init__(self, *args, **options):
            super().__init__(*args, trust_vllm_directory=True, **options)

        def layout(self, offloading_spec, options):
            self.events = [] if options["enable_kv_events"] else None
            return {**super().layout(offloading_spec, options), "ops": Ops()}

        @property
        def _lookup_manager(self):
            return _Probes(self._tier)

        @property
        def _pool(self):
            link = self._tier.link
            return SimpleNamespace(
                _load_q=link.actor._loads.waiting,
                _store_q=link.actor._stores.waiting,
                _threads=link._pool._threads,
            )

    return UnderTest
