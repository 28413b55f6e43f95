"""What packs gain on a real S3 server: the tier with an object for each block, and with packs.

Run with `--benchmark-enable -s` for the measured sizes; as a plain test it is one small round. The
server needs time: `KVOFFLOAD_SERVERS=all` lets it have it. The figures belong to
docs/remote-tiers.md.
"""

import asyncio
import itertools
import statistics
import time

import pytest
from remote.object.tiers import tier_on
from servers.process import at_length
from servers.seaweedfs import SeaweedServer

from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import key_of

KIB = 1024
JOB_BLOCKS = 64
PACKS = {"alone": 0, "packed": 1 << 20}


class Side:
    """A writer and a reader of one kind, each of which remembers nothing of the other."""

    def __init__(self, connection, block_bytes, pack_bytes, jobs):
        self.jobs = jobs
        self.hosts = [
            TierHarness(
                tier_on(
                    connection, pack_bytes, negative_cache_ttl_s=60.0, connections=16,
                    call_timeout_s=60.0, job_timeout_s=300.0, probe_timeout_s=60.0,
                ),
                jobs * JOB_BLOCKS,
                block_bytes,
                timeout_s=600.0,
            )
            for _ in range(2)
        ]  # fmt: skip

    def measured(self, keys):
        """Return the seconds that storing and loading takes, and the requests of each."""
        writer, reader = self.hosts
        writer.fill(keys, range(len(keys)))
        return [
            self._timed(writer, writer.tier.store, keys, is_promotion=False),
            self._timed(reader, reader.tier.load, keys, is_promotion=True),
        ]

    def _timed(self, harness, act, keys, *, is_promotion):
        chains = [keys[at : at + JOB_BLOCKS] for at in range(0, len(keys), JOB_BLOCKS)]
        slots = iter(range(len(keys)))

        async def run():
            # As for every request, its prompt is looked up before anything is loaded or computed.
            found = await harness.tier.longest_prefixes(chains)
            assert [length >= JOB_BLOCKS - 1 for length in found] == [is_promotion] * self.jobs
            before, begun_s = harness.tier.gauges()["requests"], time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for chain in chains:
                    into = list(itertools.islice(slots, JOB_BLOCKS))
                    group.create_task(move(harness.job(chain, into, is_promotion=is_promotion)))
            return time.perf_counter() - begun_s, harness.tier.gauges()["requests"] - before

        async def move(job):
            assert await act(job) == {}

        return harness.run(run())

    def close(self):
        for host in reversed(self.hosts):
            host.close()


@at_length
@pytest.mark.bench
@pytest.mark.servers
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block_kib", [4, 16, 64, 256])
def test_jobs_with_and_without_packs(block_kib, tmp_path, request):
    is_measured = request.config.getoption("--benchmark-enable")
    jobs, rounds = (4, 5) if is_measured else (1, 1)
    numbers = itertools.count()
    took = {name: ([], []) for name in PACKS}
    with SeaweedServer(tmp_path) as server:
        for number in range(rounds):
            for name, pack_bytes in PACKS.items():
                connection = server.connection(f"{name}{number}", timeout_s=60.0)
                side = Side(connection, block_kib * KIB, pack_bytes, jobs)
                keys = [key_of(next(numbers)) for _ in range(jobs * JOB_BLOCKS)]
                try:
                    for figures, measured in zip(took[name], side.measured(keys), strict=True):
                        figures.append(measured)
                finally:
                    side.close()
    mib = jobs * JOB_BLOCKS * block_kib / KIB
    for index, way in enumerate(("store", "load")):
        rates, requests = {}, {}
        for name in PACKS:
            rates[name] = mib / statistics.median(seconds for seconds, _ in took[name][index])
            requests[name] = int(statistics.median(count for _, count in took[name][index]))
        print(  # noqa: T201 - the figure that is asked for
            f"\n{block_kib} KiB, {way}: {rates['alone']:,.0f} MiB/s alone in "
            f"{requests['alone']} requests, {rates['packed']:,.0f} packed in "
            f"{requests['packed']}, {rates['packed'] / rates['alone']:.1f} times"
        )
        assert requests["packed"] < requests["alone"]
