"""What is particular of the `mooncake` tier, on a real master."""

import os
import signal
import socket
import struct
from pathlib import Path

import numpy as np
import pytest
from remote.mooncake.fakes import children, helper_of, is_joined, restart
from servers.mooncake import MooncakeMaster
from servers.process import wait_until

from kvoffload_async import ConfigError, SecondaryTierFactory
from kvoffload_async.errors import (
    TierClosedError,
    TierError,
    TierFullError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.testing.harness import TierHarness, key_of
from kvoffload_async.tiers.files.digests import IntegrityKey
from kvoffload_async.tiers.mooncake.tier import MooncakeTier

pytest.importorskip("mooncake.store", reason="needs the extra mooncake", exc_type=ImportError)

K = [key_of(number) for number in range(40)]
SLOT_BYTES = 4096


def opened(master, **options):
    return TierHarness(MooncakeTier(master.connection(**options)), 64, SLOT_BYTES)


def listening_ports(pid):
    """Return the ports that a process accepts TCP connections on."""
    links = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [row.split() for name in ("tcp", "tcp6") for row in net_rows(pid, name)]
    return [
        int(row[1].rpartition(":")[2], 16)
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in links
    ]


def net_rows(pid, name):
    return Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]


def damage(tier, key, master):
    store, name = master.host.store, tier._names([key])[0]
    value = np.frombuffer(store.get(name), dtype=np.uint8).copy()
    value[-1] ^= 1
    assert store.remove(name, True) == store.put(name, value.tobytes()) == 0


def test_a_corrupt_block_is_read_twice_and_removed_and_the_others_are_loaded(master):
    with opened(master) as harness:
        harness.store(K[:3])
        damage(harness.tier, K[1], master)
        assert list(harness.load(K[:3])) == [1]
        gauges = harness.tier.gauges()
        assert gauges["read_again"] == gauges["corrupt"] == gauges["removed"] == 1
        assert harness.store(K[:3]) == {}
        assert harness.load(K[:3]) == {}


def test_a_probe_of_many_keys_is_one_call(master):
    with opened(master) as harness:
        harness.store(K[:8])
        before = harness.tier.gauges()["requests"]
        assert harness.contains(K) == frozenset(K[:8])
        assert harness.tier.gauges()["requests"] == before + 1


def test_tiers_with_other_integrity_keys_share_nothing(master):
    key = IntegrityKey(bytes(range(32)))
    with opened(master, integrity_key=key) as keyed, opened(master) as plain:
        keyed.store(K[:1])
        assert plain.contains(K[:1]) == frozenset()
        assert keyed.load(K[:1]) == {}


def test_a_key_without_room_in_a_header_fails_alone(master):
    with opened(master) as harness:
        long = type(K[0])(bytes(300))
        (failure,) = harness.store([long, K[0]]).values()
        assert type(failure) is TierError
        assert "too long" in str(failure)
        assert list(harness.load([K[0], long])) == [1]


def test_a_full_store_fails_blocks_as_full(tmp_path):
    with MooncakeMaster(tmp_path, segment_bytes=16 << 20) as small:
        tier = MooncakeTier(small.connection())
        with TierHarness(tier, 40, 1 << 20) as harness:
            failures = harness.store(K)
            assert failures
            assert {type(error) for error in failures.values()} == {TierFullError}


def test_a_dead_master_fails_jobs_as_a_whole(own_master):
    with opened(own_master) as harness:
        harness.store(K[:2])
        own_master.kill()
        with pytest.raises(TierUnavailableError):
            harness.load(K[:2])
        with pytest.raises(TierUnavailableError):
            harness.contains(K[:2])
        assert harness.tier.gauges()["failed"] == 2


def test_a_master_that_is_not_there_is_unavailable(own_master):
    tier = MooncakeTier(own_master.connection())
    own_master.kill()
    with pytest.raises(TierUnavailableError, match=r"cannot be reached \(.*refused"):
        TierHarness(tier)


def test_bytes_that_abort_the_library_cost_the_tier_alone(master):
    with opened(master) as harness:
        assert harness.store(K[:2]) == {}
        helper = helper_of(harness.tier)
        for port in listening_ports(helper.pid):
            with socket.create_connection(("127.0.0.1", port)) as link:
                link.sendall(struct.pack("<Q", 4) + b"1234")
        wait_until(lambda: helper.why_ended)
        restart(harness)
        assert helper.status == -signal.SIGABRT
        assert harness.load(K[:2]) == {}


def test_a_master_that_freezes_costs_calls_the_response_timeout_and_is_joined_again(own_master):
    with opened(own_master, response_timeout_s=2.0) as harness:
        assert harness.store(K[:2]) == {}
        os.kill(own_master._process.pid, signal.SIGSTOP)
        for ask in (harness.contains, harness.load):
            with pytest.raises(TierUnavailableError, match=r"the store hangs|no helper"):
                ask(K[:2])
        os.kill(own_master._process.pid, signal.SIGCONT)
        if not harness.run(is_joined(harness.tier)):
            restart(harness)
        assert harness.load(K[:2]) == {}


def test_an_opening_ends_at_its_deadline_while_the_master_is_frozen(own_master):
    os.kill(own_master._process.pid, signal.SIGSTOP)
    buffer, before = PrimaryBuffer(4, SLOT_BYTES), children()
    given = {"type": "mooncake", "model": "m", "open_timeout_s": 1.0, **own_master.options}
    with pytest.raises(TierTimeoutError, match="did not open within 1 s"):
        SecondaryTierFactory.create_secondary_tier(given, buffer.view, None)
    wait_until(lambda: children() == before)
    os.kill(own_master._process.pid, signal.SIGCONT)
    assert buffer.release()


def test_a_closed_tier_says_so(master):
    with opened(master) as harness:
        tier, runner = harness.tier, harness
        assert runner.contains(K) == frozenset()
    with pytest.raises(TierClosedError, match="mooncake at"):
        tier._opened()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("master", "host"),
        ("master", "host:port"),
        ("metadata_url", "host"),
        ("host", ""),
        ("segment_bytes", -1),
        ("segment_bytes", False),
        ("segment_bytes", "15MiB"),
        ("protocol", "udp"),
        ("rdma_devices", 1),
        ("replicas", 0),
        ("buffer_bytes", 0),
        ("buffer_bytes", 511),
        ("call_timeout_s", 0),
        ("integrity_key_file", "relative"),
    ],
)
def test_options_that_cannot_work_are_named(key, value):
    given = {"type": "mooncake", "model": "m", "master": "h:1", "metadata_url": "http://h/m"}
    (location,) = SecondaryTierFactory.check_config(given)
    assert (location.key, location.is_exclusive) == ("master", False)
    with pytest.raises(ConfigError, match=key):
        SecondaryTierFactory.check_config({**given, key: value})


def test_a_manager_over_it_shares_blocks_with_another(master):
    given = {"type": "mooncake", "model": "m", **master.options}
    views = [memoryview(bytearray(4 * SLOT_BYTES)).cast("B", (4, SLOT_BYTES)) for _ in range(2)]
    managers = [SecondaryTierFactory.create_secondary_tier(given, view, None) for view in views]
    assert [manager.tier.describe() for manager in managers] == [
        f"mooncake at {given['master']}"
    ] * 2
    for manager in managers:
        assert manager.shutdown().is_clean
