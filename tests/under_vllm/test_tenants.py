"""Tenants of vLLM's requests: under `KVOffloadSpec` they never meet; vLLM's own spec has none."""

from collections import Counter

import pytest
from engine_world import EXAMPLE
from hybrid_world import BLOCK, Hybrid
from test_spec import spec_with
from vllm.v1.kv_offload import base
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm_world import keys_of, make_config, own_id

from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.tenants import untagged
from kvoffload_async.integrations.vllm import HostTieringOffloadingSpec
from kvoffload_async.types import LookupResult, SlidingWindow

PARAMETER = {"tenants": {"a": {}, "b": {}}, "tenant_field": "kv_transfer_params.tenant"}
NO_STORE = {**PARAMETER, "unknown_tenant": "no_store"}
KEYS = keys_of(1, 2, 3)


@pytest.fixture
def tenants(pair):
    """Return what makes a `Pair` with tenants, and requests of them."""

    def make(tiers=(), extra=PARAMETER, **options):
        here = pair(tiers, extra=extra, **{"slots": 24} | options)
        here.fill(1)
        here.of = lambda tenant: request_of(here, tenant)
        return here

    return make


def request_of(here, tenant):
    request = here.request(kv_transfer_params={"tenant": tenant, "other": "b"})
    for number, key in enumerate(KEYS):
        request.set_offload_key_position(key, 16 * (number + 1))
    return request


@pytest.mark.parametrize("tiers", [(), EXAMPLE], ids=["primary", "tier"])
def test_tenants_with_the_same_prompt_have_different_blocks(tenants, tiers):
    here = tenants(tiers)
    before = here.copies()
    here.store(KEYS, [[0, 1, 2]], here.of("a"))
    here.finish_jobs()
    if tiers:
        here.manager.reset_cache()
        here.manager.on_reset_flushed()
    for other in ("b", "c", None, 7, ["a"], "a" * (1 << 20)):
        assert here.lookups(KEYS, here.of(other)) == ["MISS"] * 3
    assert here.lookups(KEYS) == ["MISS"] * 3
    here.store(KEYS, [[3, 4, 5]], here.of("b"))
    here.load(KEYS, [[6, 7, 8]], here.of("a"))
    here.load(KEYS, [[9, 10, 11]], here.of("b"))
    for tensor, old in zip(here.tensors[0], before[0], strict=True):
        assert tensor[6:9].equal(old[:3])
        assert tensor[9:12].equal(old[3:6])


def test_requests_of_unknown_tenants_share_the_default(tenants):
    here = tenants()
    here.store(KEYS, [[0, 1, 2]], here.of("c"))
    for name in (None, "default", "d"):
        assert here.lookups(KEYS, here.of(name)) == ["HIT"] * 3
    assert here.lookups(KEYS, here.of("a")) == ["MISS"] * 3


@pytest.mark.parametrize("name", [None, "c", "A", 1])
def test_nothing_of_an_unknown_tenant_is_stored_or_found_if_so_configured(tenants, name):
    here = tenants(EXAMPLE, NO_STORE)
    here.store(KEYS, [[0, 1, 2]], here.of("default"))
    request, manager = here.of(name), here.manager
    output = manager.prepare_store(KEYS, request)
    assert (output.keys_to_store, output.evicted_keys) == ([], [])
    assert output.store_spec.block_ids.tolist() == []
    assert here.lookups(KEYS, request) == ["MISS"] * 3
    assert manager.lookup_many(KEYS, request) == [LookupResult.MISS] * 3
    assert manager.lookup_prefix(KEYS, request) == (0, False)
    assert manager.get_load_source(KEYS[0], request) is CacheHitSource.HOST
    manager.touch(KEYS, request)
    manager.prefetch(KEYS, request, [SlidingWindow(KEYS, 1)])
    manager.on_request_finished(request)
    assert manager.take_left_out() == {}
    assert here.lookups(KEYS, here.of("default")) == ["HIT"] * 3


def test_a_request_that_was_not_announced_has_no_blocks(tenants):
    here = tenants()
    here.store(KEYS, [[0, 1, 2]], here.of(None))
    assert here.lookups(KEYS, base.ReqContext("other")) == ["MISS"] * 3


def test_batched_lookups_and_prefetches_are_of_the_tenant(tenants):
    here = tenants(EXAMPLE)
    here.store(KEYS, [[0, 1, 2]], here.of("a"))
    here.finish_jobs()
    here.manager.reset_cache()
    here.manager.on_reset_flushed()
    for name in ("b", "a"):
        here.manager.prefetch(KEYS, here.of(name), [SlidingWindow(KEYS, 1)])
        here.finish_jobs()
        found = 3 if name == "a" else 0
        assert here.manager.lookup_prefix(KEYS, here.of("a")) == (found, False) or name == "b"
    assert here.manager.lookup_many(KEYS, here.of("a")) == [LookupResult.HIT] * 3
    assert here.manager.lookup_prefix(KEYS, here.of("b")) == (0, False)
    request = here.of("a")
    here.load(KEYS, [[3, 4, 5]], request)
    assert here.manager.get_load_source(KEYS[0], request) is CacheHitSource.HOST


def test_keys_and_events_that_leave_have_vllms_own_hashes(tenants):
    here = tenants(slots=8, events=True)
    stored, evicted = [], []
    for first in range(10, 30, 2):
        keys = keys_of(first, first + 1)
        output = here.store(keys, [[0, 1]], here.of("a"))
        assert output.keys_to_store == keys
        assert set(output.evicted_keys) <= set(stored)
        stored += keys
        evicted += output.evicted_keys
    events = list(here.manager.take_events())
    told = {
        is_removal: [k for event in events if event.removed is is_removal for k in event.keys]
        for is_removal in (True, False)
    }
    assert sorted(told[False]) == sorted(stored)
    assert sorted(told[True]) == sorted(evicted)
    assert evicted


def test_what_a_store_has_left_out_has_vllms_own_keys(tenants):
    here = tenants()
    request = here.of("b")
    here.manager._left_out = {request.req_id: here.manager._tagged(KEYS, request)}
    assert here.manager.take_left_out() == {request.req_id: KEYS}


def test_events_of_tenants_that_this_engine_has_not_are_left_out(tenants):
    here = tenants(events=True)
    tagged = here.manager._tagged(KEYS, here.of("a"))
    assert list(map(untagged, tagged)) == KEYS
    strange = [KEYS[0], b"\0" * 3, tagged[0][:1] + b"12345678" + KEYS[1][1:]]
    events = [
        base.OffloadingEvent(keys=[*strange, tagged[2]], medium=base.Medium.CPU, removed=True),
        base.OffloadingEvent(keys=strange, medium=base.Medium.CPU, removed=False),
    ]
    assert [event.keys for event in here.manager._untagged(events)] == [[KEYS[2]]]


def test_positions_in_the_prompt_are_known_of_tagged_keys(tenants):
    here = tenants()
    request = here.of("a")
    here.store(KEYS, [[0, 1, 2]], request)
    (known,) = here.manager._running.values()
    assert {untagged(key): at for key, at in known.key_positions.items()} == {
        key: 16 * (number + 1) for number, key in enumerate(KEYS)
    }


# -- with vLLM's scheduler ----------------------------------------------------------------------


@pytest.fixture
def scheduled(tmp_path):
    """Return what makes vLLM's scheduler with our connector, for a made-up model."""
    made = []

    def make(**options):
        made.append(Hybrid(tmp_path, own_id("kvoffload-tenants"), "KVOffloadConnector", **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.slow
@pytest.mark.parametrize("field", ["cache_salt", "kv_transfer_params.tenant"])
def test_vllms_requests_hit_the_blocks_of_their_tenant_only(scheduled, field):
    world = scheduled(tenants={"a": {}, "b": {}}, tenant_field=field, unknown_tenant="no_store")
    manager = world.connector.manager
    tenants = manager.manager.tenants

    def ask(tenant):
        before = world.loaded_blocks
        named = {"salt": tenant} if field == "cache_salt" else {"params": {"tenant": tenant}}
        assert world.scheduler.reset_prefix_cache()
        request = world.arrive(range(100, 100 + 4 * BLOCK + 5), **named)
        world.run(request)
        return world.loaded_blocks - before

    def stored_of():
        keys = [key for key, _, refs in world.primary.resident() if refs >= 0]
        return Counter(tenants.names[tenants.tenant_of(key)] for key in keys)

    assert [ask("c"), ask(None), ask("c")] == [0, 0, 0]
    assert stored_of() == {}
    assert manager.manager.stats().primary.unknown_tenant_blocks >= 3 * 4
    assert ask("a") == 0
    assert stored_of().keys() == {"a"}
    assert ask("b") == 0
    assert stored_of()["a"] == stored_of()["b"]
    assert ask("a") == ask("b") > 0
    assert ask("c") == 0
    assert world.wrong_reads == 0
    assert world.compared
    assert manager.salts == {}


# -- configuration ------------------------------------------------------------------------------

A = {"tenants": {"a": {}}}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (A, 'tenant_field: missing.*"cache_salt" or "kv_transfer_params.NAME"'),
        ({"tenant_field": "cache_salt"}, "tenant_field: 'cache_salt' has no effect"),
        ({**A, "tenant_field": "salt"}, "tenant_field: 'salt' is not valid"),
        ({**A, "tenant_field": "kv_transfer_params."}, "tenant_field: .* is not valid"),
        ({**A, "tenant_field": 1}, "tenant_field: 1 is not valid"),
        ({**A, "tenant_field": "cache_salt"}, 'tenant_field: .*"kv_connector": "KVOffloadConn'),
        ({**PARAMETER, "self_describing_kv_events": True}, "self_describing_kv_events: .*a"),
        ({**PARAMETER, "tenants": {}}, "tenants: "),
        (
            {
                **PARAMETER,
                "secondary_tiers": [{"type": "fs", "root_dir": "/x", "trust_vllm_directory": True}],
            },
            "trust_vllm_directory: vLLM's blocks have no tenant",
        ),
    ],
)
def test_tenants_without_a_field_that_names_them_are_refused(extra, message):
    with pytest.raises(ConfigError, match=message):
        spec_with(**extra)


@pytest.mark.parametrize("key", ["tenants", "tenant_field", "unknown_tenant"])
def test_vllms_own_spec_refuses_tenants(serving, fs, key):
    with pytest.raises(ConfigError, match=f"{key}: vLLM's own tiering"):
        serving(fs, extra={key: "a"})
    config = make_config([], own_id("kvoffload-test-tenants"), extra={key: "a"})
    with pytest.raises(ConfigError, match=f"{key}: vLLM's own tiering"):
        HostTieringOffloadingSpec(config)
