"""An engine without a model: vLLM's own manager over vLLM's own shared region, with our tiers.

`Serving` does what vLLM's scheduler and worker do, one call at a time; its tiers are given in JSON,
as a user gives them.
"""

import hashlib
import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import ClassVar

import numpy as np
from faulty_files import FaultyFileOps
from vllm.v1.kv_offload import config
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvoffload_async.integrations.vllm import FsTier
from kvoffload_async.runtime.shared_region import file_name

DEADLINE_S = 20.0
SLOT_BYTES = 8192
MODULE = "kvoffload_async.integrations.vllm"


def key_of(number, group=0):
    return hashlib.sha256(f"{number}".encode()).digest() + group.to_bytes(4, "big")


def keys_of(*numbers):
    return [key_of(number) for number in numbers]


_engine_ids = set()
"""Those that this process has used."""


def own_id(name):
    """Return an engine's id that no other process of tests has: it names shared memory."""
    _engine_ids.add(engine_id := f"{name}-{os.getpid()}")
    return engine_id


def shared_files():
    """Return the files in shared memory now of all engines with ids of `own_id`."""
    return [path for engine_id in _engine_ids for path in shared_files_of(engine_id)]


def is_shared_file_of(engine_id, path):
    """Tell whether a path is that of an engine's shared memory: vLLM's own, or this package's."""
    return engine_id in str(path) or file_name(engine_id) in str(path)


def shared_files_of(engine_id):
    """Return the files that an engine has in shared memory now."""
    return [path for path in Path("/dev/shm").iterdir() if is_shared_file_of(engine_id, path)]


def content_of(key):
    return np.frombuffer(hashlib.shake_128(key).digest(SLOT_BYTES), dtype=np.int8)


def make_config(
    tiers,
    engine_id,
    *,
    slots=8,
    events=False,
    groups=1,
    model="org/model",
    replicated_layout=False,
    extra=(),
    **parallel,
):
    """Return vLLM's configuration of an engine with `slots` offload units."""
    sizes = {"tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, "rank": 0, "world_size": 1}
    sizes |= {"is_parallelism_agnostic": False, "data_parallel_index": 0} | parallel
    return config.OffloadingConfig(
        groups=tuple(
            config.OffloadingGroupConfig(16, (f"layer.{number}",), number)
            for number in range(groups)
        ),
        worker_kv_bytes_per_block=SLOT_BYTES,
        enable_kv_cache_events=events,
        extra_config={
            "cpu_bytes_to_use": slots
            * SLOT_BYTES
            * (1 if replicated_layout else sizes["world_size"]),
            "secondary_tiers": tiers,
            **dict(extra),
        },
        engine_id=engine_id,
        model=config.OffloadingModelConfig(name=model, dtype="float16"),
        cache=config.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=config.OffloadingParallelConfig(
            **sizes,
            data_parallel_size=1,
            data_parallel_rank_local=None,
        ),
        replicated_layout=replicated_layout,
    )


class Serving:
    """One engine: vLLM's spec, manager and shared region, and the bytes a worker would copy.

    Attributes:
        manager: vLLM's `TieringOffloadingManager`.
        tier: The first secondary tier.
        rows: The first worker's part of the primary, shape `[slots, SLOT_BYTES]`.
        call: How vLLM's methods are called; a test may put another thread in between.
    """

    def __init__(self, tiers, engine_id, **config):
        self.spec = TieringOffloadingSpec(make_config(tiers, engine_id, **config))
        self.manager = self.spec.get_manager()
        self.tier = self.manager.secondary_tiers[0]
        self.worker = SharedOffloadRegion(
            engine_id=engine_id,
            num_chunks=self.spec.num_chunks,
            rank=0,
            kv_bytes_per_chunk=self.spec.kv_bytes_per_chunk,
            cpu_page_size=self.spec.cpu_page_size_per_worker,
        )
        self.rows = self.worker.create_next_worker_view(SLOT_BYTES).numpy()
        self.call = lambda method, *args: method(*args)
        self.lock = getattr(self.manager, "lock", nullcontext())
        self._requests = 0
        self._is_shut = False

    def request(self):
        """Return a new request, as the scheduler makes it known."""
        self._requests += 1
        request = ReqContext(req_id=f"r{self._requests}")
        self.on(self.manager.on_new_request, request)
        return request

    def on(self, method, *args):
        """Call a method of the manager under its lock."""
        with self.lock:
            return self.call(method, *args)

    def step(self):
        self.on(self.manager.on_schedule_end, ScheduleEndContext((), ()))

    def finish_jobs(self):
        """Step until nothing is under way."""
        self.step()
        self.until(lambda: not self.on(self.manager.has_pending_work))

    def until(self, is_done):
        """Step until `is_done()`, waiting in between."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not is_done():
            assert time.monotonic() < deadline_s, f"not done within {DEADLINE_S} s"
            threading.Event().wait(0.002)  # paces the polling; nothing depends on its length
            self.step()

    def store(self, keys):
        """Store keys' bytes from the device; return those that the primary took."""
        request = self.request()
        output = self.on(self.manager.prepare_store, keys, request)
        taken = [] if output is None else list(output.keys_to_store)
        if taken:
            for key, slot in zip(taken, output.store_spec.block_ids, strict=True):
                self.rows[slot] = content_of(key)
            self.on(self.manager.complete_store, taken, request)
        self.on(self.manager.on_request_finished, request)
        return taken

    def load(self, keys):
        """Look keys up until every answer is final, and load the hits; return their bytes."""
        request = self.request()
        answers = {}

        def is_final():
            answers.update({k: self.on(self.manager.lookup, k, request) for k in keys})
            return set(answers.values()) <= {LookupResult.HIT, LookupResult.MISS}

        self.until(is_final)
        hits = [key for key in keys if answers[key] is LookupResult.HIT]
        found = {}
        if hits:
            slots = self.on(self.manager.prepare_load, hits, request).block_ids
            found = {k: self.rows[s].copy() for k, s in zip(hits, slots, strict=True)}
            self.on(self.manager.complete_load, hits, request)
        self.on(self.manager.on_request_finished, request)
        return found

    def holds(self, keys):
        """Tell whether all of the keys load, byte for byte."""
        found = self.load(keys)
        return found.keys() == set(keys) and all(
            np.array_equal(rows, content_of(key)) for key, rows in found.items()
        )

    def reset(self):
        """Reset as the scheduler does, with the workers' jobs all reported."""
        self.on(self.manager.reset_cache)
        if hasattr(self.manager, "on_reset_flushed"):
            self.on(self.manager.on_reset_flushed)

    def shutdown(self):
        if self._is_shut:
            return
        self.rows = None
        self.worker.cleanup()
        self.manager.shutdown()
        self._is_shut = True

    def forget(self):
        """Let go of everything that the test has shut down itself."""
        self.spec = self.manager = self.tier = self.worker = self.rows = None
        self._is_shut = True


class FaultyFsTier(FsTier):
    """Our tier on system calls that fail or hang as the test says: `FaultyFsTier.ops`."""

    ops = FaultyFileOps()

    def layout(self, offloading_spec, options):
        return {**super().layout(offloading_spec, options), "ops": self.ops}


class PolledFsTier(FsTier):
    """Our tier, polled by vLLM's second thread as well, where vLLM has one."""

    tolerates_off_thread_polling = True
    polled_by: ClassVar = set()

    def get_finished_jobs(self):
        self.polled_by.add(threading.current_thread().name)
        return super().get_finished_jobs()
