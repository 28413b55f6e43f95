"""A far tier that is asked only for much, behind one that has to be probed."""

import asyncio

import pytest
from async_engine.worlds import PROBED, Tier, hashes, key, on_loop, opened, register, turns
from scripted_tier import Operation

from kvoffload_async.abc.tier import TierCapabilities
from kvoffload_async.types import Locality


class FarTier(Tier):
    """Behind a network."""

    def __init__(self):
        super().__init__(probed=True)
        self.capabilities = TierCapabilities(exclusive=False, locality=Locality.REMOTE)


@pytest.fixture(autouse=True)
def far(monkeypatch):
    register(monkeypatch, "far", FarTier)


def probed(tier):
    return [[*call.keys] for call in tier.parked if call.kind is Operation.CONTAINS]


@on_loop
async def test_it_waits_for_what_the_near_tier_finds_out_about_the_rest_of_a_shared_prefix():
    tiers = [PROBED, {"type": "far", "min_blocks": 4}]
    async with opened(tiers=tiers) as world:
        near, far = world.tiers
        async with (
            world.engine.request("head", hashes("ab")) as head,
            world.engine.request("long", hashes("abcd")) as long,
            world.engine.request("other", hashes("xy")) as other,
        ):
            assert await world.during(world.engine.lookup(head)) == 0
            search = asyncio.create_task(world.engine.lookup(long))
            await turns()
            assert probed(near) == [[key("abc"), key("abcd")]]
            # Steps of others change nothing.
            later = asyncio.create_task(world.engine.lookup(other))
            await turns()
            assert probed(far) == []
            assert not search.done()
            near.finish(near.parked[0])
            await turns()
            assert probed(far) == [[key(text) for text in ("a", "ab", "abc", "abcd")]]
            assert await world.during(search) == 0
            assert await world.during(later) == 0


@on_loop
async def test_what_the_near_tier_has_after_all_lets_the_search_end():
    tiers = [PROBED, {"type": "far", "min_blocks": 4}]
    async with opened(tiers=tiers) as world:
        near, far = world.tiers
        await world.put("cdef", "seed")
        async with (
            world.engine.request("head", hashes("ab")) as head,
            world.engine.request("long", hashes("abcd")) as long,
        ):
            near.blocks.update({key(text): near.blocks[key("c")] for text in ("abc", "abcd")})
            assert await world.during(world.engine.lookup(head)) == 0
            assert await world.during(world.engine.lookup(long)) == 0
            assert probed(far) == []
