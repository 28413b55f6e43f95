"""The threads of the loop's default executor are the application's: no tier ever takes one."""

import asyncio
import contextlib

import pytest
import torch
from remote.mooncake.fakes import FakeStore
from servers.seaweedfs import SeaweedServer, tier_config
from servers.valkey import ValkeyServer

from kvoffload_async import OffloadEngine
from kvoffload_async.abc.maintenance import GcOptions, MaintenanceControl
from kvoffload_async.facade.maintenance import find_stores
from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import key_of

BLOCK_BYTES = 16384
GC = GcOptions()
HASHES = [bytes([number]) * 32 for number in range(8)]


@pytest.fixture(autouse=True)
def used(monkeypatch):
    """What ran in a default executor, of any loop; it is refused."""
    used, real = [], asyncio.base_events.BaseEventLoop.run_in_executor

    def run_in_executor(loop, executor, call, *arguments):
        if executor is None:
            used.append(call)
            raise RuntimeError("the default executor is the application's")
        return real(loop, executor, call, *arguments)

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "run_in_executor", run_in_executor)
    return used


@contextlib.contextmanager
def tier_of(kind, folder):
    if kind == "valkey":
        pytest.importorskip("redis", reason="needs the extra valkey")
        with ValkeyServer(folder, password="s3cret") as server:  # noqa: S106 - made up
            file = folder / "password"
            file.write_text(server.password)
            # A name, so that it must be resolved.
            url = f"valkey://localhost:{server.port}/0"
            yield {"type": "valkey", "url": url, "password_file": str(file)}
    elif kind == "object":
        pytest.importorskip("obstore", reason="needs the extra object")
        yield {"type": "object", "url": f"file://{folder}/objects"}
    elif kind == "s3":
        with SeaweedServer(folder) as server:
            connection = server.connection("executor", endpoint=f"http://localhost:{server.port}")
            yield tier_config(connection)
    else:
        root = {"root_dir": str(folder / "kv")} if kind != "example" else {}
        yield {"type": kind} | root | ({"capacity_bytes": "64MiB"} if kind == "slab" else {})


async def serve(config, device):
    """Store blocks, and find and load them after the primary has lost them."""
    async with OffloadEngine(config, kv_caches=device) as engine:
        async with engine.request("store", HASHES) as request:
            found = await engine.lookup(request)
            device["layer"][:] = 7
            await engine.store(request, range(found, len(HASHES)), found)
        await engine.quiesce(30.0)
        await engine.reset()
        device["layer"][:] = 0
        async with engine.request("load", HASHES) as request:
            found = await engine.lookup(request)
            return await engine.load(request, range(found))


KINDS = ["example", "fs", "slab", "valkey", "object", pytest.param("s3", marks=pytest.mark.servers)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_takes_no_thread_of_the_application(kind, used, tmp_path):
    device = {"layer": torch.zeros(len(HASHES), BLOCK_BYTES, dtype=torch.uint8)}
    with tier_of(kind, tmp_path) as tier:
        config = {"cpu_bytes_to_use": "1MiB", "model": "org/model", "secondary_tiers": [tier]}
        assert asyncio.run(serve(config, device)) == len(HASHES)
    assert used == []
    assert bool((device["layer"] == 7).all())


@pytest.mark.parametrize("kind", ["fs", "slab", "object"])
def test_the_maintenance_of_a_store_takes_none_either(kind, used, tmp_path):
    device = {"layer": torch.zeros(len(HASHES), BLOCK_BYTES, dtype=torch.uint8)}

    async def run():
        with tier_of(kind, tmp_path) as tier:
            config = {"cpu_bytes_to_use": "1MiB", "model": "org/model", "secondary_tiers": [tier]}
            await serve(config, device)
            (store,) = await find_stores(tier.get("url") or tier["root_dir"])
            control = MaintenanceControl()
            for work in (store.inspect(control), store.verify(control), store.gc(GC, control)):
                async for _ in work:
                    pass

    asyncio.run(run())
    assert used == []


def test_a_helper_process_takes_none_either(used, tmp_path):
    keys = [key_of(number) for number in range(8)]
    with contextlib.closing(FakeStore(tmp_path)) as store, TierHarness(store.tier()) as harness:
        assert harness.store(keys) == {}
        assert harness.load(keys) == {}
    assert used == []
