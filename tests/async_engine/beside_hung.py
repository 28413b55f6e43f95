"""What an engine must do beside a tier that hangs; see `worlds`."""

import numpy as np
from async_engine.worlds import FAR_S, PAGE_BYTES, SLOT_BYTES, content, hashes, jump

STORED, PROMOTED = ("nmpo", "qrst", "uvwx"), "P"
"""Texts that nobody else has."""


async def check_work_beside_the_hung_tier(world, calls, first_block):
    """The other tier takes what is stored, and gives what it has, once the calls have ended."""
    for _ in range(8):  # each of a request's calls may wait until its deadline
        await world.calm()
        if all(call.done() for call in calls):
            break
        await jump()
    else:
        raise AssertionError("a call does not end")
    (tier,) = world.healthy.values()
    primary = world.core.primary
    hung = [tier for index, tier in enumerate(world.core.tiers) if index not in world.healthy]
    for text in STORED:
        if not primary.drops_pending:
            await jump()  # until it is overdue, the one that hangs is waited for
            await world.calm()
        left = primary.num_slots - sum(t.promotion_slots + t.cascading_blocks for t in hung)
        assert primary.counts["free"] + primary.counts["idle"] >= left
        await _check_store(world, tier, text[:left], first_block)
        await jump()  # what has begun in the one that hangs is overdue
        await world.calm()
    await _check_promotion(world, tier, first_block)


async def _check_store(world, tier, text, first_block):
    blocks = list(range(first_block, first_block + len(text)))
    label = (world.engine.driver.generation.label or "").encode()
    world.fill([block_hash + label for block_hash in hashes(text)], blocks)
    async with world.engine.request("beside", hashes(text)) as request:
        assert await world.during(world.engine.store(request, blocks)) == len(text)
        assert not request.left_out
    await world.calm()
    assert tier.blocks.keys() >= set(request.keys)


async def _check_promotion(world, tier, block):
    label = (world.engine.driver.generation.label or "").encode()
    (block_hash,) = hashes(PROMOTED)
    async with world.engine.request("beside", [block_hash]) as request:
        row = np.zeros(SLOT_BYTES, dtype=np.uint8)
        row[:PAGE_BYTES] = content(block_hash + label)
        tier.blocks[request.keys[0]] = row
        if tier.capabilities.exclusive:
            tier.env.blocks_appeared(request.keys)
        assert await world.during(world.engine.lookup(request, FAR_S)) == 1
        assert await world.during(world.engine.load(request, [block])) == 1
        assert world.holds([block_hash + label], [block])
