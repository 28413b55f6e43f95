"""Tiers of third parties that keep few blocks, each in a way of its own."""

import numpy as np

from kvoffload_async.abc.tier import AsyncTier, Direction, TierCapabilities
from kvoffload_async.errors import BlockMissingError


class BoundedTier(AsyncTier):
    """Keeps the `capacity` blocks that were stored last; makes room block by block.

    A block that a job has stored may go before the job has ended.
    """

    capabilities = TierCapabilities(exclusive=True, announces_removals=True)

    def __init__(self, capacity):
        self.blocks = {}
        self._capacity = capacity

    async def open(self, env):
        self._env = env
        self._rows = np.asarray(env.kv_view)

    async def contains(self, keys):
        return frozenset(key for key in keys if key in self.blocks)

    async def store(self, job):
        for key, slot in zip(job.keys, job.block_ids.tolist(), strict=True):
            block = await self._env.io.run(Direction.STORE, self._rows[slot].copy)
            if key in self.blocks:
                continue
            while len(self.blocks) >= self._capacity:
                victim = next(iter(self.blocks))
                del self.blocks[victim]
                self._env.blocks_evicted([victim])
            self.blocks[key] = block
        return {}

    async def load(self, job):
        failures = {}
        for index, (key, slot) in enumerate(zip(job.keys, job.block_ids.tolist(), strict=True)):
            block = self.blocks.get(key)
            if block is None:
                failures[index] = BlockMissingError("not here")
            else:
                self._rows[slot] = block
            await self._env.io.run(Direction.LOAD, int)
        return failures

    async def close(self):
        self._rows = None
