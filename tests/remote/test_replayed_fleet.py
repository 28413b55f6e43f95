"""A replayed fleet of which a host is killed, over stores with room for half of what it needs."""

import os
from collections import Counter
from contextlib import contextmanager

import obstore
import pytest
from laboratory.fleet.run import FleetOptions, run_fleet
from servers.mooncake import MooncakeMaster
from servers.process import at_length
from servers.seaweedfs import SeaweedServer, tier_config
from servers.valkey import ValkeyServer

from kvoffload_async import OffloadConfig
from kvoffload_async.replay.source import ChatWorkload

pytestmark = [pytest.mark.servers, at_length]

HOSTS = 8
KILLED_AT = 300
REQUESTS = list(ChatWorkload())
BLOCK_BYTES = 160 << 10
"""Large enough for Mooncake, which takes no segment below 16 MiB."""
NEED_BYTES = BLOCK_BYTES * len(set().union(*REQUESTS))
ROOM_BYTES = NEED_BYTES // 2
HOST_BLOCKS = 64
"""Blocks of a host's primary, which is less than a sixth of what the store has room for."""


@contextmanager
def valkey(folder):
    bound = ("--maxmemory", ROOM_BYTES, "--maxmemory-policy", "allkeys-lru")
    with ValkeyServer(folder, *bound) as server:
        yield {"type": "valkey", "url": server.url()}


@contextmanager
def object_store(folder):
    with SeaweedServer(folder) as server:
        connection = server.connection("fleet")
        yield {**tier_config(connection), "capacity_bytes": ROOM_BYTES}
        sizes = Counter()
        for page in obstore.list(connection.open()):
            for found in page:
                sizes[found["path"].partition("/")[0]] += found["size"]  # by pass
        assert max(sizes.values()) <= 1.05 * ROOM_BYTES


@contextmanager
def mooncake(folder):
    """Its memory is the hosts': a host that is killed takes its part of the blocks along."""
    os.environ.setdefault("MC_FORCE_TCP", "1")  # read by the library
    with MooncakeMaster(folder, segment_bytes=0) as master:
        yield {"type": "mooncake", **master.options, "segment_bytes": ROOM_BYTES // HOSTS}


@pytest.mark.timeout(800)
@pytest.mark.parametrize(
    "store", [valkey, object_store, mooncake], ids=lambda store: store.__name__
)
def test_a_host_that_is_killed_costs_the_others_no_result_and_no_right_byte(store, tmp_path):
    with store(tmp_path) as tier:
        config = OffloadConfig.parse(
            {
                "cpu_bytes_to_use": HOST_BLOCKS * BLOCK_BYTES,
                "block_bytes": BLOCK_BYTES,
                "model": "replay",
                "secondary_tiers": [tier],
            }
        )
        report = run_fleet(
            config, REQUESTS, FleetOptions(size=HOSTS, kill_at=KILLED_AT), tmp_path / "own"
        )
    assert report.complaints == []
    assert [one.killed for one in report.passes] == [0, 1, 1]
    for one in report.passes:
        assert one.total.requests == len(REQUESTS)
        assert one.total.verified_blocks > one.total.corrupt_blocks == 0
        for host in one.members:
            assert host.jobs_submitted == host.job_results
    assert report.ratio("lockstep") <= report.unbounded
    for one in report.passes[1:]:
        assert one.total.hits[tier["type"]] > 0
        figures = one.total.tiers[tier["type"]]
        is_full = figures["stored_bytes"] > ROOM_BYTES or figures["failed_store_blocks"] > 0
        assert is_full, "blocks were evicted, or not stored"
