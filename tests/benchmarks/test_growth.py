"""Thousands of requests of one kind leave nothing behind: objects and memory stay as they are.

Method: each surface serves the same kind of request again and again. In the middle and at the end
it comes to rest; then the objects that the garbage collector knows are counted by type, and all
blocks of memory that the interpreter has allocated. Between the two, nothing may grow. Longer runs
also trace the bytes that the package's lines have allocated, which takes four times as long.

    KVOFFLOAD_REQUESTS=50000 pytest tests/benchmarks/test_growth.py        # as nox -s soak does
"""

import asyncio
import contextlib
import gc
import hashlib
import logging
import os
import sys
import tracemalloc
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from connector.worlds import Desk, Request
from facade.gated_tiers import DEADLINE_S, new_gates
from integrations import lmcache_contract, sglang_protocol

from kvoffload_async import OffloadEngine, TieringOffloadingSpec
from kvoffload_async.errors import BusyError
from kvoffload_async.facade.plugged import ListPosition, PluggedTiers
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.types import LookupResult, ReqContext, as_block_ids, make_offload_key

pytestmark = pytest.mark.slow

REQUESTS = int(os.environ.get("KVOFFLOAD_REQUESTS", "2000"))
HALVES = range(REQUESTS // 2), range(REQUESTS // 2, REQUESTS)
BLOCK = 4096
SLOTS = 16
CHAIN = 2
KNOWN = 40
"""Prompts that are stored again and again; their blocks do not fit into the primary together."""
SLACK = 200 + REQUESTS // 100
"""Objects that may come and go: the free lists of the interpreter and of uvloop fill up slowly."""
OWN = tracemalloc.Filter(inclusive=True, filename_pattern="*/kvoffload_async/*")
MODES = ["found", "missed", "stored", "cut", "refused", "down", "cancelled", "expired", "reset"]
"""`cut`: a store has room for its head only, and offers its tail again."""
TIERS = {
    "down": {"type": "DownTier", "module_path": "facade.gated_tiers"},
    "expired": {
        "type": "ProbedTier",
        "module_path": "facade.gated_tiers",
        "probe_timeout_s": 0.05,
    },
}


@pytest.fixture(autouse=True)
def gates(monkeypatch):
    with new_gates(monkeypatch) as gates:
        yield gates


@pytest.fixture(autouse=True)
def measured():
    """Trace memory in long runs; keep the log out of it, where pytest would hold every record."""
    logger = logging.getLogger("kvoffload_async")
    logger.propagate = False
    if REQUESTS > 2000:
        tracemalloc.start()
    yield
    tracemalloc.stop()
    logger.propagate = True


def config_of(mode, **options):
    return {
        "cpu_bytes_to_use": SLOTS * BLOCK,
        "block_bytes": BLOCK,
        "model": "m",
        "secondary_tiers": [TIERS.get(mode, {"type": "example"})],
        **options,
    }


def slab_in(folder):
    sizes = {"capacity_bytes": "1MiB", "segment_bytes": "128KiB"}
    return {"type": "slab", "root_dir": str(folder / "kv"), **sizes}


def chain(number):
    return [b"%8d/%d" % (number, position) for position in range(CHAIN)]


def keys_of(number):
    return [make_offload_key(block_hash) for block_hash in chain(number)]


def census():
    """Return the objects by type; the interpreter's blocks of memory; the package's bytes."""
    gc.collect()
    counts = Counter(map(type, gc.get_objects()))
    own_bytes = 0
    if tracemalloc.is_tracing():
        snapshot = tracemalloc.take_snapshot().filter_traces([OWN])
        own_bytes = sum(trace.size for trace in snapshot.traces)
    return counts, sys.getallocatedblocks(), own_bytes


def halves(serve):
    """Serve requests by number; yield a census in the middle, and one at the end."""
    for half in HALVES:
        serve(half)
        yield census()


def check_flat(middle, end):
    """Check that what is there at the end was there in the middle."""
    (objects, blocks, own_bytes), (later_objects, later_blocks, later_bytes) = middle, end
    more = {kind: count for kind, count in (later_objects - objects).items() if count > SLACK}
    assert more == {}, "objects stay"
    assert later_blocks - blocks < 4 * SLACK, "memory stays"
    assert later_bytes - own_bytes < 128 * SLACK, "bytes stay"


# -- the asynchronous engine --------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_does_not_grow(mode, gates):
    kv_caches = {"l": torch.zeros(SLOTS, BLOCK, dtype=torch.uint8)}
    with asyncio.Runner() as runner, contextlib.ExitStack() as ended:
        engine = OffloadEngine(config_of(mode), kv_caches=kv_caches)
        runner.run(engine.__aenter__())
        ended.callback(lambda: runner.run(engine.close()))
        ended.callback(gates[1].open)
        kind = EngineRequests(engine, mode, gates[1])
        runner.run(kind.begin())
        check_flat(*runner.run(kind.halves()))


class EngineRequests:
    """Requests of one kind, for an engine."""

    def __init__(self, engine, mode, gate):
        self.engine, self.mode, self.gate = engine, mode, gate
        self.pinning = contextlib.AsyncExitStack()

    async def begin(self):
        await self.store(0)
        if self.mode in {"refused", "cut"}:
            for number in range(SLOTS // CHAIN):
                await self.store(number)
                context = self.engine.request("pins", chain(number))
                request = await self.pinning.enter_async_context(context)
                await self.engine.lookup(request)
                is_last = self.mode == "cut" and number == SLOTS // CHAIN - 1
                keys = request.keys[:-1] if is_last else request.keys
                self.engine.driver.planner.prepare_load(keys, request.ctx)

    async def halves(self):
        taken = []
        for half in HALVES:
            await self.serve(half)
            taken.append(census())
        return taken

    async def serve(self, numbers):
        for number in numbers:
            await self.serve_one(number)
        if self.mode in {"found", "missed"}:
            return  # they never wait, so the loop has had no turn
        self.gate.open()
        await self.rest()
        await asyncio.sleep(0)

    async def rest(self):
        async with asyncio.timeout(DEADLINE_S):
            while self.engine.driver.planner.jobs or not await self.engine.quiesce(1.0):
                await self.engine.wait_for_progress(0.001)

    async def serve_one(self, number):  # noqa: C901 - a case a mode
        match self.mode:
            case "found":
                await self.look_up(0)
            case "missed":
                await self.look_up(number + KNOWN)
            case "stored" | "down":
                await self.store(number % KNOWN)
            case "cut":
                await self.store_head(number % KNOWN + KNOWN)
            case "refused":
                async with self.engine.request(f"r{number}", chain(number + KNOWN)) as request:
                    with pytest.raises(BusyError):
                        await self.engine.store(request, range(CHAIN), 0, 0)
            case "cancelled":
                task = asyncio.create_task(self.store(number % KNOWN))
                for _ in range(number % 5):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
            case "expired":
                self.gate.shut()
                await self.look_up(number + KNOWN, 0.0)
            case "reset":
                await self.store(number % KNOWN)
                if number % 10 == 0:
                    await self.engine.reset()

    async def store_head(self, number):
        await self.rest()
        async with self.engine.request(f"r{number}", chain(number)) as request:
            store = asyncio.create_task(self.engine.store(request, range(CHAIN)))
            while not self.engine.stats().waiting_stores:
                await self.engine.wait_for_progress(0.001)
            store.cancel()
            await asyncio.wait([store])
            assert await self.engine.lookup(request) == CHAIN - 1

    async def store(self, number):
        async with self.engine.request(f"r{number}", chain(number)) as request:
            request.when_released(list)
            found = await self.engine.lookup(request)
            await self.engine.load(request, range(found))
            await self.engine.store(request, range(found, CHAIN), found)

    async def look_up(self, number, timeout_s=10.0):
        async with self.engine.request(f"r{number}", chain(number)) as request:
            await self.engine.lookup(request, timeout_s)


# -- the manager that a scheduler drives --------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_manager_does_not_grow(mode, gates):
    config = config_of(mode, deferral_timeout_s=0.001)
    with TieringOffloadingSpec(config) as spec:
        manager = spec.get_manager()
        kind = ManagerRequests(manager, mode, gates[1])
        try:
            kind.begin()

            def serve(numbers):
                kind.serve(numbers)
                # Requests that never wait leave the loop behind: its queue is no growth.
                spec.runtime.runner.run(asyncio.sleep(0), DEADLINE_S)

            check_flat(*halves(serve))
        finally:
            gates[1].open()


class ManagerRequests:
    """Requests of one kind, for a synchronous manager, a step each."""

    def __init__(self, manager, mode, gate):
        self.manager, self.mode, self.gate = manager, mode, gate

    def begin(self):
        if self.mode not in {"refused", "cut"}:
            self.store(ReqContext("first"), keys_of(0))
            self.step()
            return
        self.pinning = ReqContext("pins")
        self.manager.on_new_request(self.pinning)
        keys = [key for number in range(SLOTS // CHAIN) for key in keys_of(number)]
        pinned = keys[:-1] if self.mode == "cut" else keys
        assert self.manager.prepare_store(pinned, self.pinning).keys_to_store == pinned

    def serve(self, numbers):
        for number in numbers:
            self.serve_one(ReqContext(f"r{number}"), number)
        self.gate.open()
        self.rest()
        self.step()

    def rest(self):
        while self.manager.has_pending_work():
            self.manager.wait_for_progress(0.05)
            self.step()

    def serve_one(self, ctx, number):  # noqa: C901 - a case a mode
        match self.mode:
            case "found":
                self.look_up(ctx, keys_of(0))
            case "missed":
                self.look_up(ctx, keys_of(number + KNOWN))
            case "stored" | "down":
                self.store(ctx, keys_of(number % KNOWN))
            case "cut":
                self.store_head(ctx, keys_of(number % KNOWN + KNOWN))
            case "refused":
                self.manager.on_new_request(ctx)
                assert self.manager.prepare_store(keys_of(number + KNOWN), ctx) is None
                self.manager.on_request_finished(ctx)
            case "cancelled":  # its promotions, or the copy of its store, go on
                self.manager.on_new_request(ctx)
                self.manager.lookup_many(keys_of(number % KNOWN), ctx)
                granted = self.manager.prepare_store(keys_of((number + 7) % KNOWN), ctx)
                self.manager.on_request_finished(ctx)
                self.step()
                if granted is not None:
                    self.manager.complete_store(granted.keys_to_store, ctx, number % 2 == 0)
            case "expired":
                self.gate.shut()
                self.look_up(ctx, keys_of(number + KNOWN))
            case "reset":
                self.store(ctx, keys_of(number % KNOWN))
                if number % 10 == 0:
                    self.step()
                    self.manager.reset_cache()
                    self.manager.on_reset_flushed()
        self.step()

    def look_up(self, ctx, keys):
        self.manager.on_new_request(ctx)
        if set(self.manager.lookup_many(keys, ctx)) == {LookupResult.HIT}:
            self.manager.complete_load(keys, ctx, self.manager.prepare_load(keys, ctx).generation)
        self.step()
        self.manager.on_request_finished(ctx)

    def store_head(self, ctx, keys):
        self.rest()
        self.manager.on_new_request(ctx)
        granted = self.manager.prepare_store(keys, ctx)
        self.manager.complete_store(granted.keys_to_store, ctx)
        assert self.manager.prepare_store(granted.keys_left_out, ctx) is None
        self.manager.on_request_finished(ctx)

    def store(self, ctx, keys):
        self.manager.on_new_request(ctx)
        granted = self.manager.prepare_store(keys, ctx)
        if granted is not None:
            self.manager.complete_store(granted.keys_to_store, ctx)
        self.manager.on_request_finished(ctx)

    def step(self):
        self.manager.on_schedule_end()
        for _ in self.manager.take_events():
            pass


# -- the adapter for a scheduler and its workers ------------------------------------------------


@pytest.mark.parametrize("mode", ["found", "missed", "stored", "cut", "down", "cancelled", "reset"])
def test_a_connector_does_not_grow(mode):
    tiers = {"secondary_tiers": []} if mode == "cut" else {}  # which would keep every head
    with TieringOffloadingSpec(config_of(mode, **tiers)) as spec:
        kind = ConnectorRequests(spec.get_manager(), mode)
        kind.desk.store("first", [*range(1, 7)])
        check_flat(*halves(kind.serve))


class ConnectorRequests:
    """Requests of one kind, for a connector, each served by the steps that it takes."""

    def __init__(self, manager, mode):
        self.manager, self.mode = manager, mode
        self.desk = Desk(manager=manager)

    def serve(self, numbers):
        for number in numbers:
            self.serve_one(f"r{number}", number)
        while self.desk.connector.has_pending_push_work():
            self.manager.wait_for_progress(0.05)
            self.desk.report(*self.desk.step().store_jobs)
        self.desk.step()

    def serve_one(self, req_id, number):
        desk, text = self.desk, f"{number % KNOWN:03d}"
        match self.mode:
            case "found":
                request = Request(req_id, "first")
                _, job_id, _ = desk.load(request, [*range(1, 7)])
                desk.report(job_id)
                desk.end(request)
            case "missed":
                request = Request(req_id, f"-{number}")
                assert desk.ask(request) == (0, False)
                desk.end(request)
            case "stored" | "down":
                desk.store(text, [1, 2, 3, 4], req_id=req_id)
            case "cut":
                request = Request(req_id, f"{number:08d}"[::-1] * 3)
                blocks = [*range(1, 26)]
                assert desk.ask(request) == (0, False)
                desk.allocate(request, blocks)
                meta = desk.step({request: request.num_tokens}, new={req_id: (blocks,)})
                desk.report(*meta.store_jobs)
                desk.report(*desk.step({request: 1}).store_jobs)
                desk.end(request)
            case "cancelled":
                request = Request(req_id, text)
                tokens, waits = desk.ask(request)
                if tokens and waits:
                    desk.allocate(request, [1, 2, 3, 4], load=tokens)
                meta = desk.step()
                desk.end(request)
                desk.report(*meta.load_jobs, failed=meta.load_jobs if number % 2 else ())
                if number % 3 == 0:
                    desk.store(text, [1, 2, 3, 4], req_id=f"{req_id}/other")
            case "reset":
                desk.store(text, [1, 2, 3, 4], req_id=req_id)
                if number % 10 == 0:
                    desk.connector.reset_cache()
        desk.report(*desk.step().store_jobs)


# -- tiers under a host's threads ---------------------------------------------------------------


@pytest.mark.parametrize(
    "mode", ["found", "missed", "stored", "down", "expired", "pinned", "discarded", "closed"]
)
def test_plugged_tiers_do_not_grow(mode, gates, tmp_path):
    slab = {**slab_in(tmp_path), "model": "m"}
    tier = TIERS.get(mode, slab if mode in {"pinned", "discarded"} else {"type": "example"})
    buffer = PrimaryBuffer(SLOTS, BLOCK)
    plugged = PluggedTiers([tier], memoryview(np.asarray(buffer.view)))
    kind = HostRequests(plugged, mode, gates[1])
    try:
        kind.move(plugged.store, 0)
        if mode == "closed":
            plugged.close(5.0)
        check_flat(*halves(kind.serve))
    finally:
        gates[1].open()
        plugged.close(5.0)
        buffer.release()


class HostRequests:
    """Requests of one kind of a host, one after the other."""

    def __init__(self, plugged, mode, gate):
        self.plugged, self.mode, self.gate = plugged, mode, gate

    def serve(self, numbers):
        for number in numbers:
            self.serve_one(number)
        self.gate.open()
        self.move(self.plugged.load, 0)
        while self.plugged._pins:  # until they have expired
            self.move(self.plugged.load, 0)

    def serve_one(self, number):
        match self.mode:
            case "found":
                assert self.look_up(0) == [True] * CHAIN
                self.move(self.plugged.load, 0)
            case "missed" | "closed":
                assert self.look_up(number + KNOWN) == [False] * CHAIN
                self.move(self.plugged.load, number + KNOWN)
                if self.mode == "closed":
                    self.move(self.plugged.store, number)
            case "stored" | "down":
                self.move(self.plugged.store, number % KNOWN)
            case "expired":
                self.gate.shut()
                self.look_up(number + KNOWN, 0.0)
            case "pinned":
                self.plugged.pin(keys_of(number), 0.001)
                self.plugged.pin(keys_of(0), 0.001)
                self.plugged.unpin(keys_of(0))
            case "discarded":
                self.move(self.plugged.store, number)
                assert self.plugged.discard(keys_of(number)) == []
                self.plugged.list_keys(ListPosition(), 8)

    def look_up(self, number, timeout_s=DEADLINE_S):
        return self.plugged.lookup(keys_of(number), timeout_s).result(DEADLINE_S)

    def move(self, submit, number):
        transfer = submit(keys_of(number), as_block_ids(range(CHAIN)))
        transfer.ended.result(DEADLINE_S)
        transfer.at_rest.result(DEADLINE_S)


# -- the adapters, over recorded classes of their hosts ------------------------------------------


def pages_of(number):
    return [hashlib.sha256(block_hash).hexdigest() for block_hash in chain(number)]


@pytest.mark.parametrize("mode", ["found", "missed", "stored", "down"])
def test_the_storage_backend_of_sglang_does_not_grow(mode):
    with sglang_protocol.sglang() as sglang:
        own = {"backend_name": "kv", "module_path": "m", "class_name": "c", "interface_v1": 1}
        own["tier"] = TIERS.get(mode, {"type": "example"})
        config = sglang.HiCacheStorageConfig(**sglang_protocol.RANKS, extra_config=own)
        backend = sglang_protocol.backend_class()(config, {})
        try:
            pool = sglang_protocol.HostPool(CHAIN)
            backend.register_mem_pool_host(pool)
            backend.register_mem_host_pool_v2(pool, sglang.PoolName.KV)
            backend.on_host_pools_registered()
            rows = torch.arange(CHAIN * pool.page_size)

            def serve(numbers):
                for number in numbers:
                    match mode:
                        case "found" | "missed":
                            keys = pages_of(0 if mode == "found" else number + KNOWN)
                            is_there = mode == "found"
                            assert backend.batch_exists(keys) == is_there * CHAIN
                            assert backend.batch_get_v1(keys, rows) == [is_there] * CHAIN
                        case "stored" | "down":
                            stored = backend.batch_set_v1(pages_of(number % KNOWN), rows)
                            assert stored == [mode == "stored"] * CHAIN

            assert backend.batch_set_v1(pages_of(0), rows) == [mode != "down"] * CHAIN
            check_flat(*halves(serve))
        finally:
            backend.close()


@pytest.mark.parametrize("mode", ["found", "missed", "stored", "down", "deleted"])
def test_the_adapter_of_lmcache_does_not_grow(mode, monkeypatch, tmp_path):
    lmcache = lmcache_contract.install(monkeypatch)
    buffer = PrimaryBuffer(SLOTS, BLOCK)
    slab = slab_in(tmp_path)
    params = {"tier": TIERS.get(mode, slab if mode == "deleted" else {"type": "example"})}
    memory = np.asarray(buffer.view)
    desc = lmcache.L1MemoryDesc(memory.ctypes.data, memory.nbytes, 4096)
    adapter = lmcache.KVOffloadL2Adapter(params, l1_memory_desc=desc)
    kind = LMCacheRequests(lmcache, adapter, memory, mode)
    try:
        kind.store(0)
        check_flat(*halves(kind.serve))
    finally:
        adapter.close()
        buffer.release()


class LMCacheRequests:
    """Requests of one kind, as LMCache's controllers make them."""

    def __init__(self, lmcache, adapter, memory, mode):
        self.lmcache, self.adapter, self.mode = lmcache, adapter, mode
        self.objects = [
            SimpleNamespace(data_ptr=row.ctypes.data, get_size=lambda: BLOCK)
            for row in memory[:CHAIN]
        ]
        shape = SimpleNamespace(numel=lambda: BLOCK // 2)
        self.layouts = {0: lmcache.MemoryLayoutDesc([shape], [SimpleNamespace(itemsize=2)])}

    def serve(self, numbers):
        for number in numbers:
            match self.mode:
                case "found":
                    assert self.look_up(0) == CHAIN
                    self.load(0)
                    self.adapter.submit_unlock(self.keys(0))
                case "missed":
                    assert self.look_up(number + KNOWN) == 0
                    self.load(number + KNOWN)
                case "stored" | "down":
                    self.store(number % KNOWN)
                case "deleted":
                    self.store(number)
                    self.adapter.delete(self.keys(number))

    def keys(self, number):
        return [self.lmcache.ObjectKey(h * 3, "m", 1, 0, "") for h in chain(number)]

    def store(self, number):
        self.adapter.submit_store_task(self.keys(number), self.objects)
        lmcache_contract.wait_for(self.adapter.get_store_event_fd())
        (result,) = self.adapter.pop_completed_store_tasks().values()
        assert result.is_successful() is (self.mode != "down")

    def look_up(self, number):
        task = self.adapter.submit_lookup_and_lock_task(self.keys(number), self.layouts)
        lmcache_contract.wait_for(self.adapter.get_lookup_and_lock_event_fd())
        found = self.adapter.query_lookup_and_lock_result(task)
        return sum(found.test(index) for index in range(CHAIN))

    def load(self, number):
        task = self.adapter.submit_load_task(self.keys(number), self.objects)
        lmcache_contract.wait_for(self.adapter.get_load_event_fd())
        assert self.adapter.query_load_result(task) is not None
