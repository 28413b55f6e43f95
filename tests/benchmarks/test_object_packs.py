"""What packing the blocks of a job into one object would gain, on a real S3 server, and would cost.

Run with `--benchmark-enable -s` for the measured sizes; as a plain test it is one small round. The
server needs time: `KVOFFLOAD_SERVERS=all` lets it have it. The
figures belong to docs/remote-tiers.md, which says why there are no packs.
"""

import asyncio
import statistics
import time

import obstore
import pytest
from servers.process import at_length
from servers.seaweedfs import SeaweedServer

KIB = 1024
JOB_BLOCKS = 64
AT_ONCE = 16


async def _all(calls):
    gate = asyncio.Semaphore(AT_ONCE)

    async def run(call):
        async with gate:
            return await call()

    begun_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for call in calls:
            group.create_task(run(call))
    return time.perf_counter() - begun_s


async def _get(store, name):
    return await (await obstore.get_async(store, name)).bytes_async()


async def measured(store, folder, object_bytes, count):
    """Return the seconds that storing and loading this many objects take."""
    content = bytes(object_bytes)
    names = [f"{folder}/{number}" for number in range(count)]
    put_s = await _all(
        [
            lambda name=name: obstore.put_async(
                store, name, content, mode="create", use_multipart=False
            )
            for name in names
        ]
    )
    return put_s, await _all([lambda name=name: _get(store, name) for name in names])


@at_length
@pytest.mark.bench
@pytest.mark.servers
@pytest.mark.parametrize("block_kib", [4, 16, 64])
def test_a_job_in_one_object_beside_an_object_for_each_block(block_kib, tmp_path, request):
    is_measured = request.config.getoption("--benchmark-enable")
    jobs, rounds = (4, 5) if is_measured else (1, 1)
    took_s = {1: ([], []), JOB_BLOCKS: ([], [])}
    with SeaweedServer(tmp_path) as server:
        store = server.connection("packs", timeout_s=60.0).open()
        for number in range(rounds):
            for blocks, (puts, gets) in took_s.items():
                count = jobs * JOB_BLOCKS // blocks
                folder = f"{number}/{blocks}"
                put_s, get_s = asyncio.run(measured(store, folder, blocks * block_kib * KIB, count))
                puts.append(put_s)
                gets.append(get_s)
    mib = jobs * JOB_BLOCKS * block_kib / KIB
    rates = {
        blocks: [mib / statistics.median(seconds) for seconds in both]
        for blocks, both in took_s.items()
    }
    for name, single, packed in zip(("put", "get"), rates[1], rates[JOB_BLOCKS], strict=True):
        print(  # noqa: T201 - the figure that is asked for
            f"\n{block_kib} KiB, {name}: {single:,.0f} MiB/s alone, {packed:,.0f} packed, "
            f"{packed / single:.1f} times"
        )
    assert all(rate > 0 for pair in rates.values() for rate in pair)
