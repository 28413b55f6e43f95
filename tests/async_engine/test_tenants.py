"""Tenants share an engine and its tiers, and no block."""

import asyncio
import random

import pytest
from async_engine.worlds import SCRIPTED, found, hashes, key, on_loop, opened, turns
from async_engine.worlds import register as register_tier
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload_async.errors import ConfigError, StateError
from kvoffload_async.facade.tenants import untagged

TENANTS = {"a": {}, "b": {}}
HOSTILE = [None, "nobody", 7, b"a", "x" * (1 << 20), ["a"], "\udcff"]


@pytest.fixture(autouse=True)
def _scripted(monkeypatch):
    register_tier(monkeypatch)


async def put(world, text, tenant, first=0):
    blocks = range(first, first + len(text))
    world.fill(hashes(text), blocks)
    async with world.engine.request("put", hashes(text), tenant=tenant) as request:
        stored = await world.during(world.engine.store(request, list(blocks)))
    await world.calm()
    return stored


async def hits(world, text, tenant):
    async with world.engine.request("get", hashes(text), tenant=tenant) as request:
        return await world.during(world.engine.lookup(request))


@on_loop
async def test_a_tenant_finds_its_own_blocks_alone():
    async with opened(slots=12, tiers=[SCRIPTED], tenants=TENANTS) as world:
        assert await put(world, "abc", "a") == 3
        assert [await hits(world, "abc", name) for name in ("a", "b", None)] == [3, 0, 0]
        await world.during(asyncio.create_task(world.engine.reset()))  # the tier has them
        assert [await hits(world, "abc", name) for name in ("b", "default", "a")] == [0, 0, 3]
        stats = world.engine.stats().primary.tenants
        assert {name: each.stored_blocks for name, each in stats.items()} == {
            "default": 0,
            "a": 3,
            "b": 0,
        }
        await world.check_rest()


@on_loop
@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
async def test_an_unknown_tenant_is_the_default_or_stores_nothing(name):
    async with opened(slots=9, tenants=TENANTS) as world:
        assert await put(world, "ab", name) == 2
        assert [await hits(world, "ab", each) for each in ("default", name, "a")] == [2, 2, 0]
    async with opened(slots=9, tenants=TENANTS, unknown_tenant="no_store") as world:
        assert await put(world, "ab", "default") == 2
        assert await put(world, "ab", name) == 0
        async with world.engine.request("r", hashes("ab"), tenant=name, prefetch=True) as request:
            assert await world.engine.lookup(request) == 0
            assert await world.engine.store(request, [0, 1]) == 0
            assert (request.keys, request.left_out) == ((), ())
        assert world.engine.stats().primary.unknown_tenant_blocks == 4


@on_loop
async def test_generations_and_tenants_go_together():
    async with opened(slots=9, tenants=TENANTS, generation="g") as world:
        chain = [f"block {number}".encode() for number in range(2)]
        async with world.engine.request("put", chain, tenant="a") as request:
            assert await world.during(world.engine.store(request, [0, 1])) == 2
        for generation, count in ("h", 0), ("g", 2):
            world.engine.invalidate(generation)
            async with world.engine.request("get", chain, tenant="a") as request:
                assert await world.engine.lookup(request) == count


@on_loop
async def test_a_tenant_is_named_only_where_there_are_tenants():
    async with opened() as world:
        with pytest.raises(ConfigError, match="tenant: there are no tenants"):
            await hits(world, "a", "a")
        with pytest.raises(ConfigError, match="tenant: there are no tenants"):
            world.engine.cache.pin(hashes("a"), 1, tenant="a")
        assert world.engine.driver.tenants is None
        assert world.engine.stats().primary.tenants == {}
    async with opened(slots=9, tenants=TENANTS) as world:
        with pytest.raises(StateError, match="tenant: 'c' is not valid; give one of default, a, b"):
            world.engine.cache.pin(hashes("a"), 1, tenant="c")
        with pytest.raises(StateError, match="too short"):
            await world.engine.request("r", [b""]).__aenter__()
        with pytest.raises(StateError, match="too long"):
            await world.engine.request("r", [bytes(85)]).__aenter__()


@on_loop
async def test_the_cache_is_managed_by_tenant():
    async with opened(slots=24, tiers=[SCRIPTED], tenants=TENANTS) as world:
        cache = world.engine.cache
        for tenant in TENANTS:
            await put(world, "abc", tenant)
        assert cache.pin(hashes("abc"), 60, tenant="a") == 2  # a quarter of its 8 slots
        assert cache.unpin(hashes("abc"), tenant="b") == 0
        assert cache.unpin(hashes("abc"), tenant="a") == 2
        listed = await world.during(cache.list_keys("scripted", tenant="b"))
        assert sorted(map(untagged, listed.keys)) == [one + bytes(4) for one in hashes("abc")]
        await world.during(cache.delete(hashes("a"), tenant="a"))
        count = await world.during(cache.count(hashes("abc"), tenant="a"))
        assert count.done == {"primary": 2, "scripted": 2}
        report = await world.during(cache.delete(tenant="a"))
        assert report.is_complete
        assert report.done == {"primary": 2, "scripted": 0}
        count = await world.during(cache.count(hashes("abc"), tenant="a"))
        assert count.done == {"primary": 0, "scripted": 0}
        assert [await hits(world, "abc", name) for name in ("a", "b")] == [0, 3]
        with pytest.raises(StateError, match="name the tenant"):
            await cache.delete()
        await world.check_rest()


@on_loop
async def test_all_blocks_of_a_tenant_are_deleted_that_only_a_tier_has():
    async with opened(slots=9, tiers=[SCRIPTED], tenants=TENANTS) as world:
        for first in "xyz":
            await put(world, first + "bc", "a")
        await put(world, "abc", "b")
        report = await world.during(world.engine.cache.delete(tenant="a"))
        assert report.done == {"primary": 3, "scripted": 6}
        assert len(world.tiers[0].blocks) == 3
        assert await hits(world, "abc", "b") == 3
        await world.check_rest()


@on_loop
async def test_events_and_timelines_name_the_tenant():
    async with opened(slots=9, tiers=[SCRIPTED], tenants=TENANTS, explain_requests=4) as world:
        seen = []

        async def read():
            async for event in world.engine.events():
                seen.append(event)  # noqa: PERF401 - read while it goes on

        reader = asyncio.create_task(read())
        await turns()
        await put(world, "ab", "a")
        await put(world, "ab", "b")
        keys = {key("a"), key("ab")}
        for tenant in TENANTS:
            own = [event for event in seen if event.tenant == tenant]
            assert {each for event in own for each in event.keys} == keys
        assert str(world.engine.explain("put")).startswith("request put of tenant b: ended")
        late = [event async for event in _first(world.engine.events(), 2)]
        assert sorted(event.tenant for event in late) == ["a", "b"]
        assert [event.restarts for event in late] == [True, False]
    await reader


async def _first(events, count):
    async for event in events:
        yield event
        count -= 1
        if not count:
            break


@given(st.lists(st.tuples(st.sampled_from("pgd"), st.sampled_from("abx"), st.integers(0, 3))))
@settings(max_examples=40, deadline=None)
def test_no_block_is_ever_another_tenants_hit(steps):
    prompts = ["klm", "kln", "uvw", "zz"]

    @on_loop
    async def check():
        stored = set()
        async with opened(slots=12, tiers=[SCRIPTED], tenants=TENANTS) as world:
            for what, name, number in steps:
                tenant, text = ("default" if name == "x" else name), prompts[number]
                heads = {text[: i + 1] for i in range(len(text))}
                if what == "p":
                    await put(world, text, name)
                    stored |= {(tenant, head) for head in heads}
                elif what == "d":
                    await world.during(world.engine.cache.delete(tenant=tenant))
                    stored = {each for each in stored if each[0] != tenant}
                    await world.during(asyncio.create_task(world.engine.reset()))
                else:
                    own = sum((tenant, head) in stored for head in heads)
                    assert await hits(world, text, name) == own
            await world.check_rest()

    check()


@on_loop
async def test_a_flood_leaves_the_hits_of_others():
    tenants = {"a": {"quota_bytes": 4096 * 16}, "b": {}}
    chance = random.Random(47)
    with_flood, without = [0, 0], [0, 0]
    for counts, flood in (with_flood, 100), (without, 0):
        chance.seed(47)
        async with opened(slots=64, tenants=tenants) as world:
            for _ in range(40):
                text = chance.choice("klmnopqr") * 3
                counts[0] += await hits(world, text, "b")
                counts[1] += 3
                await put(world, text, "b")
                for number in range(flood * 16 // 40 // 10):
                    await put(world, f"{chance.random():.8f}", "a", first=3 + number % 2)
            assert world.engine.stats().primary.tenants["a"].used_slots <= 16
    assert abs(with_flood[0] - without[0]) <= without[0] / 100
    assert without[0] > 60


@on_loop
async def test_many_unknown_names_leave_nothing_behind():
    async with opened(slots=9, tenants=TENANTS) as world:
        for number in range(50_000):
            async with world.engine.request(f"r{number}", [], tenant=f"name-{number}"):
                pass
            if not number % 1000:
                await asyncio.sleep(0)
        assert list(world.engine.stats().primary.tenants) == ["default", "a", "b"]
        assert not world.core.requests
        await put(world, "ab", "a")
        assert await found(world, "ab") == 0
        await world.check_rest()
