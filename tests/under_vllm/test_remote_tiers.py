"""Tiers behind a network under vLLM: under its own manager, and under `KVOffloadSpec`."""

import os
import signal

import pytest
from servers.valkey import ValkeyServer
from vllm_world import MODULE, keys_of

from kvoffload_async.errors import ConfigError

QUICK = {"positive_cache_ttl_s": 0, "negative_cache_ttl_s": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("redis", reason="needs the extra valkey")
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def valkey(server):
    with server.client() as client:
        client.flushall()
    return {"type": "ValkeyTier", "module_path": MODULE, "url": server.url(), **QUICK}


@pytest.fixture
def objects(tmp_path):
    pytest.importorskip("obstore", reason="needs the extra object")
    folder = tmp_path / "bucket"
    folder.mkdir()
    return {"type": "ObjectTier", "module_path": MODULE, "url": f"file://{folder}", **QUICK}


@pytest.fixture(params=["valkey", "objects"])
def remote(request):
    return {**request.getfixturevalue(request.param), "fingerprint": "made up"}


def own(tier):
    """The same tier as `KVOffloadSpec` is given it."""
    names = {"ValkeyTier": "valkey", "ObjectTier": "object"}
    return {key: tier[key] for key in tier if key != "module_path"} | {"type": names[tier["type"]]}


def test_what_one_engine_stores_another_one_loads(serving, remote):
    first, second = serving(remote), serving(remote)
    first.store(keys_of(*range(4)))
    first.finish_jobs()
    assert second.holds(keys_of(*range(4)))
    assert second.tier.locality.value == "REMOTE"


def test_engines_with_other_weights_share_nothing(serving, remote):
    first, second = serving(remote), serving({**remote, "fingerprint": "of others"})
    first.store(keys_of(1))
    first.finish_jobs()
    assert second.load(keys_of(1)) == {}


def test_blocks_of_unknown_content_are_not_served_to_engines_that_know_theirs(serving, valkey):
    first = serving(valkey)
    first.store(keys_of(1))
    first.finish_jobs()
    assert serving({**valkey, "fingerprint": "made up"}).load(keys_of(1)) == {}
    assert first.holds(keys_of(1))


def test_a_slab_before_it_answers_first(serving, slab, remote):
    world = serving(slab, remote)
    world.store(keys_of(*range(4)))
    world.finish_jobs()
    world.store(keys_of(*range(10, 18)))
    world.finish_jobs()
    assert world.holds(keys_of(*range(4)))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"locality": "LOCAL"}, "locality: 'LOCAL' is not for"),
        ({"trust_vllm_directory": True}, "trust_vllm_directory"),
        ({"run_config": {}}, "unknown key 'run_config'"),
        ({"min_blocks": 0}, "min_blocks: 0"),
    ],
)
def test_options_that_cannot_work_are_refused(serving, valkey, extra, message):
    with pytest.raises(ConfigError, match=message):
        serving({**valkey, **extra})


def test_under_this_packages_own_spec_engines_share_the_server(pair, remote):
    tiers = [own(remote)]
    first, second = pair(tiers), pair(tiers)
    first.fill(1)
    first.store(keys_of(1, 2), [[0, 1]])
    first.finish_jobs()
    assert second.final(keys_of(1, 2, 3)) == ["HIT", "HIT", "MISS"]
    assert pair([{**tiers[0], "fingerprint": "of others"}]).final(keys_of(1)) == ["MISS"]


def test_a_far_tier_is_asked_only_for_enough_blocks(pair, remote):
    first = pair([own(remote)])
    first.fill(1)
    first.store(keys_of(*range(6)), [list(range(6))])
    first.finish_jobs()
    second = pair([{**own(remote), "min_blocks": 4}])
    assert second.final(keys_of(1, 2, 3)) == ["MISS"] * 3
    assert second.final(keys_of(0, 1, 2, 3)) == ["HIT"] * 4


# -- a server that hangs ------------------------------------------------------------------------

PATIENT = {"call_timeout_s": 300.0, "io_timeout_s": 600.0, "probe_timeout_s": 0.5}
"""Only the probe's deadline passes within a test."""


@pytest.fixture
def hanging(valkey, server):
    """The tier's JSON, and what stops the server's process; it goes on at the end."""
    pid = server._process.pid
    yield (
        {**valkey, **PATIENT, "fingerprint": "made up", "positive_cache_ttl_s": 60},
        lambda: os.kill(pid, signal.SIGSTOP),
    )
    os.kill(pid, signal.SIGCONT)


def test_under_vllms_manager_a_hang_costs_a_load_and_a_reset_the_probes_deadline(serving, hanging):
    tier, stop = hanging
    world = serving(tier)
    world.store(keys_of(1, 2))
    world.reset()
    stop()
    assert world.load(keys_of(1, 2)) == {}, "the probe is answered from memory, the load is not"
    world.store(keys_of(3))
    world.reset()
    assert world.load(keys_of(1, 2)) == {}


def test_under_this_packages_own_spec_a_hang_costs_a_load_the_probes_deadline(pair, hanging):
    tier, stop = hanging
    here = pair([own(tier)])
    here.fill(1)
    here.store(keys_of(1, 2), [[0, 1]])
    here.finish_jobs()
    here.manager.reset_cache()
    here.manager.on_reset_flushed()
    stop()
    assert here.final(keys_of(1, 2)) == ["MISS"] * 2


@pytest.mark.parametrize("name", ["ValkeyTier", "ObjectTier", "MooncakeTier"])
def test_a_name_of_vllms_own_spec_is_refused_with_the_right_one(pair, name):
    with pytest.raises(ConfigError, match=r'\[0\]: .*use "(valkey|object|mooncake)" here'):
        pair([{"type": name, "url": "x://y"}])
