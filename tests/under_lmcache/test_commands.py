"""`lmcache bench l2` and `lmcache server` over this package's tiers."""

import json
import re
import urllib.request

import pytest
from servers.process import wait_until
from servers.valkey import ValkeyServer
from under_lmcache.conftest import bench_l2, plugin


def tier_of(kind, folder):
    """Return a tier's configuration."""
    return {"type": kind, "root_dir": str(folder / "kv"), "capacity_bytes": "1GiB"}


@pytest.mark.parametrize("size_kib", [64, 1024, 4096])
@pytest.mark.parametrize("kind", ["slab", "fs"])
def test_bench_l2_finds_and_verifies_every_object(tmp_path, kind, size_kib):
    adapter = plugin(tier_of(kind, tmp_path))
    figures = bench_l2(adapter, tmp_path / "figures.json", size_kib=size_kib, num_keys=16)
    assert figures["Store"]["total_success"] == figures["Load"]["total_success"] == 48
    assert figures["Lookup"]["total_success"] == 24


@pytest.mark.parametrize("size_kib", [64, 1024, 4096])
def test_bench_l2_over_valkey(tmp_path, size_kib):
    with ValkeyServer(tmp_path) as server:
        adapter = plugin({"type": "valkey", "url": server.url()})
        figures = bench_l2(adapter, tmp_path / "figures.json", size_kib=size_kib, num_keys=16)
    assert figures["Store"]["total_success"] == figures["Load"]["total_success"] == 48
    assert figures["Lookup"]["total_success"] == 24


def test_bench_l2_over_several_tiers_and_with_many_calls_at_once(tmp_path):
    tiers = [{"type": "example"}, tier_of("slab", tmp_path)]
    options = {"size_kib": 256, "num_keys": 8, "in_flight": 8}
    figures = bench_l2(plugin(*tiers), tmp_path / "figures.json", **options)
    assert figures["Store"]["total_success"] == figures["Load"]["total_success"] == 192


def checksums(printed, request):
    return re.findall(rf"\[seq {request}/warm\] CHECKSUM: (\w+)", printed)


@pytest.mark.parametrize("kind", ["slab", "fs"])
def test_a_killed_server_serves_every_chunk_with_the_same_checksums(serve, tmp_path, kind):
    adapter = plugin(tier_of(kind, tmp_path))
    server = serve(adapter)
    before = server.bench(3)
    assert before.count("CHECKSUM MATCH OK") == 3, before
    wait_until(lambda: stored_blocks(server) == 24)
    server.kill()
    again = serve(adapter)
    after = again.bench(3)
    assert after.count("/cold] LOOKUP: 8/8 chunks hit") == 3, after
    assert after.count("/warm] LOOKUP: 8/8 chunks hit") == 3, after
    assert [checksums(before, n) for n in range(3)] == [checksums(after, n) for n in range(3)]
    (store,) = status_of(again)["stores"]
    assert store["tiers"][0]["failed_blocks"] == 0


@pytest.mark.parametrize("hangs_while", ["loading", "storing"])
def test_a_tier_that_hangs_holds_up_no_request_beyond_its_deadline(serve, tmp_path, hangs_while):
    """LMCache's bench gives a lookup up after 2.5 s, and a store or a load after 10 s."""
    deadlines = {"call_timeout_s": 0.3, "probe_timeout_s": 0.3, "io_timeout_s": 0.6}
    with ValkeyServer(tmp_path) as valkey:
        hangs = {"type": "valkey", "url": valkey.url(), **deadlines}
        adapter = plugin(hangs, tier_of("fs", tmp_path), lookup_timeout_s=2)
        server = serve(adapter)
        known = 3 if hangs_while == "loading" else 1
        before = server.bench(known)
        wait_until(lambda: stored_blocks(server, "fs") == 8 * known)
        server.kill()
        again = serve(adapter)
        again.bench(1)  # opens the tiers
        valkey.freeze()
        after = again.bench(3)
        if hangs_while == "storing":
            assert after.count("CHECKSUM MATCH OK") >= 2, after
            wait_until(lambda: stored_blocks(again, "fs") >= 16)
        else:
            # What was being loaded from the tier when it hung is a miss.
            assert after.count("/cold] LOOKUP: 8/8 chunks hit") >= 2, after
            assert after.count("/warm] LOOKUP: 8/8 chunks hit") == 3, after
            assert [checksums(before, n) for n in range(3)] == [
                checksums(after, n) for n in range(3)
            ]
        assert "LOOKUP timeout" not in after
        (store,) = status_of(again)["stores"]
        frozen, works = store["tiers"]
        assert frozen["gauges"]["timeouts"] > 0
        assert (works["failed_blocks"], works["overdue_jobs"]) == (0, 0)


def status_of(server):
    """Return the adapter's part of the server's status."""
    with urllib.request.urlopen(f"http://localhost:{server.http_port}/status", timeout=10) as one:
        status = json.load(one)
    return next(_adapters(status))


def stored_blocks(server, name=None):
    tiers = [tier for store in status_of(server)["stores"] for tier in store["tiers"]]
    return sum(tier["stored_blocks"] for tier in tiers if name in {None, tier["name"]})


def _adapters(node):
    if isinstance(node, dict):
        if node.get("type") == "KVOffloadL2Adapter":
            yield node
        node = list(node.values())
    if isinstance(node, list):
        for one in node:
            yield from _adapters(one)


def test_a_wrong_configuration_ends_the_server_with_a_message(serve, tmp_path):
    adapter = plugin({**tier_of("slab", tmp_path), "capacity_byte": 1})
    with pytest.raises(RuntimeError, match=r"tier\[0\]: .*capacity_byte.*did you mean"):
        serve(adapter)
